"""Whole columns at once: what Arrow's CSV reader yields, checked against the rules of :mod:`etl.sources.csv_values`.

Arrow accepts a few things that the rules refuse (``0x1f`` as an integer, ``nan(x)``, a number that rounds to
infinity, decimals beyond their precision, year 0). Each column type has a check here that is cheap when none of
them is near. A column that does not pass is converted value by value instead, so a check may be over-careful, never
careless.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from etl.schema import Field, PostgresType
from etl.sources.csv_values import FALSE_SPELLINGS, TRUE_SPELLINGS, Converter, converter_of, varchar_limit
from etl.sources.local_time import LocalTimeError, LocalTimes

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_FIRST_DAY, _LAST_DAY = date.min.toordinal() - _EPOCH_DAY, date.max.toordinal() - _EPOCH_DAY
_DAY_US = 86_400_000_000
_FIRST_US, _LAST_US = _FIRST_DAY * _DAY_US, (_LAST_DAY + 1) * _DAY_US - 1

_SPECIAL_FLOAT = r"\A[ \t]*[+-]?(?i:nan|inf|infinity)[ \t]*\z"
_ZERO = r"\A[ \t]*[+-]?[0.]+(?:[eE].*)?\z"
_HAS_ZONE = r"[ T].*(?:Z|[+-][0-9]{2}(?::?[0-9]{2})?)\z"
_UUID = r"\A[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\z"
_BYTEA = r"\A\\x(?:[0-9a-fA-F]{2})*\z"


@dataclass(frozen=True, slots=True)
class ColumnBlock:
    """One column of one block.

    Attributes:
        values: What Arrow read, in the type that was asked for.
        reread: Reads the column again as another Arrow type; None when Arrow refuses a value.
    """

    values: Any
    reread: Callable[[pa.DataType], Any]


Check = Callable[[ColumnBlock], Any]
"""Returns the column's values in their final Arrow type, or None when they must be looked at one by one."""


@dataclass(frozen=True, slots=True)
class Column:
    """How one column is read.

    Attributes:
        field: Its name and declared type.
        read_as: The Arrow type to ask Arrow's CSV reader for.
        read_near_x: The same for blocks in which the letter x stands anywhere.
        check: Accepts what Arrow read, or gives it up.
        convert: The rules, for one value.
    """

    field: Field
    read_as: pa.DataType
    read_near_x: pa.DataType
    check: Check
    convert: Converter

    @classmethod
    def of(cls, field: Field, zone: LocalTimes | None) -> Column:
        """The way to read a column of this type."""
        read_as, check = _vectorised(field.type, zone)
        read_near_x = pa.string() if pa.types.is_integer(read_as) else read_as
        return cls(field, read_as, read_near_x, check, converter_of(field.type, zone))

    def convert_all(self, text: Any) -> Any:
        """Convert texts one by one; raises :class:`InvalidValueError` at the first bad one."""
        convert = self.convert
        values = [None if value is None else convert(value) for value in text.to_pylist()]
        return pa.array(values, self.field.type.arrow)


def _usual(spellings: tuple[str, ...]) -> list[str]:
    # Arrow compares exactly; each further spelling slows it down, so the rare ones are left to the rules.
    whole = [word for word in spellings if word in _USUAL_BOOLEANS]
    return sorted({form for word in whole for form in (word, word.upper(), word.title())})


_USUAL_BOOLEANS = frozenset({"t", "true", "yes", "y", "on", "1", "f", "false", "no", "n", "off", "0"})
TRUE_TEXTS = _usual(TRUE_SPELLINGS)
FALSE_TEXTS = _usual(FALSE_SPELLINGS)


def _vectorised(type_: PostgresType, zone: LocalTimes | None) -> tuple[pa.DataType, Check]:
    if type_.is_array or type_.base in {"json", "jsonb"}:
        return pa.string(), _one_by_one
    if type_.base == "timestamptz" and zone is not None:
        return pa.string(), lambda column: _zoned(column.values, zone)
    if type_.base in _TEXT_CHECKS:
        return pa.string(), _TEXT_CHECKS[type_.base]
    limit = varchar_limit(type_) if type_.base == "varchar" else None
    if limit is not None:
        return pa.string(), lambda column: _limited(column.values, limit)
    return type_.arrow, _CHECKS.get(type_.base, _as_read)


