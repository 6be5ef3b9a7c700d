"""Large files in parts: ranges of bytes that begin and end at record borders, each a split of its own.

Whether a line end is a record border is decided by all quotes before it, so a border is found only by reading the file
from a known one. That is done exactly: a block with quotes is matched against the whole grammar, and behind the first
one that does not match nothing is cut, so that the reader comes to the error before anything behind it is read.

A part is known by the file's name and the byte where it begins: ``orders.csv``, ``orders.csv//1073741900``. (No path
looks like that: its parts are joined by single slashes.) The last part of a file has no end: it grows with the file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import BinaryIO

import pyarrow.compute as pc

from etl.errors import StateError
from etl.schema import Schema
from etl.sources.csv_blocks import RECORD_BYTES_MAX, complete_bytes, is_well_formed, record_ends
from etl.sources.csv_header import HeaderError, check_header, read_header
from etl.sources.file_position import SAMPLE_BYTES, Consumed, FilePosition, read_at

_SCAN_BYTES = 1 << 20
_PART = re.compile(r"(.+)//([0-9]+)")

Parts = dict[int, FilePosition | None]
"""By the byte where a part begins, where it is read on; None at the very beginning of a file that is not cut."""


def part_id(file: str, begin: int) -> str:
    """The split's id of a part."""
    return f"{file}//{begin}" if begin else file


def file_and_begin(split_id: str) -> tuple[str, int]:
    """The file of a split, and where in it the split begins."""
    match = _PART.fullmatch(split_id)
    return (match[1], int(match[2])) if match else (split_id, 0)


def bytes_read(parts: Mapping[int, FilePosition]) -> int:
    """How far a file was read without a gap."""
    reached = 0
    for begin in sorted(parts):
        if begin != reached:
            break
        reached = parts[begin].offset
    return reached


