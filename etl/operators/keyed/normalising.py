"""Values as the store will give them back, so that a function cannot see whether there was a restart in between.

``Decimal("1")`` in a ``numeric(12,2)`` comes back as ``Decimal("1.00")``, a time in Berlin as the same moment in UTC:
so that is what is kept from the beginning.
"""

from __future__ import annotations

import decimal
import struct
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

from etl.errors import RecordError
from etl.operators.calling import shortened
from etl.operators.exact import array_of_values, python_type
from etl.schema import PostgresType

Normaliser = Callable[[Any], Any]

_INTEGER_BITS = {"int2": 15, "int4": 31, "int8": 63}
_EXACT = decimal.Context(prec=100)
_UTC = ZoneInfo("UTC")


def normaliser(type_: PostgresType) -> tuple[type, Normaliser]:
    """The Python type that belongs to a column type, and a function that returns such a value in its stored form.

    The function raises :class:`~etl.errors.RecordError` where the value does not fit.
    """
    return (list, _array(type_)) if type_.is_array else (python_type(type_.arrow), _scalar(type_))


def _array(type_: PostgresType) -> Normaliser:
    expected, of_element = normaliser(type_.element)

    def element(value: Any) -> Any:
        if type(value) is not expected:
            raise wrong_type(value, expected, type_.element)
        return of_element(value)

    return lambda values: [None if value is None else element(value) for value in values]


def wrong_type(value: Any, expected: type, type_: PostgresType) -> RecordError:
    """The error for a value that is not exactly of the Python type that belongs to a column type."""
    return RecordError(f"{shortened(value)} is {type(value).__name__}, {type_} takes {expected.__name__}")


def _scalar(type_: PostgresType) -> Normaliser:  # noqa: C901 - a table
    def refusal(value: Any, problem: str) -> RecordError:
        return RecordError(f"{shortened(value)} {problem} {type_}")

    def integer(value: int) -> int:
        if not lowest <= value <= highest:
            raise refusal(value, "does not fit")
        return value

    def single(value: float) -> float:
        try:
            (back,) = struct.unpack("f", struct.pack("f", value))
        except OverflowError:
            back = None
        if back != value and value == value:
            raise refusal(value, "has no exact")
        return value

    def numeric(value: Decimal) -> Decimal:
        if value.same_quantum(unit) and value.adjusted() < whole_digits:
            return value or zero
        if not value.is_finite():
            raise refusal(value, "does not fit")
        fixed = value.quantize(unit, context=_EXACT)
        if fixed != value or fixed.copy_abs() >= limit:
            raise refusal(value, "does not fit")
        # -0 is no number of its own in the store
        return fixed if fixed else zero

    def text(value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise refusal(value, "is no valid") from None
        if length is not None and len(value) > length:
            raise refusal(value, "does not fit")
        return value

    def checked_text(value: str) -> str:
        array_of_values("", [value], type_)
        return value

    def aware(value: datetime) -> datetime:
        if value.tzinfo is None or value.utcoffset() is None:
            raise refusal(value, "has no time zone, which is wrong for")
        try:
            return value.astimezone(_UTC)
        except OverflowError:
            raise refusal(value, "is in UTC outside of the years 1 to 9999, which is too far for") from None

    def naive(value: Any) -> Any:
        if value.tzinfo is not None:
            raise refusal(value, "has a time zone, which is wrong for")
        return value.replace(fold=0)

    match type_.base:
        case "int2" | "int4" | "int8":
            highest = 2 ** _INTEGER_BITS[type_.base] - 1
            lowest = -highest - 1
            return integer
        case "float4":
            return single
        case "numeric":
            arrow = type_.arrow
            unit, limit = Decimal((0, (1,), -arrow.scale)), Decimal(10) ** (arrow.precision - arrow.scale)
            whole_digits, zero = arrow.precision - arrow.scale, Decimal(0).quantize(unit)
            return numeric
        case "text" | "varchar":
            argument = type_.name.partition("(")[2]
            length = int(argument.removesuffix(")")) if argument else None
            return text
        case "uuid" | "json" | "jsonb":
            return checked_text
        case "timestamptz":
            return aware
        case "timestamp" | "time":
            return naive
        case _:
            return _as_it_is


def _as_it_is(value: bool | float | bytes | date | time) -> Any:
    return value
