"""CSV structure, byte by byte: the exact but slow reading that finds *where* a file is wrong, and reads headers.

The grammar is RFC 4180 with LF or CRLF as line end: a quote may stand only at the borders of a quoted field or,
doubled, inside it. The fast path accepts nothing that this grammar refuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_PLAIN = re.compile(rb'[^",\r\n]*')
_QUOTED = re.compile(rb'"((?:[^"]++|"")*+)"')
_LINE_ENDS = (b"\n", b"\r\n")


@dataclass(frozen=True, slots=True)
class RawField:
    """One field as it stands in the file.

    Attributes:
        start: Index of its first byte (of the opening quote when it is quoted).
        line: Physical line on which it starts.
        value: Its bytes without the quotes, doubled quotes made single.
        quoted: Whether it was quoted.
    """

    start: int
    line: int
    value: bytes
    quoted: bool


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record: its fields, and the indices of its first byte and of the byte after its line end."""

    start: int
    end: int
    fields: tuple[RawField, ...]
    terminated: bool

    @property
    def is_blank(self) -> bool:
        """Whether the line is empty (a quoted empty field is not)."""
        return len(self.fields) == 1 and not self.fields[0].quoted and not self.fields[0].value


class StructureError(Exception):
    """The bytes are not CSV from here on."""

    def __init__(self, index: int, line: int, field: int, problem: str, cure: str) -> None:
        super().__init__(f"{problem}; {cure}")
        self.index = index
        self.line = line
        self.field = field


class _IncompleteError(Exception):
    """The bytes end within a record that may go on."""


def iter_records(data: bytes, line: int, *, final: bool) -> Iterator[RawRecord]:
    """Read record after record; stops before an incomplete one unless the data is the file's ``final`` part.

    Raises:
        StructureError: At the first byte that cannot be read.
    """
    start = 0
    while start < len(data):
        try:
            record = _record(data, start, line, final)
        except _IncompleteError:
            return
        yield record
        line += data.count(b"\n", start, record.end)
        start = record.end


def _record(data: bytes, start: int, line: int, final: bool) -> RawRecord:
    fields: list[RawField] = []
    index = start
    while True:
        field, index = _field(data, index, line, len(fields), final)
        fields.append(field)
        line += data.count(b"\n", field.start, index)
        following = data[index : index + 1]
        if following == b",":
            index += 1
            continue
        if not following:
            return RawRecord(start, index, tuple(fields), terminated=False)
        return RawRecord(start, index + (1 if following == b"\n" else 2), tuple(fields), terminated=True)


def _field(data: bytes, start: int, line: int, number: int, final: bool) -> tuple[RawField, int]:
    quoted = data[start : start + 1] == b'"'
    if quoted:
        match = _QUOTED.match(data, start)
        if match is None:
            raise _unclosed(len(data) - start, start, line, number, final)
        value, end = match[1].replace(b'""', b'"'), match.end()
    else:
        match = _PLAIN.match(data, start)
        assert match is not None  # the pattern matches the empty string
        value, end = match[0], match.end()
    _check_border(data, end, line + data.count(b"\n", start, end), number, quoted, final)
    return RawField(start, line, value, quoted), end


def _unclosed(size: int, start: int, line: int, number: int, final: bool) -> Exception:
    if not final:
        return _IncompleteError()
    problem = f"the quote that opens here is not closed within the {size} bytes that follow"
    return StructureError(start, line, number, problem, "close it, or double the quotes inside values")


def _check_border(data: bytes, end: int, line: int, number: int, quoted: bool, final: bool) -> None:
    following = data[end : end + 2]
    if following[:1] in {b",", b"\n"} or following == b"\r\n":
        return
    if not following and final:
        return
    if not following or (following == b"\r" and not final):
        raise _IncompleteError
    if following[:1] == b"\r":
        problem, cure = "a carriage return without line feed ends no record here", "write line ends as LF or CRLF"
    elif quoted:
        problem, cure = "text follows a closing quote", "double quotes inside quoted values"
    else:
        problem, cure = "a quote stands inside an unquoted value", "quote the value and double the quotes inside it"
    raise StructureError(end, line, number, problem, cure)
