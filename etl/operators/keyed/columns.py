"""Growable columns of exact values, read and written at many places at once.

Values of fixed width lie in NumPy arrays, all others as Python objects. What is put in comes out again, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from etl.errors import RecordError

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Values = npt.NDArray[Any]

_ROWS_MIN = 1024


def state_column(arrow: pa.DataType) -> ComparableColumn:
    """An empty column for values of an Arrow type."""
    if pa.types.is_decimal128(arrow):
        return DecimalColumn(arrow)
    if pa.types.is_boolean(arrow) or pa.types.is_primitive(arrow):
        return PrimitiveColumn(arrow)
    return ObjectColumn(arrow)


class StateColumn(ABC):
    """One value or NULL for each id below the room that :meth:`reserve` made.

    Attributes:
        arrow: Type of the values.
        declared: What was declared, where the Arrow type does not tell all of it.
        valid: By id, whether there is a value; False in new rows.
    """

    def __init__(self, arrow: pa.DataType, declared: str = "") -> None:
        self.arrow = arrow
        self.declared = declared
        self.valid: Flags = np.zeros(0, dtype=np.bool_)

    def reserve(self, rows: int) -> None:
        """Make room for ids below ``rows``; what is added is NULL."""
        if rows > len(self.valid):
            room = max(rows, 2 * len(self.valid), _ROWS_MIN)
            self._grow(room)
            self.valid = _grown(self.valid, room)

    @abstractmethod
    def _grow(self, room: int) -> None: ...

    @abstractmethod
    def take(self, ids: Ids) -> pa.Array:
        """The values at these ids, in their order; equal values yield equal bytes, also beneath NULLs."""

    @abstractmethod
    def put(self, ids: Ids, values: pa.Array) -> None:
        """Set the values at these ids, which differ from each other."""

    def clear(self, ids: Ids) -> None:
        """Set these ids to what they are when they are new."""
        self.put(ids, pa.nulls(len(ids), self.arrow))


class ComparableColumn(StateColumn):
    """A column whose values can be compared with others, as those of keys are."""

    @abstractmethod
    def equal(self, ids: Ids, values: pa.Array) -> Flags:
        """Whether the value at each id is that beside it; NULL equals NULL, NaN equals NaN, 0.0 equals -0.0."""

    @abstractmethod
    def compare(self, ids: Ids, values: pa.Array) -> npt.NDArray[np.int8]:
        """-1, 0 or 1 where the value at an id is lower than, equal to or higher than the one beside it.

        What is NULL on either side yields anything. NaN is higher than every other number.
        """


class PrimitiveColumn(ComparableColumn):
    """Numbers, booleans, dates and times."""

    def __init__(self, arrow: pa.DataType) -> None:
        super().__init__(arrow)
        self.values: Values = np.zeros(0, dtype=_physical(arrow))

    def _grow(self, room: int) -> None:
        self.values = _grown(self.values, room)

    def take(self, ids: Ids) -> pa.Array:
        """See :meth:`StateColumn.take`."""
        values, valid = self.values[ids], self.valid[ids]
        if not valid.all():
            values[~valid] = 0
        if pa.types.is_boolean(self.arrow):
            return pa.array(values, mask=~valid)
        return pa.Array.from_buffers(self.arrow, len(ids), [_bitmap(valid), pa.py_buffer(values)])

    def put(self, ids: Ids, values: pa.Array) -> None:
        """See :meth:`StateColumn.put`."""
        self.values[ids], self.valid[ids] = primitive_values(values), validity(values)

    def equal(self, ids: Ids, values: pa.Array) -> Flags:
        """See :meth:`ComparableColumn.equal`."""
        here, there = self.values[ids], primitive_values(values)
        same = here == there
        if here.dtype.kind == "f":
            same |= np.isnan(here) & np.isnan(there)
        return _equal(same, self.valid[ids], validity(values))

    def compare(self, ids: Ids, values: pa.Array) -> npt.NDArray[np.int8]:
        """See :meth:`ComparableColumn.compare`."""
        here, there = self.values[ids], primitive_values(values)
        if here.dtype.kind != "f":
            return _sign(here < there, here > there)
        here_nan, there_nan = np.isnan(here), np.isnan(there)
        return _sign((here < there) | (there_nan & ~here_nan), (here > there) | (here_nan & ~there_nan))


class DecimalColumn(ComparableColumn):
    """Decimals of up to 38 digits as their unscaled 128-bit numbers.

    Attributes:
        low: The lower 64 bits.
        high: The upper 64 bits, with the sign.
    """

    def __init__(self, arrow: pa.DataType) -> None:
        super().__init__(arrow)
        self.low: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.high: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def _grow(self, room: int) -> None:
        self.low, self.high = _grown(self.low, room), _grown(self.high, room)

    def take(self, ids: Ids) -> pa.Array:
        """See :meth:`StateColumn.take`."""
        valid = self.valid[ids]
        halves = np.stack([self.low[ids], self.high[ids].view(np.uint64)], axis=1)
        if not valid.all():
            halves[~valid] = 0
        return pa.Array.from_buffers(self.arrow, len(ids), [_bitmap(valid), pa.py_buffer(halves)])

    def add(self, ids: Ids, values: pa.Array) -> Flags:
        """Add to the values at these ids, where NULL counts as zero; returns where 128 bits did not suffice."""
        low, high = decimal_halves(values)
        present = validity(values)
        low, high = np.where(present, low, np.uint64(0)), np.where(present, high, np.int64(0))
        before_low, before_high = self.low[ids], self.high[ids]
        with np.errstate(over="ignore"):
            after_low = before_low + low
            after_high = before_high + high + (after_low < before_low)
        self.low[ids], self.high[ids], self.valid[ids] = after_low, after_high, True
        overflown: Flags = ((before_high ^ after_high) & (high ^ after_high)) < 0
        return overflown

    def put(self, ids: Ids, values: pa.Array) -> None:
        """See :meth:`StateColumn.put`."""
        self.low[ids], self.high[ids] = decimal_halves(values)
        self.valid[ids] = validity(values)

    def equal(self, ids: Ids, values: pa.Array) -> Flags:
        """See :meth:`ComparableColumn.equal`."""
        low, high = decimal_halves(values)
        return _equal((self.low[ids] == low) & (self.high[ids] == high), self.valid[ids], validity(values))

    def compare(self, ids: Ids, values: pa.Array) -> npt.NDArray[np.int8]:
        """See :meth:`ComparableColumn.compare`."""
        low, high = decimal_halves(values)
        here_low, here_high = self.low[ids], self.high[ids]
        same = here_high == high
        return _sign((here_high < high) | (same & (here_low < low)), (here_high > high) | (same & (here_low > low)))


class ObjectColumn(ComparableColumn):
    """Everything else: text, bytes, lists, as Python objects. Texts are ordered by code point, as in the C locale."""

    def __init__(self, arrow: pa.DataType) -> None:
        super().__init__(arrow)
        self.values: Values = np.full(0, None, dtype=object)

    def _grow(self, room: int) -> None:
        grown = np.full(room, None, dtype=object)
        grown[: len(self.values)] = self.values
        self.values = grown

    def take(self, ids: Ids) -> pa.Array:
        """See :meth:`StateColumn.take`."""
        return pa.array(self.values[ids].tolist(), self.arrow)

    def put(self, ids: Ids, values: pa.Array) -> None:
        """See :meth:`StateColumn.put`."""
        self.values[ids], self.valid[ids] = _objects(values), validity(values)

    def equal(self, ids: Ids, values: pa.Array) -> Flags:
        """See :meth:`ComparableColumn.equal`."""
        return np.asarray(self.values[ids] == _objects(values), dtype=np.bool_)

    def compare(self, ids: Ids, values: pa.Array) -> npt.NDArray[np.int8]:
        """See :meth:`ComparableColumn.compare`."""
        pairs = zip(self.values[ids].tolist(), values.to_pylist(), strict=True)
        signs = [0 if here is None or there is None else (here > there) - (here < there) for here, there in pairs]
        return np.array(signs, dtype=np.int8)


def validity(values: pa.Array) -> Flags:
    """Where there is a value."""
    if values.null_count == 0:
        return np.ones(len(values), dtype=np.bool_)
    return np.asarray(values.is_valid())


def primitive_values(values: pa.Array) -> Values:
    """The physical values of a fixed-width array; anything where they are NULL."""
    if pa.types.is_boolean(values.type):
        return np.asarray(values.fill_null(False))
    dtype = _physical(values.type)
    if len(values) == 0:
        return np.zeros(0, dtype=dtype)
    return np.frombuffer(values.buffers()[1], dtype=dtype)[values.offset : values.offset + len(values)]


def decimal_halves(values: pa.Array) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Lower and upper halves of the unscaled numbers of a decimal array; anything where they are NULL."""
    if len(values) == 0:
        return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)
    halves = np.frombuffer(values.buffers()[1], dtype=np.uint64).reshape(-1, 2)
    rows = halves[values.offset : values.offset + len(values)]
    return rows[:, 0], np.ascontiguousarray(rows[:, 1]).view(np.int64)


def _objects(values: pa.Array) -> Values:
    objects = np.empty(len(values), dtype=object)
    try:
        objects[:] = values.to_pylist()
    except (OverflowError, ValueError) as error:
        raise RecordError(f"an array has an element that Python's types cannot hold: {error}") from error
    return objects


def _physical(arrow: pa.DataType) -> np.dtype[Any]:
    if pa.types.is_boolean(arrow):
        return np.dtype(np.bool_)
    if pa.types.is_temporal(arrow):
        return np.dtype(f"i{arrow.bit_width // 8}")
    number: np.dtype[Any] = np.dtype(arrow.to_pandas_dtype())
    return number


def _grown(values: Values, room: int) -> Values:
    grown = np.zeros(room, dtype=values.dtype)
    grown[: len(values)] = values
    return grown


def _bitmap(valid: Flags) -> pa.Buffer | None:
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _equal(same: Flags, here: Flags, there: Flags) -> Flags:
    return np.where(here & there, same, here == there)


def _sign(lower: Flags, higher: Flags) -> npt.NDArray[np.int8]:
    return higher.astype(np.int8) - lower.astype(np.int8)