def _as_read(column: ColumnBlock) -> Any:
    return column.values


def _one_by_one(_column: ColumnBlock) -> Any:
    return None


def _integers(width: pa.DataType) -> Check:
    """Arrow takes hexadecimal numbers for integers, so with an x near the texts are looked at first."""

    def check(column: ColumnBlock) -> Any:
        if not pa.types.is_string(column.values.type):
            return column.values
        octets = column.values.buffers()[2]
        if octets is not None and any(letter in octets.to_pybytes() for letter in (b"x", b"X")):
            return None
        try:
            return column.values.cast(width)
        except pa.ArrowInvalid:
            return column.reread(width)  # this one knows blanks around numbers

    return check


def _floats(column: ColumnBlock) -> Any:
    values = column.values
    special, zero = pc.invert(pc.is_finite(values)), pc.equal(values, 0)
    if not _any(special) and not _any(zero):
        return values
    text = column.reread(pa.string())
    if text is None:
        return None
    specials = pc.match_substring_regex(text.filter(special), _SPECIAL_FLOAT)
    zeros = pc.match_substring_regex(text.filter(zero), _ZERO)
    return values if _all(specials) and _all(zeros) else None


def _decimals(column: ColumnBlock) -> Any:
    try:
        column.values.validate(full=True)
    except pa.ArrowInvalid:
        return None
    return column.values


def _dates(column: ColumnBlock) -> Any:
    return column.values if _within(column.values.view(pa.int32()), _FIRST_DAY, _LAST_DAY) else None


def _timestamps(column: ColumnBlock) -> Any:
    return column.values if _in_calendar(column.values) else None


def _in_calendar(values: Any) -> bool:
    return _within(values.view(pa.int64()), _FIRST_US, _LAST_US)


def _within(values: Any, low: int, high: int) -> bool:
    found = pc.min_max(values).as_py()
    return found["min"] is None or (found["min"] >= low and found["max"] <= high)


def _zoned(text: Any, zone: LocalTimes) -> Any:
    has_zone = pc.match_substring_regex(text, _HAS_ZONE)
    nothing = pa.scalar(None, pa.string())
    try:
        absolute = pc.if_else(has_zone, text, nothing).cast(pa.timestamp("us", "UTC"))
        local = pc.if_else(has_zone, nothing, text).cast(pa.timestamp("us"))
        if not _in_calendar(local):
            return None
        values = pc.coalesce(zone.instants(local), absolute)
    except (pa.ArrowInvalid, LocalTimeError):
        return None
    return values if _in_calendar(values) else None


def _limited(values: Any, limit: int) -> Any:
    longest = pc.max(pc.utf8_length(values)).as_py()
    return values if longest is None or longest <= limit else None


def _uuids(column: ColumnBlock) -> Any:
    matched = pc.match_substring_regex(column.values, _UUID)
    return pc.ascii_lower(column.values) if _all(matched) else None


def _byteas(column: ColumnBlock) -> Any:
    if not _all(pc.match_substring_regex(column.values, _BYTEA)):
        return None
    # Imported here: few jobs read such columns, and it takes a tenth of a second.
    import polars as pl

    series: Any = pl.from_arrow(column.values)
    return series.str.slice(2).str.decode("hex").to_arrow().cast(pa.binary())


def _any(flags: Any) -> bool:
    return bool(pc.any(flags, min_count=0).as_py())


def _all(flags: Any) -> bool:
    return bool(pc.all(flags, min_count=0).as_py())


_CHECKS: dict[str, Check] = {
    "int2": _integers(pa.int16()),
    "int4": _integers(pa.int32()),
    "int8": _integers(pa.int64()),
    "float4": _floats,
    "float8": _floats,
    "numeric": _decimals,
    "date": _dates,
    "timestamp": _timestamps,
    "timestamptz": _timestamps,
}
_TEXT_CHECKS: dict[str, Check] = {"uuid": _uuids, "bytea": _byteas}
