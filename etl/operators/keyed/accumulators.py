"""What an aggregation remembers of each key, one accumulator a column of its result.

polars reduces a batch to one row a key; an accumulator merges such partial results into its columns of state, all keys
at once. Sums of integers and decimals are kept in 128 bits and never pass through a float.
"""

from __future__ import annotations

import decimal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from decimal import Decimal

import numpy as np
import polars as pl
import pyarrow as pa

from etl.errors import RecordError
from etl.keyed import SUM_DIGITS, AggregateColumn, AggregateKind
from etl.operators.exact import array_of_series
from etl.operators.keyed.columns import (
    DecimalColumn,
    Flags,
    Ids,
    PrimitiveColumn,
    StateColumn,
    Values,
    primitive_values,
    state_column,
    validity,
)
from etl.operators.keyed.key_index import Numbered
from etl.schema import PostgresType

_COUNT = PostgresType.parse("int8")
_FLOAT = PostgresType.parse("float8")
_SUM_LIMIT = 10**SUM_DIGITS

Partials = Mapping[str, pl.Series]
"""By name of the part: one value for each key of the batch."""

States = Mapping[str, pa.Array]
"""By name of the part: values of the columns of state."""


class Accumulator(ABC):
    """One column of an aggregation.

    ::

        rows of a batch ── partials ──► one partial result a key ── states ──► in the types of what is remembered
        states of keys, of a batch or of other keys ── merge ──► remembered ── result ──► emitted

    Attributes:
        name: Of the column.
        inputs: By name, what is computed of each row, and its type.
        columns: By part, what is remembered. The parts of different aggregates have different names, so that what one
            has stored is never taken for another's.
    """

    def __init__(self, name: str, type_: PostgresType, inputs: Mapping[str, tuple[pl.Expr, PostgresType]]) -> None:
        self.name = name
        self.inputs = dict(inputs)
        self.columns: Mapping[str, StateColumn] = {}
        self._types: dict[str, PostgresType] = {}
        self._type = type_

    @property
    def partial_names(self) -> Sequence[str]:
        """The names of the partial results."""
        return tuple(self.columns)

    @abstractmethod
    def partials(self, inputs: Mapping[str, pl.Series]) -> dict[str, pl.Expr]:
        """By part, how polars reduces the rows of a key within a batch.

        Args:
            inputs: The values of the batch; their names are those of the columns that the expressions may use.
        """

    def take_in(self, keys: Numbered, partials: Partials) -> None:
        """Take in the partial results of a batch.

        Args:
            keys: Those of the batch.
            partials: In their order.

        Raises:
            RecordError: The result has outgrown what can be kept exactly.
        """
        self.merge(keys, self.states(partials))

    def states(self, partials: Partials) -> States:
        """Partial results as values of the columns.

        Raises:
            RecordError: One has outgrown what can be kept exactly.
        """
        return {part: array_of_series(partials[part], type_) for part, type_ in self._types.items()}

    @abstractmethod
    def merge(self, keys: Numbered, states: States) -> None:
        """Take in what came of further rows.

        Args:
            keys: Those of the states.
            states: In their order.

        Raises:
            RecordError: The result has outgrown what can be kept exactly.
        """

    def absorb(self, into: Ids, earlier: Ids) -> None:
        """Take the states of keys into those of others, as if their rows had come before; they are of no use then.

        Args:
            into: Keys that take in another one.
            earlier: In their order, the keys that are taken in.

        Raises:
            RecordError: The result has outgrown what can be kept exactly.
        """
        later = {part: column.take(into) for part, column in self.columns.items()}
        self.merge(Numbered(earlier, np.zeros(len(earlier), dtype=np.bool_)), later)
        for column in self.columns.values():
            column.put(into, column.take(earlier))

    @abstractmethod
    def result(self, ids: Ids) -> pa.Array:
        """The results of keys in the type of the column.

        Raises:
            RecordError: A result does not fit into it.
        """


class BuiltIn(Accumulator):
    """An accumulator for one of :class:`etl.keyed.AggregateKind`."""

    def __init__(self, column: AggregateColumn) -> None:
        value = {} if column.value is None else {"value": (column.value, column.value_type)}
        super().__init__(column.name, column.type, value)
        self.columns: dict[str, StateColumn] = {}


def accumulator_for(column: AggregateColumn) -> Accumulator:
    """A new accumulator for a column."""
    match column.kind:
        case AggregateKind.LEN | AggregateKind.COUNT:
            return _Count(column)
        case AggregateKind.SUM:
            return _FloatSum(column) if pa.types.is_floating(column.value_type.arrow) else _ExactSum(column)
        case AggregateKind.MEAN:
            return _Mean(column)
        case AggregateKind.MIN | AggregateKind.MAX:
            return _Extreme(column)
        case AggregateKind.FIRST | AggregateKind.LAST:
            return _ByArrival(column)
        case AggregateKind.FIRST_BY | AggregateKind.LAST_BY:
            return _ByOrder(column)


def _of(series: pl.Series) -> pl.Expr:
    return pl.col(series.name)


