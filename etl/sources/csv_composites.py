"""Values with an inner syntax: JSON texts and PostgreSQL array literals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from etl.sources.csv_invalid import InvalidValueError

_JSON_DIGITS_MAX = 16_000  # jsonb holds numbers as numeric, whose limits lie a little above
_EXPONENT_MAX = 16_000
_FLOAT = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE]([+-]?[0-9]+))?")
_SPACES = " \t\n\r\v\f"
_ARRAY_SPACE = r"[ \t\n\r\v\f]*+"
_ELEMENT = re.compile(
    rf'{_ARRAY_SPACE}(?:"(?P<quoted>(?:[^"\\]|\\.)*+)"|(?P<plain>(?:[^"\\{{}},]|\\.)+)){_ARRAY_SPACE}(?P<next>[,}}])',
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def validate_json(text: str) -> str:
    """Return the text when it is JSON that PostgreSQL can hold as ``jsonb``, whatever its spelling."""
    try:
        _DECODER.decode(text)
        if "\\u" in text:
            _check_characters(_PAIRS_DECODER.decode(text))
    except RecursionError:
        raise InvalidValueError("nested too deep") from None
    except json.JSONDecodeError as error:
        raise InvalidValueError(f"{error.msg} at character {error.pos + 1}") from error
    return text


def _constant(name: str) -> NoReturn:
    raise InvalidValueError(f"{name} is not JSON", "write null, or quote it")


def _whole(digits: str) -> None:
    if len(digits) > _JSON_DIGITS_MAX:
        raise InvalidValueError("a number has more digits than PostgreSQL can hold")


def _fractional(number: str) -> None:
    _whole(number)
    match = _FLOAT.fullmatch(number)
    exponent = (match[1] if match else None) or "0"
    if len(exponent.lstrip("+-0")) > len(str(_EXPONENT_MAX)) or abs(int(exponent)) > _EXPONENT_MAX:
        raise InvalidValueError("the exponent of a number is larger than PostgreSQL can hold")


_DECODER = json.JSONDecoder(parse_constant=_constant, parse_int=_whole, parse_float=_fractional)
# A dict would keep only the last of equal keys and so hide what stands in the others.
_PAIRS_DECODER = json.JSONDecoder(object_pairs_hook=lambda pairs: [part for pair in pairs for part in pair])


def _check_characters(value: Any) -> None:
    if isinstance(value, list):
        for part in value:
            _check_characters(part)
    elif isinstance(value, str):
        if "\0" in value:
            raise InvalidValueError(r"it contains \u0000, which PostgreSQL cannot hold", "remove that character")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise InvalidValueError("it contains one half of a surrogate pair", "write the whole pair")


def parse_array(text: str, convert: Callable[[str], Any]) -> list[Any]:
    """Read a one-dimensional PostgreSQL array literal such as ``{1,NULL,"a b"}``."""
    if not (text.startswith("{") and text.endswith("}")):
        raise InvalidValueError("an array is written {value,...}")
    if not text[1:-1].strip(_SPACES):
        return []
    if not any(character in text[1:-1] for character in '"\\{}'):
        return [_plain(part, convert) for part in text[1:-1].split(",")]
    values: list[Any] = []
    index = 1
    while True:
        match = _ELEMENT.match(text, index)
        if match is None:
            raise _malformed(text, index)
        values.append(_element(match, convert))
        index = match.end()
        if match["next"] == "}":
            break
    if index != len(text):
        raise _malformed(text, index)
    return values


def _malformed(text: str, index: int) -> InvalidValueError:
    if text[index:].lstrip().startswith("{"):
        return InvalidValueError("it has more than one dimension", "declare text, or flatten it")
    return InvalidValueError(f"malformed array at character {index + 1}")


def _plain(part: str, convert: Callable[[str], Any]) -> Any:
    """An element of an array without quotes and escapes."""
    text = part.strip(_SPACES)
    if not text:
        raise InvalidValueError("an element of the array is missing", 'write NULL, or ""')
    return None if text.upper() == "NULL" else convert(text)


def _element(match: re.Match[str], convert: Callable[[str], Any]) -> Any:
    if match["quoted"] is not None:
        return convert(_ESCAPE.sub(r"\1", match["quoted"]))
    plain: str = match["plain"]
    if "\\" not in plain:
        return _plain(plain, convert)
    if plain[-1].isspace():
        raise InvalidValueError("an escaped value with blanks behind it is ambiguous", "quote the value")
    return convert(_ESCAPE.sub(r"\1", plain))
