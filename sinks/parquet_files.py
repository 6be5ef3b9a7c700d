"""Parquet files by two-phase commit: a complete hidden file is prepared, a rename makes it visible.

Also the example of a target that is no database, see :mod:`sinks.two_phase`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from etl.errors import ConfigurationError, Finding
from etl.sink import Committable, PreflightContext, Scratch, SinkContext, SupportsScratch
from sinks.chunker import Chunker
from sinks.two_phase import PreparedUnits, TwoPhaseCommitSinkBase, UnitId, UnitStager

ROW_GROUP_ROWS_MAX = 1 << 17
ROW_GROUP_SIZE_BYTES = 32 << 20
OPEN_SUFFIX = ".open"
PREPARED_SUFFIX = ".prepared"


class ParquetFiles(TwoPhaseCommitSinkBase, SupportsScratch):
    """One file a checkpoint and subtask, each visible under its final name only after its checkpoint completed.

    A file that is still written or waits for its checkpoint has a name that begins with a dot. The directory must be on
    one file system. Readers may take any visible file at any time, but must leave those of the newest checkpoint in
    place while the job is down: their presence is how a restart knows that they were committed.

    Args:
        directory: Where the files go; relative to the project's directory. Made when it does not exist.
    """

    def __init__(self, directory: str | Path) -> None:
        if not str(directory):
            raise ConfigurationError("ParquetFiles needs a directory")
        self._directory = Path(directory)

    @property
    def exclusive_target(self) -> str | None:
        """None: file names tell sinks and jobs apart."""
        return None

    def describe(self) -> str:
        """One line for ``etl explain``."""
        return f"ParquetFiles({self._directory})"

    def preflight(self, context: PreflightContext) -> Sequence[Finding]:
        """The directory, or the one it will be made in, must be writable."""
        directory = context.base_dir / self._directory
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        if not existing.is_dir():
            return [Finding(f"directory {directory}", f"{existing} is a file", "name another directory")]
        if not os.access(existing, os.W_OK | os.X_OK):
            return [Finding(f"directory {directory}", f"{existing} is not writable", f"chmod u+wx {existing}")]
        return []

    def prepare_target(self, context: PreflightContext) -> None:
        """Make the directory."""
        (context.base_dir / self._directory).mkdir(parents=True, exist_ok=True)

    def aimed_at(self, scratch: Scratch) -> Self:
        """The same sink with another directory."""
        aimed = copy(self)
        aimed._directory = scratch.directory / hashlib.sha256(str(self._directory).encode()).hexdigest()[:16]
        return aimed

    def visible_rows(self, context: PreflightContext) -> Iterator[pa.RecordBatch]:
        """The rows of all files that are not hidden."""
        for path in sorted((context.base_dir / self._directory).glob("[!.]*.parquet")):
            with pq.ParquetFile(path) as file:
                yield from file.iter_batches()

    def create_stager(self, context: SinkContext) -> UnitStager:
        """See :class:`TwoPhaseCommitSinkBase`."""
        return _FileStager(context, context.base_dir / self._directory)

    def open_prepared_units(self, context: SinkContext) -> PreparedUnits:
        """See :class:`TwoPhaseCommitSinkBase`."""
        return _PreparedFiles(context, context.base_dir / self._directory)


def _final_name(unit: UnitId) -> str:
    # Sorted by name is sorted by checkpoint; the job's id and the epoch keep names from ever meeting.
    return f"{unit.checkpoint_id:012d}-{unit.epoch}-{unit.sink_id}-{unit.subtask}-{unit.job_id}.parquet"


def _unit_of(name: str, *suffixes: str) -> UnitId | None:
    """The unit of a file that is named like ours, with one of these suffixes besides the usual one."""
    stem, _, suffix = name.removeprefix(".").partition(".parquet")
    numbers, job_id = stem.split("-", 4)[:4], "".join(stem.split("-", 4)[4:])
    if suffix not in suffixes or len(numbers) != 4 or not all(map(str.isdecimal, numbers)):
        return None
    checkpoint_id, epoch, sink_id, subtask = map(int, numbers)
    return UnitId(job_id, epoch, checkpoint_id, sink_id, subtask)


def _sync_directory(directory: Path) -> None:
    """Make renames and removals in a directory survive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _FileStager(UnitStager):
    def __init__(self, context: SinkContext, directory: Path) -> None:
        self._context = context
        self._directory = directory
        self._schema = context.schema.to_arrow()
        self._chunker = Chunker(ROW_GROUP_ROWS_MAX, ROW_GROUP_SIZE_BYTES)
        self._path: Path | None = None
        self._writer: pq.ParquetWriter | None = None

    def begin(self, unit: UnitId) -> None:
        self._path = self._directory / f".{_final_name(unit)}{OPEN_SUFFIX}"
        self._writer = pq.ParquetWriter(self._path, self._schema)
        self._context.emit("sink.begun", uid=self._context.uid, checkpoint=unit.checkpoint_id)

    def write(self, batch: pa.RecordBatch) -> None:
        for chunk in self._chunker.add(batch):
            self._write_group(chunk)

    def _write_group(self, chunk: pa.RecordBatch) -> None:
        assert self._writer is not None
        self._writer.write_table(pa.Table.from_batches([chunk]).cast(self._schema), row_group_size=chunk.num_rows)
        self._context.emit("sink.written", uid=self._context.uid, rows=chunk.num_rows)

    def flush(self) -> None:
        for chunk in self._chunker.rest():
            self._write_group(chunk)

    def prepare(self, unit: UnitId, committable: Committable) -> None:  # noqa: ARG002 - the name says it all
        assert self._writer is not None
        assert self._path is not None
        self._writer.close()
        with self._path.open("rb") as written:
            os.fsync(written.fileno())
        self._path.rename(self._directory / f".{_final_name(unit)}{PREPARED_SUFFIX}")
        _sync_directory(self._directory)
        self._writer, self._path = None, None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class _PreparedFiles(PreparedUnits):
    def __init__(self, context: SinkContext, directory: Path) -> None:
        self._context = context
        self._directory = directory

    def list(self) -> Sequence[UnitId]:
        return self._units(".*.parquet.*", OPEN_SUFFIX, PREPARED_SUFFIX)

    def _units(self, pattern: str, *suffixes: str) -> Sequence[UnitId]:
        if not self._directory.exists():
            return []
        units = {_unit_of(path.name, *suffixes) for path in self._directory.glob(pattern)}
        mine = (self._context.job_id, self._context.sink_id)
        return [unit for unit in units if unit is not None and (unit.job_id, unit.sink_id) == mine]

    def newest(self) -> int:
        return max((unit.checkpoint_id for unit in self._units("[!.]*.parquet", "")), default=0)

    def commit(self, unit: str) -> bool:
        final = self._directory / self._name(unit)
        try:
            final.with_name(f".{final.name}{PREPARED_SUFFIX}").rename(final)
        except FileNotFoundError:
            return False
        _sync_directory(self._directory)
        return True

    def rollback(self, unit: str) -> None:
        for suffix in (OPEN_SUFFIX, PREPARED_SUFFIX):
            (self._directory / f".{self._name(unit)}{suffix}").unlink(missing_ok=True)
        _sync_directory(self._directory)

    def is_committed(self, committable: Committable) -> bool:
        return (self._directory / self._name(str(committable.payload["gid"]))).exists()

    def _name(self, unit: str) -> str:
        parsed = UnitId.parse(unit)
        if parsed is None:
            raise ValueError(f"{unit!r} is not the id of a unit")
        return _final_name(parsed)

    def close(self) -> None:
        """Nothing is held open."""
        return
