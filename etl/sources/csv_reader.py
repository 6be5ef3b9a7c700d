"""Read one CSV file from a position on, batch by batch, with an exact position after each batch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

import pyarrow as pa

from etl.errors import RecordError, StateError
from etl.sources.csv_blocks import RECORD_BYTES_MAX, complete_bytes, is_well_formed, record_ends
from etl.sources.csv_diagnosis import BlockPlace, Diagnosis
from etl.sources.csv_header import Header, HeaderError, check_header, read_header
from etl.sources.csv_parser import CsvParser, CsvRules, ParsedBlock, UnreadableBlockError
from etl.sources.file_position import Consumed, FilePosition, read_at, verify_unchanged
from etl.sources.files import SourceFile


@dataclass(frozen=True, slots=True)
class ReadingLimits:
    """How much is read at once, and what the end of a file means.

    Attributes:
        batch_rows: Most rows in a batch.
        block_bytes: Bytes read and parsed at once.
        follow: Whether a last line without its line end waits for it instead of being complete.
    """

    batch_rows: int
    block_bytes: int
    follow: bool


@dataclass(frozen=True, slots=True)
class _Slice:
    """Rows that are parsed and not yet returned, with the bytes they were made of."""

    rows: pa.RecordBatch
    data: bytes
    lines: int
    unterminated: bool


@dataclass(frozen=True, slots=True)
class _Opened:
    """What is known once a file's header has been read."""

    parser: CsvParser
    diagnosis: Diagnosis


