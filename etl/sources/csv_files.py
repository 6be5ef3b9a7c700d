"""CSV files as a source: what is declared, which files it means, and how they are read one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO

import pyarrow as pa

from etl.errors import ConfigurationError, Finding, StateError, TransientError
from etl.schema import Schema
from etl.source import Position, Progress, Source, SourceContext, SourceReader, Split, SplitEnumerator
from etl.sources.csv_header import HeaderError, check_header, read_header
from etl.sources.csv_parser import CsvRules
from etl.sources.csv_ranges import FileCutter, Parts, bytes_read, file_and_begin, part_id
from etl.sources.csv_reader import CsvFileReader, ReadingLimits
from etl.sources.file_position import FilePosition, read_at, verify_unchanged
from etl.sources.files import SourceFile, list_files, split_path
from etl.sources.local_time import LocalTimes, UnknownZoneError

_BATCH_ROWS = 65_536
_BLOCK_BYTES = 1 << 20
_BLOCK_BYTES_MAX = 256 << 20
_HEADERS_CHECKED_BEFORE_RUN = 1000
_LOOK_AHEAD_BYTES = 1 << 16


class CsvFiles(Source):
    """Files of comma-separated values; each is a split. One subtask reads them in natural order of their names.

    The format is RFC 4180 with a header, UTF-8, LF or CRLF; ``docs/csv.md`` tells every rule. Files that grow are
    read on from where they ended; files that are rewritten or truncated stop the run.

    Args:
        pattern: One or more globs (``*``, ``?``, ``[…]``, ``**``), relative to the job's base directory.
        schema: The declared type of every column, by name; files may hold the columns in another order.
        null: Spellings that mean NULL when they stand unquoted. The default is the empty field.
        timezone: Zone of ``timestamptz`` values that name none, e.g. ``"Europe/Berlin"``; without it they are refused.
        batch_rows: Most rows in a batch. A batch is smaller at the end of a file and where ``block_bytes`` are reached.
        block_bytes: Bytes that are read and parsed at once.
        split_bytes: Files of twice that and more are cut at record borders into parts of at least so many bytes, so
            that several subtasks read one file. It is looked through once before, for the borders. None: none is cut.

    Raises:
        ConfigurationError: Lists everything that is wrong with the arguments.
    """

    __slots__ = ("_limits", "_patterns", "_rules", "_split_bytes")

    def __init__(
        self,
        pattern: str | Sequence[str],
        schema: Mapping[str, str],
        *,
        null: str | Sequence[str] = "",
        timezone: str | None = None,
        batch_rows: int = _BATCH_ROWS,
        block_bytes: int = _BLOCK_BYTES,
        split_bytes: int | None = None,
    ) -> None:
        self._patterns = _as_tuple(pattern)
        nulls = _as_tuple(null)
        findings = [
            *_pattern_findings(self._patterns),
            *_null_findings(nulls),
            *_limit_findings("batch_rows", batch_rows, None),
            *_limit_findings("block_bytes", block_bytes, _BLOCK_BYTES_MAX),
            *([] if split_bytes is None else _limit_findings("split_bytes", split_bytes, None)),
        ]
        zone = _zone(timezone, findings)
        declared = _declared(schema, findings)
        if findings or declared is None:
            raise ConfigurationError.from_findings(self.describe(), findings)
        self._rules = CsvRules(declared, nulls, zone)
        self._limits = (batch_rows, block_bytes)
        self._split_bytes = split_bytes

    @property
    def schema(self) -> Schema:
        """The declared columns, in declared order."""
        return self._rules.schema

    def describe(self) -> str:
        """The declaration in short."""
        return f"CsvFiles({', '.join(map(repr, self._patterns))})"

    def preflight(self, context: SourceContext) -> Sequence[Finding]:
        """Open the matching files (the first thousand) and compare their headers with the schema."""
        files = list_files(self._patterns, context.base_dir, lambda _message: None)
        checked = (self._header_finding(file) for file in files[:_HEADERS_CHECKED_BEFORE_RUN])
        return [finding for finding in checked if finding is not None]

    def create_enumerator(self, context: SourceContext) -> SplitEnumerator:
        """Lists the files that have something to read."""
        return _CsvEnumerator(self._patterns, self._split_bytes, self.schema, context)

    def create_reader(self, context: SourceContext) -> SourceReader:
        """Reads the files that are assigned to it."""
        batch_rows, block_bytes = self._limits
        return _CsvReader(self._rules, ReadingLimits(batch_rows, block_bytes, context.follow), context)

    def _header_finding(self, file: SourceFile) -> Finding | None:
        try:
            with file.path.open("rb") as opened:
                header = read_header(opened, final=False)
                if header is not None:
                    check_header(header, self.schema)
        except HeaderError as error:
            problem, _, cure = str(error).rpartition("; ")
            return Finding(file.split, problem, cure)
        except FileNotFoundError:
            return None
        except OSError as error:
            return Finding(
                file.split, f"the file cannot be read ({error.strerror})", "grant this user the right to read it"
            )
        return None


class _CsvEnumerator(SplitEnumerator):
    """Compares the files on disk with the stored positions."""

    def __init__(
        self, patterns: tuple[str, ...], split_bytes: int | None, schema: Schema, context: SourceContext
    ) -> None:
        self._patterns = patterns
        self._split_bytes = split_bytes
        self._schema = schema
        self._context = context
        self._listed: dict[str, Parts] = {}
        self._told: set[str] = set()

    def discover(self, known: Mapping[str, Position]) -> Sequence[Split]:
        files = list_files(self._patterns, self._context.base_dir, self._tell)
        if not files and not known:
            self._tell(f"{' '.join(self._patterns)}: no file matches in {self._context.base_dir}; nothing is read")
        stored: dict[str, dict[int, FilePosition]] = {}
        for split_id, position in known.items():
            name, begin = file_and_begin(split_id)
            stored.setdefault(name, {})[begin] = FilePosition.from_json(split_id, position)
        self._check_missing({file.split for file in files}, stored)
        return [split for file in files for split in self._pending(file, stored.get(file.split, {}))]

    def _pending(self, file: SourceFile, stored: Mapping[int, FilePosition]) -> Sequence[Split]:
        """The splits that have something to read."""
        with suppress(FileNotFoundError), _open(file) as opened:
            size = _size(opened)
            for position in stored.values():
                size = verify_unchanged(opened, file.split, position)
            if not size and not stored:
                return []
            listed = self._listed.get(file.split, {})
            # What was listed and has not moved may still wait for somebody, or be read right now.
            fixed = {
                begin for begin, part in listed.items() if begin not in stored or stored[begin].offset == _at(part)
            }
            cutter = FileCutter(opened, file.split, size, self._split_bytes, self._schema)
            parts = cutter.cut({**listed, **stored}, fixed)
            found = [self._split(file.split, begin, part, opened, size) for begin, part in sorted(parts.items())]
            if self._split_bytes is not None or len(parts) > 1:
                self._listed[file.split] = parts
            return [split for split in found if split is not None]
        return []

    def _split(self, name: str, begin: int, part: FilePosition | None, opened: BinaryIO, size: int) -> Split | None:
        offset, end = _at(part), None if part is None else part.end
        left = (size if end is None else end) - offset
        if left <= 0 or (end is None and self._must_wait(opened, offset, size)):
            return None
        return Split(part_id(name, begin), None if part is None else part.to_json(), left)

    def _must_wait(self, opened: BinaryIO, offset: int, size: int) -> bool:
        """In follow mode: whether all that is new is the beginning of a line."""
        short = size - offset <= _LOOK_AHEAD_BYTES
        return self._context.follow and short and b"\n" not in read_at(opened, offset, _LOOK_AHEAD_BYTES)

    def _check_missing(self, listed: set[str], stored: Mapping[str, Mapping[int, FilePosition]]) -> None:
        for name in stored.keys() - listed:
            if self._listed.get(name, {}).keys() - stored[name].keys():
                continue  # somebody is reading it
            read, size = bytes_read(stored[name]), max(position.size for position in stored[name].values())
            if read < size and not split_path(name, self._context.base_dir).exists():
                raise StateError(
                    f"{name}: only {read} of its {size} bytes had been read, and now it is gone; restore it"
                )

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self._context.warn(message)


class _CsvReader(SourceReader):
    """Reads the assigned files, one after the other."""

    def __init__(self, rules: CsvRules, limits: ReadingLimits, context: SourceContext) -> None:
        self._rules = rules
        self._limits = limits
        self._context = context
        self._waiting: deque[Split] = deque()
        self._file: BinaryIO | None = None
        self._current: CsvFileReader | None = None
        self._split = ""
        self._reached: dict[str, FilePosition] = {}
        self._moved: set[str] = set()
        self._done_bytes = 0
        self._total_bytes = 0
        self._progress = Progress()

    def assign(self, splits: Sequence[Split]) -> None:
        self._waiting.extend(splits)
        self._total_bytes += sum(self._remaining_bytes(split) for split in splits)
        self._report(self._done_bytes)

    def read_batch(self) -> pa.RecordBatch | None:
        while self._current is not None or self._waiting:
            if self._current is None:
                self._open_next()
            batch = self._read_current()
            if batch is not None:
                return batch
        return None

    @property
    def split_id(self) -> str:
        return self._split

    def snapshot_positions(self) -> Mapping[str, Position]:
        self._note_position()
        moved = {split: self._reached[split].to_json() for split in sorted(self._moved)}
        self._moved.clear()
        # From here on the position that is handed in counts: another reader may read on in a file that has grown.
        self._reached = {split: one for split, one in self._reached.items() if split == self._split and self._current}
        return moved

    def progress(self) -> Progress:
        # One attribute that is replaced as a whole: other threads see an old value or a new one, never a mixture.
        return self._progress

    def close(self) -> None:
        self._close_file()

    def _open_next(self) -> None:
        split = self._waiting.popleft()
        self._split = split.id
        name, _ = file_and_begin(split.id)
        file = SourceFile(name, split_path(name, self._context.base_dir))
        try:
            self._file = _open(file)
        except FileNotFoundError as error:
            raise TransientError(f"{name}: the file vanished before it was read") from error
        self._current = CsvFileReader(self._file, file, self._context.uid, self._rules, self._limits)
        start = self._start_of(split)
        self._current.open_at(start)
        if start is not None:
            self._reached[split.id] = start

    def _start_of(self, split: Split) -> FilePosition | None:
        # What this reader has returned counts, even when the position handed in was stored before that.
        reached = self._reached.get(split.id)
        if reached is not None or split.position is None:
            return reached
        return FilePosition.from_json(split.id, split.position)

    def _read_current(self) -> pa.RecordBatch | None:
        current = self._current
        assert current is not None
        before = current.offset
        batch = current.read_batch()
        self._report(self._done_bytes + current.offset - before)
        if batch is None:
            self._note_position()
            self._close_file()
        return batch

    def _note_position(self) -> None:
        """Remember how far the current file is, and whether that is further than before."""
        position = self._current.position() if self._current is not None else None
        if position is None or position == self._reached.get(self._split):
            return
        self._reached[self._split] = position
        self._moved.add(self._split)

    def _close_file(self) -> None:
        self._current = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _remaining_bytes(self, split: Split) -> int:
        start = self._start_of(split)
        with suppress(OSError):
            size = split_path(file_and_begin(split.id)[0], self._context.base_dir).stat().st_size
            end = size if start is None or start.end is None else start.end
            return max(0, end - (start.offset if start is not None else 0))
        return 0

    def _report(self, done_bytes: int) -> None:
        self._done_bytes = done_bytes
        self._progress = Progress(done_bytes, max(done_bytes, self._total_bytes))


def _at(part: FilePosition | None) -> int:
    return 0 if part is None else part.offset


def _open(file: SourceFile) -> BinaryIO:
    try:
        return file.path.open("rb", buffering=0)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TransientError(f"{file.split}: the file cannot be read ({error.strerror})") from error


def _size(opened: BinaryIO) -> int:
    return opened.seek(0, 2)


def _as_tuple(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _pattern_findings(patterns: Sequence[object]) -> list[Finding]:
    if not patterns:
        return [Finding("pattern", "it names no files", 'pass a glob such as "data/*.csv"')]
    bad = [pattern for pattern in patterns if not isinstance(pattern, str) or not pattern.strip() or "\0" in pattern]
    return [Finding("pattern", f"{pattern!r} is no glob", 'pass a text such as "data/*.csv"') for pattern in bad]


def _null_findings(nulls: Sequence[object]) -> list[Finding]:
    cure = 'pass texts such as "" or "NULL"'
    findings = [Finding("null", f"{null!r} is no text", cure) for null in nulls if not isinstance(null, str)]
    for null in nulls:
        if isinstance(null, str) and any(character in null for character in ',"\r\n\0'):
            findings.append(Finding("null", f"{null!r} cannot stand in an unquoted field", cure))
    return findings


def _limit_findings(name: str, value: object, highest: int | None) -> list[Finding]:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 and (highest is None or value <= highest):
        return []
    span = "1 or more" if highest is None else f"between 1 and {highest}"
    return [Finding(name, f"{value!r} is no usable number", f"pass a whole number, {span}")]


def _zone(name: str | None, findings: list[Finding]) -> LocalTimes | None:
    if name is None:
        return None
    try:
        return LocalTimes(name)
    except UnknownZoneError as error:
        cure = 'pass a name such as "Europe/Berlin"; where the machine has no such database, install the package tzdata'
        findings.append(Finding("timezone", str(error), cure))
        return None


def _declared(schema: Mapping[str, str], findings: list[Finding]) -> Schema | None:
    try:
        return Schema.declare(schema)
    except ConfigurationError as error:
        findings.extend(error.findings)
        return None