class _Count(BuiltIn):
    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column)
        self._part = str(column.kind)
        self._types[self._part] = _COUNT
        self.columns[self._part] = self._count = PrimitiveColumn(_COUNT.arrow)

    def partials(self, inputs: Mapping[str, pl.Series]) -> dict[str, pl.Expr]:
        return {self._part: _of(inputs["value"]).count() if inputs else pl.len()}

    def merge(self, keys: Numbered, states: States) -> None:
        _add(self._count, keys.ids, states[self._part])

    def result(self, ids: Ids) -> pa.Array:
        return self._count.take(ids)


def _add(column: PrimitiveColumn, ids: Ids, numbers: pa.Array) -> None:
    column.values[ids] += primitive_values(numbers)
    column.valid[ids] = True


class _ExactSum(BuiltIn):
    """Integers and decimals."""

    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column)
        arrow = column.value_type.arrow
        self.scale = arrow.scale if pa.types.is_decimal128(arrow) else 0
        self._is_integral = not pa.types.is_decimal128(arrow)
        self._types["sum"] = PostgresType.parse(f"numeric({SUM_DIGITS},{self.scale})")
        self.columns["sum"] = self._sum = DecimalColumn(self._types["sum"].arrow)

    def partials(self, inputs: Mapping[str, pl.Series]) -> dict[str, pl.Expr]:
        values = inputs["value"]
        if self._is_integral:
            # polars adds up 64-bit numbers without a look at what does not fit
            return {"sum": _of(values).cast(pl.Int128).sum().cast(pl.Decimal(SUM_DIGITS, 0))}
        # and 128-bit numbers too
        return {"sum": _of(values).sum() if _sums_fit(values, self.scale) else _of(values).implode()}

    def states(self, partials: Partials) -> States:
        sums = partials["sum"]
        if sums.dtype == pl.List:
            sums = pl.Series(sums.name, [self._exact(values) for values in sums.to_list()], pl.Decimal(38, self.scale))
        return {"sum": array_of_series(sums, self._types["sum"])}

    def merge(self, keys: Numbered, states: States) -> None:
        overflown = self._sum.add(keys.ids, states["sum"])
        if overflown.any():
            raise self._too_long()

    def _exact(self, values: list[Decimal | None]) -> Decimal:
        unscaled = sum(_unscaled(value, self.scale) for value in values if value is not None)
        if abs(unscaled) >= _SUM_LIMIT:
            raise self._too_long()
        return Decimal(unscaled).scaleb(-self.scale, _EXACT)

    def _too_long(self) -> RecordError:
        return RecordError(f'column "{self.name}": a sum has more than {SUM_DIGITS} digits')

    def result(self, ids: Ids) -> pa.Array:
        sums = self._sum.take(ids)
        try:
            sums.validate(full=True)
            return sums.cast(self._type.arrow)
        except pa.ArrowInvalid as error:
            raise RecordError(f'column "{self.name}": a sum does not fit into {self._type}: {error}') from error

    def numbers(self, ids: Ids) -> list[int]:
        """The sums as unscaled numbers."""
        pairs = zip(self._sum.high[ids].tolist(), self._sum.low[ids].tolist(), strict=True)
        return [(high << 64) + low for high, low in pairs]


def _sums_fit(values: pl.Series, scale: int) -> bool:
    """Whether no sum of these values can have too many digits."""
    low, high = values.min(), values.max()
    if low is None or high is None:
        return True
    assert isinstance(low, Decimal)
    assert isinstance(high, Decimal)
    furthest = max(abs(_unscaled(low, scale)), abs(_unscaled(high, scale)))
    return bool(furthest * len(values) < _SUM_LIMIT)


_EXACT = decimal.Context(prec=2 * SUM_DIGITS)


def _unscaled(value: Decimal, scale: int) -> int:
    return int(value.scaleb(scale, _EXACT))


class _FloatSum(BuiltIn):
    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column)
        self._types["sum"] = _FLOAT
        self.columns["sum"] = self._sum = PrimitiveColumn(_FLOAT.arrow)

    def partials(self, inputs: Mapping[str, pl.Series]) -> dict[str, pl.Expr]:
        return {"sum": _of(inputs["value"]).cast(pl.Float64).sum()}

    def merge(self, keys: Numbered, states: States) -> None:
        _add(self._sum, keys.ids, states["sum"])

    def result(self, ids: Ids) -> pa.Array:
        return self._sum.take(ids)

    def values(self, ids: Ids) -> Values:
        """The sums."""
        return self._sum.values[ids]