class CsvFileReader:
    """Reads one open file; the caller opens and closes it.

    Raises (from every method): RecordError for what the file holds, StateError when it is not the file that was read.
    """

    def __init__(self, file: BinaryIO, source: SourceFile, uid: str, rules: CsvRules, limits: ReadingLimits) -> None:
        self._file = file
        self._split = source.split
        self._uid = uid
        self._rules = rules
        self._limits = limits
        self._ready: deque[_Slice] = deque()
        self._rows_per_byte = 1.0
        self._size = os.fstat(file.fileno()).st_size
        self._consumed = Consumed()
        self._opened: _Opened | None = None
        self._end: int | None = None

    def open_at(self, stored: FilePosition | None) -> None:
        """Verify the file against the stored position, read its header, and go to where reading continues."""
        if stored is not None:
            self._size = verify_unchanged(self._file, self._split, stored)
            self._end = stored.end
        resumes = stored is not None and stored.offset > 0
        header = self._header()
        if header is None or not (header.terminated or resumes):
            return
        if stored is not None and resumes:
            self._consumed = Consumed.resume(self._file, stored, header.end)
        else:
            self._consumed.head_limit = max(self._consumed.head_limit, header.end)
            self._consumed.advance(read_at(self._file, 0, header.end), header.line - 1)
        self._opened = _Opened(CsvParser(self._rules, header.columns), Diagnosis(self._rules, header.columns))

    @property
    def offset(self) -> int:
        """Byte after the last record returned; 0 while nothing, not even the header, is complete."""
        return self._consumed.offset

    def position(self) -> FilePosition | None:
        """Where the next read starts; None while not even the header is complete."""
        return replace(self._consumed.position(self._size), end=self._end) if self._consumed.offset else None

    def read_batch(self) -> pa.RecordBatch | None:
        """The next batch, or None at the (present) end of the file."""
        opened = self._opened
        while opened is not None:
            if not self._ready and not self._prepare(opened):
                break
            ready = self._ready.popleft()
            self._consumed.advance(ready.data, ready.lines, unterminated=ready.unterminated)
            if ready.rows.num_rows:
                return ready.rows
        return None

    def _header(self) -> Header | None:
        try:
            header = read_header(self._file, final=not self._limits.follow)
            if header is not None:
                check_header(header, self._rules.schema)
        except HeaderError as error:
            raise RecordError(f"{self._split}: {error}", uid=self._uid, split=self._split) from error
        return header

    def _prepare(self, opened: _Opened) -> bool:
        """Parse the next block into slices; False when there is nothing complete to parse."""
        if self._consumed.unterminated and not self._skip_late_line_end():
            return False
        data, at_end = self._next_block(opened)
        if not data:
            return False
        missing_end = not data.endswith(b"\n")
        block = data + b"\n" if missing_end else data
        if len(block) > RECORD_BYTES_MAX:
            self._refuse_long_record(block)
        cuts, parsed = self._cut(opened, block, at_end=at_end)
        if parsed is None:
            block = block[: cuts[-1]]
            parsed = self._parse(opened, block, at_end=at_end)
        self._ready.extend(self._slices(block, parsed, cuts, missing_end))
        return True

    def _skip_late_line_end(self) -> bool:
        """Step over the line end that a record lacked when it was read; False when it is still (partly) missing."""
        following = read_at(self._file, self._consumed.offset, 2)
        line_end = next((end for end in (b"\n", b"\r\n") if following.startswith(end)), None)
        if line_end is None:
            return False
        self._consumed.advance(line_end, 1)
        return True

    def _next_block(self, opened: _Opened) -> tuple[bytes, bool]:
        """The whole records that follow (empty when there are none now), and whether the file ends behind them."""
        wanted = self._limits.block_bytes
        while True:
            if self._end is not None and self._consumed.offset + wanted >= self._end:
                return self._last_block(self._end - self._consumed.offset), True
            data = read_at(self._file, self._consumed.offset, wanted)
            if len(data) < wanted:
                self._verify_at_end(len(data))
                return (self._held_back(opened, data) if self._limits.follow else data), True
            size = complete_bytes(data)
            if size:
                return data[:size], False
            if len(data) > RECORD_BYTES_MAX:
                self._refuse_endless_record(opened, data)
            # Twice as much each time, so that a long record is not looked through again and again.
            wanted *= 2

    def _last_block(self, size: int) -> bytes:
        """What is left of a part of the file that has an end."""
        data = read_at(self._file, self._consumed.offset, size)
        if size:
            self._verify_at_end(size)
        if data and not data.endswith(b"\n"):
            raise StateError(
                f"{self._split}: no record ends at byte {self._end} any more: it was rewritten; restore the file as it"
                " was, or give the new content a new name"
            )
        return data

    def _held_back(self, opened: _Opened, data: bytes) -> bytes:
        """The part of a file's end that is complete although the file may go on."""
        size = complete_bytes(data)
        if size == 0:
            # What waits for its line end may already be wrong beyond repair, and then it would wait for ever.
            error = opened.diagnosis.find(data, self._place(), final=False)
            if error is not None:
                raise error
        return data[:size]

    def _cut(self, opened: _Opened, block: bytes, *, at_end: bool) -> tuple[list[int], ParsedBlock | None]:
        """Where to cut the block into batches, and its rows where they were parsed to find out."""
        limit, parsed = self._limits.batch_rows, None
        if self._rows_per_byte * len(block) <= limit / 2:
            parsed = self._parse(opened, block, at_end=at_end)
            self._rows_per_byte = parsed.rows.num_rows / len(block)
            if parsed.rows.num_rows <= limit:
                return [len(block)], parsed
        elif not is_well_formed(block):
            raise opened.diagnosis.explain(block, self._place(), final=at_end)
        ends = record_ends(block, blank_is_record=self._rules.blank_is_record)
        self._rows_per_byte = len(ends) / len(block)
        if len(ends) <= limit:
            return [len(block)], parsed
        cuts: list[int] = ends.take(pa.array(range(limit - 1, len(ends), limit))).to_pylist()
        if at_end and cuts[-1] < len(block):
            return [*cuts, len(block)], parsed
        return cuts, None

    def _parse(self, opened: _Opened, block: bytes, *, at_end: bool) -> ParsedBlock:
        try:
            return opened.parser.parse(block)
        except UnreadableBlockError as error:
            raise opened.diagnosis.explain(block, self._place(), final=at_end) from error

    def _slices(self, block: bytes, parsed: ParsedBlock, cuts: list[int], missing_end: bool) -> Iterator[_Slice]:
        limit, lines_left = self._limits.batch_rows, parsed.lines - missing_end
        start = 0
        for number, cut in enumerate(cuts):
            last = cut == cuts[-1]
            lines = lines_left if last else block.count(b"\n", start, cut)
            lines_left -= lines
            unterminated = last and missing_end
            data = block[start : cut - unterminated] if start or unterminated or not last else block
            yield _Slice(parsed.rows.slice(number * limit, limit), data, lines, unterminated)
            start = cut

    def _verify_at_end(self, waiting_bytes: int) -> None:
        """Check at the file's end that it did not change while it was read."""
        position = self._consumed.position(self._consumed.offset + waiting_bytes)
        self._size = verify_unchanged(self._file, self._split, position)
        if self._size < position.size:
            raise StateError(
                f"{self._split}: was truncated to {self._size} bytes while it was read; restore the file as it was"
            )

    def _refuse_endless_record(self, opened: _Opened, data: bytes) -> None:
        unclosed = data.count(b'"') % 2 == 1
        error = opened.diagnosis.find(data, self._place(), final=unclosed)
        raise error or self._too_long(self._place())

    def _refuse_long_record(self, block: bytes) -> None:
        start = 0
        for end in record_ends(block, blank_is_record=True).to_pylist():
            if end - start > RECORD_BYTES_MAX:
                place = self._place()
                raise self._too_long(
                    replace(place, offset=place.offset + start, line=place.line + block.count(b"\n", 0, start))
                )
            start = end

    def _too_long(self, place: BlockPlace) -> RecordError:
        problem = f"the record that starts here is longer than {RECORD_BYTES_MAX} bytes"
        cure = "close its quotes, or make it shorter"
        return RecordError(
            f"{place.split}:{place.line} byte {place.offset}: {problem}; {cure}", uid=self._uid, split=self._split
        )

    def _place(self) -> BlockPlace:
        return BlockPlace(self._uid, self._split, self._consumed.offset, self._consumed.line)
