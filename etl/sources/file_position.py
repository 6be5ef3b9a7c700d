"""Where the next read of a file starts, and the proof that the file is still the one that was read.

A name alone proves nothing: files are truncated, rewritten within one clock tick at the same size, or replaced under
their name with a reused inode. So a position carries hashes of the first and of the last bytes that were read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields
from typing import Any, BinaryIO

from etl.errors import StateError
from etl.source import Position

SAMPLE_BYTES = 4096
_CURE = "restore the file as it was, or give the new content a new name"


@dataclass(frozen=True, slots=True)
class FilePosition:
    """The position of one file.

    Attributes:
        offset: Byte at which the next record starts.
        line: Physical line number there, 1-based.
        size: Size of the file when it was last looked at, in bytes.
        head_bytes: How many bytes from the start are covered by ``head_sha256``.
        tail_bytes: How many bytes before ``offset`` are covered by ``tail_sha256``.
        unterminated: True when the last record was read without a line end because the file ended there.
        end: Byte at which the part of the file ends that is read; None at the end of the file, which may grow.
    """

    offset: int
    line: int
    size: int
    head_bytes: int
    head_sha256: str
    tail_bytes: int
    tail_sha256: str
    unterminated: bool
    end: int | None = None

    @classmethod
    def from_json(cls, split: str, position: Position) -> FilePosition:
        """Read a stored position.

        Raises:
            StateError: It is not a position of a file.
        """
        wanted = {
            field.name: _TYPES[str(field.type)] for field in fields(cls) if field.name in position or _is_needed(field)
        }
        bad = [name for name, kind in wanted.items() if type(position.get(name)) is not kind]
        if bad:
            raise StateError(
                f"{split}: the stored position is not one of a file ({', '.join(bad)} missing or malformed)"
            )
        read = cls(**{name: position[name] for name in wanted})
        inside = read.end is None or read.offset <= read.end
        if not (0 <= read.head_bytes <= read.offset >= read.tail_bytes >= 0 and read.line >= 1 and inside):
            raise StateError(f"{split}: the stored position contradicts itself: {dict(position)}; restore it")
        return read

    def to_json(self) -> Mapping[str, Any]:
        """The JSON object that is stored."""
        return {name: value for name, value in asdict(self).items() if value is not None}


_TYPES: dict[str, type] = {"int": int, "str": str, "bool": bool, "int | None": int}


def _is_needed(field: Field[Any]) -> bool:
    return field.default is MISSING


@dataclass(slots=True)
class Consumed:
    """What has been read of a file so far; grows with every batch that is returned."""

    offset: int = 0
    line: int = 1
    head: bytes = b""
    tail: bytes = b""
    head_limit: int = SAMPLE_BYTES
    unterminated: bool = False

    @classmethod
    def resume(cls, file: BinaryIO, position: FilePosition, header_bytes: int) -> Consumed:
        """Go on from a verified position."""
        limit = max(SAMPLE_BYTES, header_bytes)
        head = read_at(file, 0, min(limit, position.offset))
        tail = read_at(file, position.offset - position.tail_bytes, position.tail_bytes)
        return cls(position.offset, position.line, head, tail, limit, position.unterminated)

    def advance(self, data: bytes, lines: int, *, unterminated: bool = False) -> None:
        """Move over ``data``, which holds ``lines`` line ends."""
        missing = self.head_limit - len(self.head)
        if missing > 0:
            self.head += data[:missing]
        self.tail = (self.tail + data[-SAMPLE_BYTES:])[-SAMPLE_BYTES:]
        self.offset += len(data)
        self.line += lines
        self.unterminated = unterminated

    def position(self, size: int) -> FilePosition:
        """The position from which the next read starts."""
        return FilePosition(
            offset=self.offset,
            line=self.line,
            size=size,
            head_bytes=len(self.head),
            head_sha256=_sha256(self.head),
            tail_bytes=len(self.tail),
            tail_sha256=_sha256(self.tail),
            unterminated=self.unterminated,
        )


def read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    """Up to ``size`` bytes from ``offset``, without moving the file's own place."""
    parts: list[bytes] = []
    while size > 0 and (part := os.pread(file.fileno(), size, offset)):
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return b"".join(parts)


def verify_unchanged(file: BinaryIO, split: str, position: FilePosition) -> int:
    """Check that the part of the file that was read is still what it was; returns the file's size in bytes.

    Raises:
        StateError: Names the file, what was expected, what is there, and what to do.
    """
    size = os.fstat(file.fileno()).st_size
    read = f"{split}: {position.offset} bytes had been read"
    if size < position.offset:
        raise StateError(f"{read}, now the file has only {size}: it was truncated or replaced; {_CURE}")
    if _sha256(read_at(file, 0, position.head_bytes)) != position.head_sha256:
        raise StateError(
            f"{read}, but its first {position.head_bytes} bytes have changed: it was rewritten or replaced; {_CURE}"
        )
    tail_start = position.offset - position.tail_bytes
    if _sha256(read_at(file, tail_start, position.tail_bytes)) != position.tail_sha256:
        span = f"bytes {tail_start} to {position.offset}"
        raise StateError(f"{read}, but {span} have changed: it was rewritten; {_CURE}")
    if position.unterminated and size > position.offset:
        _verify_line_end(file, split, position)
    return size


def _verify_line_end(file: BinaryIO, split: str, position: FilePosition) -> None:
    following = read_at(file, position.offset, 2)
    if following[:1] != b"\n" and following not in {b"\r\n", b"\r"}:
        problem = (
            f"its last record (line {position.line}) had no line end, was read as complete and has since been continued"
        )
        cure = f"correct that row in the target, end its line at byte {position.offset} and append the rest as a record"
        raise StateError(f"{split}: {problem}; {cure}")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