class _Mean(BuiltIn):
    """The sum divided by the count of what is not NULL: the nearest float, unless floats were added up."""

    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column)
        self._sum = _FloatSum(column) if pa.types.is_floating(column.value_type.arrow) else _ExactSum(column)
        self._count = PrimitiveColumn(_COUNT.arrow)
        self.columns = {"mean_sum": self._sum.columns["sum"], "mean_count": self._count}

    def partials(self, inputs: Mapping[str, pl.Series]) -> dict[str, pl.Expr]:
        return {"mean_sum": self._sum.partials(inputs)["sum"], "mean_count": _of(inputs["value"]).count()}

    def states(self, partials: Partials) -> States:
        sums = self._sum.states({"sum": partials["mean_sum"]})["sum"]
        return {"mean_sum": sums, "mean_count": array_of_series(partials["mean_count"], _COUNT)}

    def merge(self, keys: Numbered, states: States) -> None:
        self._sum.merge(keys, {"sum": states["mean_sum"]})
        _add(self._count, keys.ids, states["mean_count"])

    def result(self, ids: Ids) -> pa.Array:
        counts = self._count.values[ids]
        if isinstance(self._sum, _FloatSum):
            with np.errstate(invalid="ignore", divide="ignore"):
                return pa.array(self._sum.values(ids) / counts, mask=counts == 0)
        unit = 10**self._sum.scale
        # Python's division of integers is rounded once, whatever their size.
        pairs = zip(self._sum.numbers(ids), counts.tolist(), strict=True)
        return pa.array([total / (unit * count) if count else None for total, count in pairs], pa.float64())


class _Extreme(BuiltIn):
    """The lowest or highest value that is not NULL; a NaN counts only where there is nothing else."""

    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column)
        self._part = str(column.kind)
        self._wanted = -1 if column.kind is AggregateKind.MIN else 1
        self._types[self._part] = column.value_type
        self.columns[self._part] = self._best = state_column(column.value_type.arrow)

    def partials(self, inputs: Mapping[str, pl.Series]) -> dict[str, pl.Expr]:
        values = _of(inputs["value"])
        if pa.types.is_floating(self._best.arrow):
            # 0.0 and -0.0 are equal, and chance would decide between them
            values = pl.when(values == 0.0).then(0.0).otherwise(values)
        return {self._part: values.min() if self._wanted < 0 else values.max()}

    def merge(self, keys: Numbered, states: States) -> None:
        values = states[self._part]
        better = ~self._best.valid[keys.ids] | (self._best.compare(keys.ids, values) == -self._wanted)
        better &= validity(values)
        if pa.types.is_floating(values.type):
            here, there = self._best.take(keys.ids), values
            here_nan, there_nan = np.isnan(here.fill_null(0.0)), np.isnan(there.fill_null(0.0))
            better = np.where(here_nan, validity(values), np.where(there_nan, ~self._best.valid[keys.ids], better))
        _put_where(better, self._best, keys.ids, values)

    def result(self, ids: Ids) -> pa.Array:
        return self._best.take(ids)


class _ByArrival(BuiltIn):
    """The value of the row that came first, or last, NULL included."""

    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column)
        self._part = str(column.kind)
        self._first = column.kind is AggregateKind.FIRST
        self._types[self._part] = column.value_type
        self.columns[self._part] = self._kept = state_column(column.value_type.arrow)

    def partials(self, inputs: Mapping[str, pl.Series]) -> dict[str, pl.Expr]:
        values = _of(inputs["value"])
        return {self._part: values.first() if self._first else values.last()}

    def merge(self, keys: Numbered, states: States) -> None:
        chosen = keys.new if self._first else np.ones_like(keys.new)
        _put_where(chosen, self._kept, keys.ids, states[self._part])

    def result(self, ids: Ids) -> pa.Array:
        return self._kept.take(ids)


class _ByOrder(BuiltIn):
    """The value of the row that is lowest, or highest, in an order in which NULL is lowest.

    Among equals the one that came first, or last, as a stable sort would have it.
    """

    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column)
        assert column.order is not None
        self._first = column.kind is AggregateKind.FIRST_BY
        self.inputs["order"] = (column.order, column.order_type)
        self._parts = {name: f"{column.kind.replace(' ', '_')}_{name}" for name in self.inputs}
        self._types = {self._parts[name]: type_ for name, (_, type_) in self.inputs.items()}
        self._kept = {name: state_column(type_.arrow) for name, (_, type_) in self.inputs.items()}
        self.columns = {part: self._kept[name] for name, part in self._parts.items()}

    def partials(self, inputs: Mapping[str, pl.Series]) -> dict[str, pl.Expr]:
        ranked = {
            self._parts[name]: _of(inputs[name]).sort_by(_of(inputs["order"]), maintain_order=True) for name in inputs
        }
        return {part: one.first() if self._first else one.last() for part, one in ranked.items()}

    def merge(self, keys: Numbered, states: States) -> None:
        arrays = {name: states[part] for name, part in self._parts.items()}
        column, orders = self._kept["order"], arrays["order"]
        here, there = column.valid[keys.ids], validity(orders)
        comparison = np.where(
            here & there, column.compare(keys.ids, orders), here.astype(np.int8) - there.astype(np.int8)
        )
        better = keys.new | ((comparison > 0) if self._first else (comparison <= 0))
        for name, kept in self._kept.items():
            _put_where(better, kept, keys.ids, arrays[name])

    def result(self, ids: Ids) -> pa.Array:
        return self._kept["value"].take(ids)


def _put_where(chosen: Flags, column: StateColumn, ids: Ids, values: pa.Array) -> None:
    if chosen.all():
        column.put(ids, values)
    elif chosen.any():
        column.put(ids[chosen], values.filter(pa.array(chosen)))
