"""What an aggregation remembers of each key, one accumulator a column of its result.

polars reduces a batch to one row a key; an accumulator merges such partial results into its columns of state, all keys
at once. Sums of integers and decimals are kept in 128 bits and never pass through a float.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import polars as pl
import pyarrow as pa

from etl.errors import RecordError
from etl.keyed import SUM_DIGITS, AggregateColumn, AggregateKind
from etl.operators.exact import array_of_series
from etl.operators.keyed.columns import DecimalColumn, Flags, Ids, PrimitiveColumn, StateColumn, state_column, validity
from etl.operators.keyed.key_index import Numbered
from etl.schema import PostgresType

_COUNT = PostgresType.parse("int8")
_FLOAT = PostgresType.parse("float8")

Partials = Mapping[str, pl.Series]
"""By name of the part: one value for each key of the batch."""


class Accumulator(ABC):
    """One column of an aggregation.

    Attributes:
        name: Of the column.
        partials: By part, what polars computes of the rows of a key within a batch.
        columns: By part, what is remembered.
    """

    def __init__(self, column: AggregateColumn) -> None:
        self.name = column.name
        self.partials: dict[str, pl.Expr] = {}
        self.columns: dict[str, StateColumn] = {}
        self._type = column.type

    @abstractmethod
    def merge(self, keys: Numbered, partials: Partials) -> None:
        """Take in the partial results of a batch.

        Args:
            keys: Those of the batch.
            partials: In their order.

        Raises:
            RecordError: The result has outgrown what can be kept exactly.
        """

    @abstractmethod
    def result(self, ids: Ids) -> pa.Array:
        """The results of keys in the type of the column.

        Raises:
            RecordError: A result does not fit into it.
        """


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


def _value(column: AggregateColumn) -> pl.Expr:
    assert column.value is not None
    return column.value


class _Count(Accumulator):
    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column)
        self.partials["count"] = pl.len() if column.value is None else column.value.count()
        self.columns["count"] = self._count = PrimitiveColumn(_COUNT.arrow)

    def merge(self, keys: Numbered, partials: Partials) -> None:
        self._count.values[keys.ids] += partials["count"].cast(pl.Int64).to_numpy()
        self._count.valid[keys.ids] = True

    def result(self, ids: Ids) -> pa.Array:
        return self._count.take(ids)


class _ExactSum(Accumulator):
    """Integers and decimals."""

    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column)
        arrow = column.value_type.arrow
        scale = arrow.scale if pa.types.is_decimal128(arrow) else 0
        self._partial_type = PostgresType.parse(f"numeric({SUM_DIGITS},{scale})")
        value = _value(column)
        if pa.types.is_decimal128(arrow):
            self.partials["sum"] = value.sum()
        else:
            # polars adds up 64-bit numbers without a look at what does not fit
            self.partials["sum"] = value.cast(pl.Int128).sum().cast(pl.Decimal(SUM_DIGITS, 0))
        self.columns["sum"] = self._sum = DecimalColumn(self._partial_type.arrow)

    def merge(self, keys: Numbered, partials: Partials) -> None:
        overflown = self._sum.add(keys.ids, array_of_series(partials["sum"], self._partial_type))
        if overflown.any():
            raise RecordError(f'column "{self.name}": a sum has more than {SUM_DIGITS} digits')

    def result(self, ids: Ids) -> pa.Array:
        sums = self._sum.take(ids)
        try:
            sums.validate(full=True)
            return sums.cast(self._type.arrow)
        except pa.ArrowInvalid as error:
            raise RecordError(f'column "{self.name}": a sum does not fit into {self._type}: {error}') from error


class _FloatSum(Accumulator):
    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column)
        self.partials["sum"] = _value(column).cast(pl.Float64).sum()
        self.columns["sum"] = self._sum = PrimitiveColumn(_FLOAT.arrow)

    def merge(self, keys: Numbered, partials: Partials) -> None:
        self._sum.values[keys.ids] += partials["sum"].to_numpy()
        self._sum.valid[keys.ids] = True

    def result(self, ids: Ids) -> pa.Array:
        return self._sum.take(ids)


class _Mean(Accumulator):
    """The nearest float of the exact sum, divided by the count of what is not NULL."""

    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column)
        is_float = pa.types.is_floating(column.value_type.arrow)
        self._sum = _FloatSum(column) if is_float else _ExactSum(column)
        self.partials = {**self._sum.partials, "count": _value(column).count()}
        self._count = PrimitiveColumn(_COUNT.arrow)
        self.columns = {**self._sum.columns, "count": self._count}

    def merge(self, keys: Numbered, partials: Partials) -> None:
        self._sum.merge(keys, partials)
        self._count.values[keys.ids] += partials["count"].cast(pl.Int64).to_numpy()
        self._count.valid[keys.ids] = True

    def result(self, ids: Ids) -> pa.Array:
        sums = np.asarray(self._sum.columns["sum"].take(ids).cast(pa.float64()))
        counts = self._count.values[ids]
        with np.errstate(invalid="ignore", divide="ignore"):
            return pa.array(sums / counts, mask=counts == 0)


class _Extreme(Accumulator):
    """The lowest or highest value that is not NULL; a NaN counts only where there is nothing else."""

    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column)
        self._wanted = -1 if column.kind is AggregateKind.MIN else 1
        self._value_type = column.value_type
        self.partials["value"] = _value(column).min() if self._wanted < 0 else _value(column).max()
        self.columns["value"] = self._best = state_column(column.value_type.arrow)

    def merge(self, keys: Numbered, partials: Partials) -> None:
        values = array_of_series(partials["value"], self._value_type)
        better = ~self._best.valid[keys.ids] | (self._best.compare(keys.ids, values) == -self._wanted)
        better &= validity(values)
        if pa.types.is_floating(values.type):
            here, there = self._best.take(keys.ids), values
            here_nan, there_nan = np.isnan(here.fill_null(0.0)), np.isnan(there.fill_null(0.0))
            better = np.where(here_nan, validity(values), np.where(there_nan, ~self._best.valid[keys.ids], better))
        _put_where(better, self._best, keys.ids, values)

    def result(self, ids: Ids) -> pa.Array:
        return self._best.take(ids)


class _ByArrival(Accumulator):
    """The value of the row that came first, or last, NULL included."""

    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column)
        self._first = column.kind is AggregateKind.FIRST
        self._value_type = column.value_type
        self.partials["value"] = _value(column).first() if self._first else _value(column).last()
        self.columns["value"] = self._kept = state_column(column.value_type.arrow)

    def merge(self, keys: Numbered, partials: Partials) -> None:
        values = array_of_series(partials["value"], self._value_type)
        _put_where(keys.new if self._first else np.ones_like(keys.new), self._kept, keys.ids, values)

    def result(self, ids: Ids) -> pa.Array:
        return self._kept.take(ids)


class _ByOrder(Accumulator):
    """The value of the row that is lowest, or highest, in an order in which NULL is lowest.

    Among equals the one that came first, or last, as a stable sort would have it.
    """

    def __init__(self, column: AggregateColumn) -> None:
        super().__init__(column)
        self._first = column.kind is AggregateKind.FIRST_BY
        self._types = {"value": column.value_type, "order": column.order_type}
        order = column.order
        assert order is not None
        for part, expression in (("value", _value(column)), ("order", order)):
            ranked = expression.sort_by(order, maintain_order=True)
            self.partials[part] = ranked.first() if self._first else ranked.last()
            self.columns[part] = state_column(self._types[part].arrow)

    def merge(self, keys: Numbered, partials: Partials) -> None:
        values, orders = (array_of_series(partials[part], self._types[part]) for part in ("value", "order"))
        column = self.columns["order"]
        here, there = column.valid[keys.ids], validity(orders)
        comparison = np.where(
            here & there, column.compare(keys.ids, orders), here.astype(np.int8) - there.astype(np.int8)
        )
        better = keys.new | ((comparison > 0) if self._first else (comparison <= 0))
        _put_where(better, column, keys.ids, orders)
        _put_where(better, self.columns["value"], keys.ids, values)

    def result(self, ids: Ids) -> pa.Array:
        return self.columns["value"].take(ids)


def _put_where(chosen: Flags, column: StateColumn, ids: Ids, values: pa.Array) -> None:
    if chosen.all():
        column.put(ids, values)
    elif chosen.any():
        column.put(ids[chosen], values.filter(pa.array(chosen)))
