"""Accumulators of users: in Python, and in expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa

from etl.accumulator import Accumulator as PythonAccumulator
from etl.accumulator import CustomColumn, ExpressionAccumulator
from etl.errors import EtlError
from etl.operators.calling import RAISED, evaluating, failure
from etl.operators.exact import array_of_series, array_of_values, require_python_range
from etl.operators.keyed.accumulators import Accumulator, Partials, States
from etl.operators.keyed.columns import Flags, Ids, state_column
from etl.operators.keyed.handles import Held, ValueColumn
from etl.operators.keyed.key_index import Numbered
from etl.transformation import ANCHOR, Transformation

_GROUP = "__etl_group"


class Custom(Accumulator):
    """What accumulators of users have in common: they are given all rows of a key.

    Args:
        column: What was declared.
        transformation: Whom to name in errors.
    """

    def __init__(self, column: CustomColumn, transformation: Transformation) -> None:
        super().__init__(column.name, column.type, column.inputs)
        self._transformation = transformation

    @property
    def partial_names(self) -> Sequence[str]:
        """See :attr:`Accumulator.partial_names`."""
        return tuple(self.inputs)

    def partials(self, inputs: Mapping[str, pl.Series]) -> dict[str, pl.Expr]:
        """See :meth:`Accumulator.partials`."""
        return {name: pl.col(series.name).implode() for name, series in inputs.items()}


class ByExpressions(Custom):
    """States are columns that polars reduces."""

    def __init__(self, column: CustomColumn, transformation: Transformation) -> None:
        super().__init__(column, transformation)
        assert isinstance(column.accumulator, ExpressionAccumulator)
        self._accumulator = column.accumulator
        self._parts = {field.name: f"state_{field.name}" for field in column.states}
        self._types = {self._parts[field.name]: field.type for field in column.states}
        self.columns = {part: state_column(type_.arrow) for part, type_ in self._types.items()}

    def states(self, partials: Partials) -> States:
        """See :meth:`Accumulator.states`."""
        rows = pl.DataFrame([series.alias(name) for name, series in partials.items()])
        rows = rows.with_row_index(_GROUP).explode(rows.columns)
        return self._reduced(rows, self._accumulator.partials)

    def merge(self, keys: Numbered, states: States) -> None:
        """See :meth:`Accumulator.merge`."""
        self._put(keys.ids[keys.new], {part: _where(keys.new, values) for part, values in states.items()})
        known = keys.ids[~keys.new]
        if len(known):
            here = {part: column.take(known) for part, column in self.columns.items()}
            there = {part: _where(~keys.new, values) for part, values in states.items()}
            both = pl.concat([self._frame(here), self._frame(there)])
            groups = pl.Series(_GROUP, np.tile(np.arange(len(known)), 2))
            self._put(known, self._reduced(both.with_columns(groups), self._accumulator.merge))

    def result(self, ids: Ids) -> pa.Array:
        """See :meth:`Accumulator.result`."""
        states = self._frame({part: column.take(ids) for part, column in self.columns.items()})
        with evaluating(self._transformation):
            found = states.select(pl.first().alias(ANCHOR), self._accumulator.result.alias(self.name))
        return array_of_series(found[self.name], self._type)

    def _frame(self, states: States) -> pl.DataFrame:
        table = pa.table({name: states[part] for name, part in self._parts.items()})
        return cast(pl.DataFrame, pl.from_arrow(table))

    def _reduced(self, rows: pl.DataFrame, expressions: Mapping[str, pl.Expr]) -> States:
        named = [expressions[name].alias(part) for name, part in self._parts.items()]
        with evaluating(self._transformation):
            reduced = rows.group_by(_GROUP, maintain_order=True).agg(*named)
        return {part: array_of_series(reduced[part], type_) for part, type_ in self._types.items()}

    def _put(self, ids: Ids, states: States) -> None:
        for part, column in self.columns.items():
            column.put(ids, states[part])


class ByFunctions(Custom):
    """States are Python objects that a user's methods work on."""

    def __init__(self, column: CustomColumn, transformation: Transformation) -> None:
        super().__init__(column, transformation)
        assert isinstance(column.accumulator, PythonAccumulator)
        self._accumulator = column.accumulator
        self._held = Held(column.name, column.states["state"])
        self._kept = ValueColumn(self._held)
        self.columns = {"state": self._kept}

    def partials(self, inputs: Mapping[str, pl.Series]) -> dict[str, pl.Expr]:
        """See :meth:`Accumulator.partials`."""
        for name, series in inputs.items():
            require_python_range(self.name, array_of_series(series, self.inputs[name][1]))
        return super().partials(inputs)

    def take_in(self, keys: Numbered, partials: Partials) -> None:
        """See :meth:`Accumulator.take_in`: row by row, so that it does not matter where batches end."""
        of_values = [partials[name].to_list() for name in self.inputs]
        values = self._kept.values
        for id_, is_new, *rows in zip(keys.ids.tolist(), keys.new.tolist(), *of_values, strict=True):
            state = self._called(self._accumulator.zero) if is_new else _fresh(values[id_])
            for row in zip(*rows, strict=True):
                state = self._called(self._accumulator.add, state, *row)
            values[id_] = self._held.kept(state)

    def merge(self, keys: Numbered, states: States) -> None:
        """See :meth:`Accumulator.merge`."""
        values = self._kept.values
        later = cast(pl.Series, pl.from_arrow(states["state"])).to_list()
        for id_, is_new, state in zip(keys.ids.tolist(), keys.new.tolist(), later, strict=True):
            merged = state if is_new else self._called(self._accumulator.merge, _fresh(values[id_]), state)
            values[id_] = self._held.kept(merged)

    def result(self, ids: Ids) -> pa.Array:
        """See :meth:`Accumulator.result`."""
        values = self._kept.values
        results = [self._called(self._accumulator.result, _fresh(values[id_])) for id_ in ids.tolist()]
        return array_of_values(self.name, results, self._type)

    def _called(self, method: Callable[..., Any], *given: Any) -> Any:
        try:
            return method(*given)
        except EtlError:
            raise
        except RAISED as error:
            raise failure(self._transformation, method, error, {"given": given}) from error


def _fresh(state: Any) -> Any:
    """A state that a method may change and return."""
    return list(state) if type(state) is list else state


def _where(chosen: Flags, values: pa.Array) -> pa.Array:
    return values if chosen.all() else values.filter(pa.array(chosen))
