"""The first record of a file: the names of its columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from etl.schema import Schema
from etl.sources.csv_blocks import RECORD_BYTES_MAX
from etl.sources.csv_parser import BYTE_ORDER_MARK
from etl.sources.csv_records import RawRecord, StructureError, iter_records
from etl.sources.file_position import read_at

_FIRST_READ_BYTES = 1 << 14


class HeaderError(ValueError):
    """The header cannot be read or does not fit the declared columns; the message lacks only the file's name."""


@dataclass(frozen=True, slots=True)
class Header:
    """A file's header.

    Attributes:
        columns: The names, in the file's order.
        end: Byte at which the first record starts.
        line: Physical line on which it starts.
        terminated: False when the file ends with the header and no line end.
    """

    columns: tuple[str, ...]
    end: int
    line: int
    terminated: bool


def read_header(file: BinaryIO, *, final: bool) -> Header | None:
    """Read the header; None when there is none yet.

    Args:
        file: The file, wherever it stands.
        final: Whether a header whose line end is missing at the end of the file is complete.

    Raises:
        HeaderError: What stands there is no header.
    """
    size = _FIRST_READ_BYTES
    while True:
        data = read_at(file, 0, size)
        at_end = len(data) < size
        body_start = len(BYTE_ORDER_MARK) if data.startswith(BYTE_ORDER_MARK) else 0
        record = _first_record(data[body_start:], at_end and final)
        if record is not None:
            end = body_start + record.end
            return Header(_names(record), end, 1 + data.count(b"\n", 0, end), record.terminated)
        if at_end:
            return None
        if size > RECORD_BYTES_MAX:
            raise HeaderError(
                f"the header does not end within {RECORD_BYTES_MAX} bytes; close its quotes or end its line"
            )
        size *= 2


def check_header(header: Header, schema: Schema) -> None:
    """Compare the names with the declared ones; their order does not matter.

    Raises:
        HeaderError: Lists missing, unknown, duplicate and empty names at once.
    """
    counts = Counter(header.columns)
    problems = [
        _listed("missing", [name for name in schema.names if name not in counts]),
        _listed("not declared", [name for name in counts if name and name not in schema]),
        _listed("duplicate", [name for name, count in counts.items() if name and count > 1]),
        _numbered("without a name: number", [number for number, name in enumerate(header.columns, 1) if not name]),
    ]
    found = "; ".join(problem for problem in problems if problem)
    if found:
        raise HeaderError(
            f"the header does not fit the declared columns ({found}); correct the header, or the schema of CsvFiles"
        )


def _listed(what: str, names: Sequence[str]) -> str:
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"{what}: {quoted}" if names else ""


def _numbered(what: str, numbers: Sequence[int]) -> str:
    return f"{what} {', '.join(map(str, numbers))}" if numbers else ""


def _first_record(data: bytes, final: bool) -> RawRecord | None:
    try:
        return next((record for record in iter_records(data, 1, final=final) if not record.is_blank), None)
    except StructureError as error:
        raise HeaderError(f"line {error.line} of the header cannot be read: {error}") from error


def _names(record: RawRecord) -> tuple[str, ...]:
    try:
        return tuple(field.value.decode() for field in record.fields)
    except UnicodeDecodeError as error:
        raise HeaderError("the header is not UTF-8; convert the file to UTF-8") from error
