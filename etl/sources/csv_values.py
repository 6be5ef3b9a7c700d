"""What a field's text means in each type: the rules, value by value.

This is the reference that the vectorised conversion must agree with: it may accept less, never more and never another
value. It also runs where the vectorised conversion gives up (a spelling such as ``+1`` that Arrow does not know),
and where an error has to be explained.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

from etl.schema import PostgresType
from etl.sources.csv_composites import parse_array, validate_json
from etl.sources.csv_invalid import InvalidValueError
from etl.sources.local_time import LocalTimeError, LocalTimes

Converter = Callable[[str], Any]
_BLANKS = " \t"

_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")
_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]{1,6}))?")
_SPECIAL_FLOAT = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)
_DATE = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})")
_TIME = re.compile(r"([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:\.([0-9]*))?)?")
_ZONE = " ?(?:Z|UTC|[+-][0-9]{2}(?::?[0-9]{2})?)"
_TIMESTAMP = re.compile(rf"(?P<date>{_DATE.pattern})(?:[ T](?P<time>[0-9]{{2}}|{_TIME.pattern})(?P<zone>{_ZONE})?)?")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32}", re.IGNORECASE)
_BYTEA = re.compile(r"\\x((?:[0-9a-fA-F]{2})*)")
_OUTSIDE_CALENDAR = re.compile(r"[+-]?infinity|.*\bBC|[+-]?[0-9]{5,}-.*|0000-.*|-[0-9].*", re.IGNORECASE)

_INTEGER_BITS = {"int2": 16, "int4": 32, "int8": 64}
_INTEGER_DIGITS_MAX = 19

TRUE_SPELLINGS = ("t", "tr", "tru", "true", "y", "ye", "yes", "on", "1")
FALSE_SPELLINGS = ("f", "fa", "fal", "fals", "false", "n", "no", "of", "off", "0")
_BOOLEANS = {**dict.fromkeys(TRUE_SPELLINGS, True), **dict.fromkeys(FALSE_SPELLINGS, False)}


def converter_of(type_: PostgresType, zone: LocalTimes | None) -> Converter:
    """The function that turns a field's text into a value of ``type_``; it raises :class:`InvalidValueError`.

    Args:
        type_: The declared type of the column.
        zone: The zone of ``timestamptz`` values that name none; None when they must.
    """
    if type_.is_array:
        element = converter_of(type_.element, zone)
        return lambda text: parse_array(text, element)
    if type_.base == "numeric":
        precision, scale = type_.arrow.precision, type_.arrow.scale
        return lambda text: _numeric(text, precision, scale)
    if type_.base in _INTEGER_BITS:
        bits = _INTEGER_BITS[type_.base]
        return lambda text: _integer(text, bits)
    if type_.base == "varchar":
        limit = varchar_limit(type_)
        return lambda text: _varchar(text, limit)
    if type_.base == "timestamptz":
        return lambda text: _timestamptz(text, zone)
    return _SIMPLE[type_.base]


def varchar_limit(type_: PostgresType) -> int | None:
    """The n of ``varchar(n)``, None when there is none."""
    arguments = type_.name.removesuffix("[]").partition("(")[2]
    return int(arguments.removesuffix(")")) if arguments else None


def _integer(text: str, bits: int) -> int:
    match = _INTEGER.fullmatch(text.strip(_BLANKS))
    if match is None:
        raise InvalidValueError("not a whole number in decimal digits")
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    value = int(match[1] + match[2]) if len(match[2]) <= _INTEGER_DIGITS_MAX else high + 1
    if not low <= value <= high:
        raise InvalidValueError(f"out of range {low} to {high}", "declare a wider type, or correct the value")
    return value


def _numeric(text: str, precision: int, scale: int) -> Decimal:
    sign, digits, exponent = _number(text)
    if not digits:
        return Decimal((0, (0,), -scale))
    if exponent + scale < 0:
        raise InvalidValueError(
            f"more than {scale} digits after the point, and values are never rounded", _WIDER_NUMERIC
        )
    if len(digits) + exponent > precision - scale:
        raise InvalidValueError(f"more than {precision - scale} digits before the point", _WIDER_NUMERIC)
    shifted = digits + "0" * (exponent + scale)
    return Decimal((int(sign == "-"), tuple(map(int, shifted)), -scale))


_WIDER_NUMERIC = "declare a larger precision and scale, or correct the value"


def _number(text: str) -> tuple[str, str, int]:
    """Sign, significant digits (none for zero) and the power of ten of the last of them."""
    match = _NUMBER.fullmatch(text.strip(_BLANKS))
    if match is None or not (match[2] or match[3]):
        raise InvalidValueError("not a decimal number")
    fraction = match[3] or ""
    significant = (match[2] + fraction).lstrip("0")
    digits = significant.rstrip("0")
    return match[1], digits, int(match[4] or 0) - len(fraction) + len(significant) - len(digits)


def _float(text: str, arrow: pa.DataType) -> float:
    stripped = text.strip(_BLANKS)
    if _SPECIAL_FLOAT.fullmatch(stripped):
        return float(stripped)
    digits = _number(text)[1]
    # Arrow's parser rounds to the nearest value of the width at once; through a Python float it would round twice.
    value: float = pa.scalar(stripped).cast(arrow).as_py()
    if value in (float("inf"), float("-inf")) or (value == 0 and digits):
        raise InvalidValueError("out of range, it would become infinity or zero", "declare float8 or numeric(p,s)")
    return value


def _float4(text: str) -> float:
    return _float(text, pa.float32())


def _float8(text: str) -> float:
    return _float(text, pa.float64())


def _bool(text: str) -> bool:
    value = _BOOLEANS.get(text.strip(_BLANKS).lower()) if text.isascii() else None
    if value is None:
        raise InvalidValueError("neither true nor false", "write true or false")
    return value


def _text(text: str) -> str:
    return text


def _varchar(text: str, limit: int | None) -> str:
    if limit is not None and len(text) > limit:
        raise InvalidValueError(f"{len(text)} characters, {limit} are allowed", "declare it longer, or text")
    return text


def _date(text: str) -> date:
    match = _DATE.fullmatch(text.strip(_BLANKS))
    if match is None:
        raise _not_a("YYYY-MM-DD", text)
    return _day(match[1], match[2], match[3])


def _day(year: str, month: str, day: str) -> date:
    try:
        return date(int(year), int(month), int(day))
    except ValueError as error:
        reason = "there is no year 0" if year == "0000" else "there is no such day"
        raise InvalidValueError(reason) from error


def _time(text: str) -> time:
    match = _TIME.fullmatch(text.strip(_BLANKS))
    if match is None:
        raise InvalidValueError("not of the form HH:MM:SS without a zone")
    return _clock(match[1], match[2], match[3], match[4])


def _clock(hour: str, minute: str | None, second: str | None, fraction: str | None) -> time:
    digits = (fraction or "").rstrip("0")
    if len(digits) > 6:
        raise InvalidValueError(
            "more than 6 digits of a second, and values are never rounded", "cut it to microseconds"
        )
    try:
        return time(int(hour), int(minute or 0), int(second or 0), int(digits.ljust(6, "0")))
    except ValueError as error:
        raise InvalidValueError("there is no such time of day (00:00:00 to 23:59:59.999999)") from error


def _timestamp(text: str) -> datetime:
    value, zone = _local_and_zone(text)
    if zone is not None:
        raise InvalidValueError("it has a time zone, which timestamp would drop", 'declare "timestamptz"')
    return value


def _timestamptz(text: str, zone: LocalTimes | None) -> datetime:
    local, offset = _local_and_zone(text)
    try:
        if offset is not None:
            return (local - offset).replace(tzinfo=UTC)
        if zone is not None:
            return zone.instant(local)
    except OverflowError as error:
        raise InvalidValueError("it lies outside the years 1 to 9999 in UTC") from error
    except LocalTimeError as error:
        raise InvalidValueError(str(error), "write the offset from UTC behind the value") from error
    raise InvalidValueError("it has no time zone", 'write one (+00:00), or pass timezone="..." to CsvFiles')


def _local_and_zone(text: str) -> tuple[datetime, timedelta | None]:
    match = _TIMESTAMP.fullmatch(text.strip(_BLANKS))
    if match is None:
        raise _not_a("YYYY-MM-DD HH:MM:SS", text)
    day = _day(match[2], match[3], match[4])
    return datetime.combine(day, _time_of_day(match)), _offset(match["zone"])


def _time_of_day(match: re.Match[str]) -> time:
    hour_only = match["time"] is not None and len(match["time"]) == 2
    return (
        _clock(match["time"], None, None, None) if hour_only else _clock(match[6] or "0", match[7], match[8], match[9])
    )


def _offset(zone: str | None) -> timedelta | None:
    if zone is None:
        return None
    zone = zone.removeprefix(" ")
    if zone in {"Z", "UTC"}:
        return timedelta(0)
    hours, minutes = int(zone[1:3]), int(zone[3:].removeprefix(":") or 0)
    if hours > 23 or minutes > 59:
        raise InvalidValueError("there is no such offset from UTC")
    offset = timedelta(hours=hours, minutes=minutes)
    return -offset if zone[0] == "-" else offset


def _not_a(form: str, text: str) -> InvalidValueError:
    if _OUTSIDE_CALENDAR.fullmatch(text.strip(_BLANKS)):
        return InvalidValueError(
            "only the years 1 to 9999 can be carried (no infinity, no BC)", "declare text, or correct the value"
        )
    return InvalidValueError(f"not of the form {form}")


def _uuid(text: str) -> str:
    if _UUID.fullmatch(text) is None:
        raise InvalidValueError("not of the form xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx")
    digits = text.replace("-", "").lower()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _bytea(text: str) -> bytes:
    match = _BYTEA.fullmatch(text)
    if match is None:
        raise InvalidValueError(r"not of the form \x followed by pairs of hexadecimal digits")
    return bytes.fromhex(match[1])


_SIMPLE: dict[str, Converter] = {
    "float4": _float4,
    "float8": _float8,
    "bool": _bool,
    "text": _text,
    "date": _date,
    "time": _time,
    "timestamp": _timestamp,
    "uuid": _uuid,
    "bytea": _bytea,
    "json": validate_json,
    "jsonb": validate_json,
}
