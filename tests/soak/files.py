"""What is in the input files: records with their places, read by this suite's own few lines and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path

from tests.faults.described import COLUMNS

Row = tuple[int, int, int, int, Decimal, str | None]
"""id, key, version, amount, price, note"""

_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Record:
    """A row and the bytes from which it came, without its line end."""

    start: int
    end: int
    row: Row


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file as it is now.

    Attributes:
        name: Split of its source, ``source/file``.
        data: All of it.
        records: What it holds, in order.
    """

    name: str
    data: bytes
    records: tuple[Record, ...]

    def rows_before(self, offset: int) -> list[Row]:
        """The rows that were read when the position says this offset.

        Raises:
            AssertionError: No record ends there.
        """
        inside = [record for record in self.records if record.start < offset < record.end]
        assert not inside, f"position {offset} of {self.name} is inside of the record {inside}"
        return [record.row for record in self.records if record.end <= offset]

    def rows_after(self, offset: int) -> list[Row]:
        """The rows that are still to be read."""
        return [record.row for record in self.records if record.end > offset]


def read_input(directory: Path, source: str) -> list[InputFile]:
    """The files of a source, in the order in which they are read."""
    paths = sorted((directory / source).glob("*.csv"), key=lambda path: int(path.stem))
    return [_parsed(f"{source}/{path.name}", path.read_bytes()) for path in paths]


@lru_cache(maxsize=64)
def _parsed(name: str, data: bytes) -> InputFile:
    lines = list(_lines(data))
    if not lines:
        return InputFile(name, data, ())
    header = [value for value, _ in lines[0][2]]
    assert sorted(str(column) for column in header) == sorted(COLUMNS), f"{name} has the header {header}"
    places = [header.index(column) for column in COLUMNS]
    records = (Record(start, end, _row([fields[place] for place in places])) for start, end, fields in lines[1:])
    return InputFile(name, data, tuple(records))


Field = tuple[str, bool]
"""A value, and whether it stood in quotes."""


def _lines(data: bytes) -> Iterator[tuple[int, int, list[Field]]]:
    """Each line that is not blank: where it begins and ends, and its fields."""
    at = len(_MARK) if data.startswith(_MARK) else 0
    while at < len(data):
        start, fields, more = at, [], True
        while more:
            field, at = _field(data, at)
            fields.append(field)
            more = data[at : at + 1] == b","
            at += int(more)
        if at > start:
            yield start, at, fields
        at += 2 if data[at : at + 2] == b"\r\n" else 1


def _field(data: bytes, at: int) -> tuple[Field, int]:
    """The field that begins here, and where it ends."""
    if data[at : at + 1] != b'"':
        end = min(found for mark in (b",", b"\n", b"\r\n") if (found := _find(data, mark, at)) >= 0)
        return (data[at:end].decode(), False), end
    value = b""
    while True:
        end = data.index(b'"', at + 1)
        value += data[at + 1 : end]
        if data[end + 1 : end + 2] != b'"':
            return (value.decode(), True), end + 1
        value += b'"'
        at = end + 1


def _find(data: bytes, mark: bytes, at: int) -> int:
    found = data.find(mark, at)
    return len(data) if found < 0 else found


def _row(fields: Sequence[Field]) -> Row:
    numbers = [int(value) for value, _ in fields[:4]]
    (price, _), (note, quoted) = fields[4:]
    return (numbers[0], numbers[1], numbers[2], numbers[3], Decimal(price), note if note or quoted else None)
