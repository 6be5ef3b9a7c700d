"""The shipped suites against the project's own sinks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.sink import Committable, Sink, SinkContext
from etl.testing.memory_log import MemoryLogs
from etl.testing.sink_contract import TwoPhaseSinkContract, WriteAheadSinkContract, plain_context
from sinks import (
    ParquetFiles,
    PostgresTable,
    TwoPhaseCommitSink,
    UnitDelivery,
    WriteAheadSink,
    WriteAheadSinkBase,
)
from tests.support_sinks.stage import Stage


class _OnStage:
    stage: Stage

    @pytest.fixture(autouse=True)
    def _set_stage(self, stage: Stage) -> None:
        self.stage = stage

    def make_context(self, epoch: int, checkpoint_id: int, subtask: int) -> SinkContext:
        return self.stage.context(epoch, checkpoint_id, subtask)

    def visible_rows(self) -> list[int]:
        return self.stage.scalars("SELECT id FROM public.out ORDER BY id")

    def leftovers(self) -> Sequence[object]:
        logged = self.stage.fetch("SELECT checkpoint_id, epoch FROM etl.write_ahead_log")
        return [*self.stage.gids(), *logged]

    def release(self, context: SinkContext) -> None:
        context.log.close()


class TestTwoPhaseCommitSink(_OnStage, TwoPhaseSinkContract):
    tells_newest = True

    def make_sink(self) -> Sink:
        return TwoPhaseCommitSink(PostgresTable("out"))


class TestTwoPhaseCommitSinkThatUpserts(_OnStage, TwoPhaseSinkContract):
    tells_newest = True

    def make_sink(self) -> Sink:
        return TwoPhaseCommitSink(PostgresTable("out", key=["id"]))


class TestWriteAheadSink(_OnStage, WriteAheadSinkContract):
    tells_newest = True
    exactly_once = True

    def make_sink(self) -> Sink:
        return WriteAheadSink(PostgresTable("out"))


class TestParquetFiles(TwoPhaseSinkContract):
    tells_newest = True
    directory: Path

    @pytest.fixture(autouse=True)
    def _set_directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make_sink(self) -> Sink:
        return ParquetFiles(".")

    def make_context(self, epoch: int, checkpoint_id: int, subtask: int) -> SinkContext:
        return plain_context(self.directory, epoch, checkpoint_id, subtask)

    def visible_rows(self) -> list[int]:
        files = sorted(path for path in self.directory.iterdir() if not path.name.startswith("."))
        return sorted(number for path in files for number in pq.read_table(path)["id"].to_pylist())

    def leftovers(self) -> Sequence[object]:
        return list(self.directory.glob(".*"))


class _ListSink(WriteAheadSinkBase):
    """A target that takes rows and remembers nothing about units."""

    def __init__(self, rows: list[int]) -> None:
        self._rows = rows

    def create_delivery(self, context: SinkContext) -> UnitDelivery:
        return _ListDelivery(self._rows)


class _ListDelivery(UnitDelivery):
    def __init__(self, rows: list[int]) -> None:
        self._rows = rows

    def deliver(self, unit: Committable, batches: Iterator[pa.RecordBatch]) -> None:
        for batch in batches:
            self._rows += batch["id"].to_pylist()


class TestWriteAheadSinkBase(WriteAheadSinkContract):
    @pytest.fixture(autouse=True)
    def _set_target(self, tmp_path: Path) -> None:
        self.directory = tmp_path
        self.logs = MemoryLogs()
        self.rows: list[int] = []

    def make_sink(self) -> Sink:
        return _ListSink(self.rows)

    def make_context(self, epoch: int, checkpoint_id: int, subtask: int) -> SinkContext:
        log = self.logs.log("contract", epoch, subtask)
        return plain_context(self.directory, epoch, checkpoint_id, subtask, log)

    def visible_rows(self) -> list[int]:
        return sorted(self.rows)

    def leftovers(self) -> Sequence[object]:
        return list(self.logs.units)