class FileCutter:
    """Cuts one open file.

    Args:
        file: The file.
        name: Its lasting name.
        size: Its size in bytes.
        part_bytes: How large a part is at least; it is smaller than twice that. None: nothing new is cut.
        schema: The declared columns.
    """

    def __init__(self, file: BinaryIO, name: str, size: int, part_bytes: int | None, schema: Schema) -> None:
        self._file = file
        self._name = name
        self._size = size
        self._part_bytes = part_bytes
        self._schema = schema

    def cut(self, known: Parts, fixed: Collection[int]) -> Parts:
        """All parts of the file.

        Args:
            known: Those that there are already.
            fixed: Where those begin that are not to be cut further, since somebody has them.

        Raises:
            StateError: Those that there are contradict each other.
        """
        known = self._bounded(known)
        parts: Parts = dict(known)
        reached: int | None = 0
        for begin in sorted(known):
            assert reached is not None, "only the last part has no end"
            if begin > reached:
                parts.update(self._cut_gap(parts, reached, begin))
            part = known[begin]
            reached = None if part is None else part.end
        if reached is not None:
            if reached < self._size or not known:
                parts.update(self._cut_gap(parts, reached, None))
        elif self._part_bytes is not None and (last := max(known)) not in fixed:
            parts.update(self._cut_open(parts, last))
        return parts

    def _bounded(self, known: Parts) -> Parts:
        """A part that was cut after its position was stored ends where the next one begins."""
        bounded: Parts = {}
        begins = sorted(known)
        for begin, behind in zip(begins, [*begins[1:], None], strict=False):
            part = known[begin]
            if part is not None and behind is not None and part.end is None:
                part = replace(part, end=behind)
            if part is None and behind is not None:
                part = self._position(0, 1, behind)
            if part is not None and behind is not None and (part.offset > behind or (part.end or 0) > behind):
                raise StateError(f"{self._name}: the stored positions of its parts overlap; restore them")
            bounded[begin] = part
        return bounded

    def _cut_open(self, parts: Parts, begin: int) -> Parts:
        """The last part, with an end where it has grown too large, and what comes behind it."""
        part = parts[begin]
        if part is None:
            return self._cut_gap({}, 0, None)
        borders = list(self._borders(part.offset, part.offset, part.line, None))
        if not borders:
            return {begin: part}
        return {begin: replace(part, end=borders[0][0]), **self._between(borders, None)}

    def _cut_gap(self, parts: Parts, begin: int, end: int | None) -> Parts:
        """Parts from a border to another one, or to the end of the file."""
        if begin == 0:
            borders = list(self._borders(0, 0, 1, end))
            if not borders and end is None:
                return {0: None}
            first = borders[0][0] if borders else end
            return {0: self._position(0, 1, first), **self._between(borders, end)}
        # Lines are counted from the nearest record border of which the line is known.
        near = [(part.offset, part.line) for part in parts.values() if part is not None and part.offset <= begin]
        offset, line = max(near, default=(0, 1))
        line += self._lines(offset, begin)
        return self._between([(begin, line), *self._borders(begin, begin, line, end)], end)

    def _between(self, borders: list[tuple[int, int]], end: int | None) -> Parts:
        ends = [*(offset for offset, _ in borders), end]
        return {offset: self._position(offset, line, ends[number]) for number, (offset, line) in enumerate(borders, 1)}

    def _position(self, offset: int, line: int, end: int | None) -> FilePosition:
        """As if a reader had come to this border."""
        header = read_header(self._file, final=False)
        limit = max(SAMPLE_BYTES, 0 if header is None else header.end)
        tail_bytes = min(SAMPLE_BYTES, offset)
        head, tail = read_at(self._file, 0, min(limit, offset)), read_at(self._file, offset - tail_bytes, tail_bytes)
        return replace(Consumed(offset, line, head, tail, limit).position(self._size), end=end)

    def _lines(self, begin: int, end: int) -> int:
        count = 0
        while begin < end and (data := read_at(self._file, begin, min(_SCAN_BYTES, end - begin))):
            count += data.count(b"\n")
            begin += len(data)
        return count

    def _borders(self, scanned: int, begin: int, line: int, end: int | None) -> Iterator[tuple[int, int]]:
        """Where to cut between a border and an end: byte and physical line of each place.

        Args:
            scanned: The record border from which to read.
            begin: Where the part begins that is cut.
            line: Physical line at ``scanned``.
            end: Where the last part ends, None at the end of the file.
        """
        limit, part_bytes = self._size if end is None else end, self._part_bytes
        if part_bytes is None or limit - begin < 2 * part_bytes:
            return
        wanted = begin + part_bytes
        if scanned == 0:
            header_end = self._header_end()
            if header_end is None:
                return
            wanted = max(wanted, header_end)
        for block in self._blocks(scanned, limit):
            while wanted <= scanned + len(block) and limit - wanted >= part_bytes:
                ends = record_ends(block, blank_is_record=True)
                found = ends.filter(pc.greater_equal(ends, wanted - scanned))
                if not len(found) or scanned + found[0].as_py() >= limit:
                    break
                index = found[0].as_py()
                yield scanned + index, line + block.count(b"\n", 0, index)
                wanted = scanned + index + part_bytes
            if limit - wanted < part_bytes:
                return
            scanned += len(block)
            line += block.count(b"\n")

    def _header_end(self) -> int | None:
        """Behind the header; None where there is none that is right, which is the reader's matter."""
        try:
            header = read_header(self._file, final=False)
            if header is None or not header.terminated:
                return None
            check_header(header, self._schema)
        except HeaderError:
            return None
        return header.end

    def _blocks(self, offset: int, limit: int) -> Iterator[bytes]:
        """Whole records, as long as they are well-formed."""
        wanted = _SCAN_BYTES
        while offset < limit:
            data = read_at(self._file, offset, min(wanted, limit - offset))
            size = complete_bytes(data)
            if size == 0:
                if len(data) > RECORD_BYTES_MAX or len(data) < wanted:
                    return
                wanted *= 2
                continue
            block = data[:size]
            start = 3 if offset == 0 and block.startswith(b"\xef\xbb\xbf") else 0
            if not is_well_formed(block[start:] if start else block):
                return
            yield block
            offset, wanted = offset + size, _SCAN_BYTES
