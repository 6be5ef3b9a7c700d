"""Contract suites for sinks: inherit one, fill in the hooks, run pytest.

::

    class TestMySink(TwoPhaseSinkContract):
        @pytest.fixture(autouse=True)
        def _target(self, tmp_path):
            self.directory = tmp_path

        def make_sink(self): return MySink(self.directory)
        def make_context(self, epoch, checkpoint_id, subtask): return plain_context(self.directory, …)
        def visible_rows(self): return sorted(…)
        def leftovers(self): return […]

Each test is one promise of :mod:`etl.sink`, in the words of the protocol: an *attempt* has an epoch, a crash is an
attempt whose objects are dropped, and the next attempt has a higher epoch.
"""

# ruff: noqa: D102 - the name of a test is its documentation
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pyarrow as pa

from etl.errors import InternalError, StateError
from etl.schema import Schema
from etl.sink import Committable, Committer, Sink, SinkContext, SinkWriter, SupportsCommitter, WriteAheadLog
from etl.testing.memory_log import MemoryWriteAheadLog

CONTRACT_SCHEMA = Schema.declare({"id": "int8", "note": "text"})
"""Columns of every batch that the suites write; ``id`` is never repeated."""


def batch_of(*ids: int) -> pa.RecordBatch:
    """A batch with these ids."""
    columns = [pa.array(ids, pa.int64()), pa.array([f"note {number}" for number in ids], pa.string())]
    return pa.RecordBatch.from_arrays(columns, schema=CONTRACT_SCHEMA.to_arrow())


class NoDatabase:
    """Stands for everything of a context that a sink without PostgreSQL must not use."""

    def __getattr__(self, name: str) -> NoReturn:
        raise InternalError(f"this context has no database: {name} was used")

    def __call__(self, role: str) -> NoReturn:
        raise InternalError(f"this context has no database: a connection for {role!r} was asked for")


def plain_context(
    base_dir: Path, epoch: int, checkpoint_id: int, subtask: int, log: WriteAheadLog | None = None
) -> SinkContext:
    """A context for sinks that use neither database nor ledger."""
    nothing: Any = NoDatabase()
    return SinkContext(
        job_id="c0ffee0000000000",
        uid="contract",
        sink_id=1,
        subtask=subtask,
        epoch=epoch,
        checkpoint_id=checkpoint_id,
        schema=CONTRACT_SCHEMA,
        connect=nothing,
        ledger=nothing,
        log=log if log is not None else nothing,
        transactions=nothing,
        base_dir=base_dir,
        unit_time_s=60.0,
        emit=lambda *_args, **_fields: None,
    )


class SinkContract(ABC):
    """What both suites ask of the sink under test."""

    tells_newest: ClassVar[bool] = False
    """Whether the target itself remembers its newest checkpoint, and so can tell that the store was set back."""

    @abstractmethod
    def make_sink(self) -> Sink:
        """The declaration; its target exists and is empty when a test begins."""

    @abstractmethod
    def make_context(self, epoch: int, checkpoint_id: int, subtask: int) -> SinkContext:
        """A context of an attempt, with :data:`CONTRACT_SCHEMA`; all share one job, sink, log and target."""

    @abstractmethod
    def visible_rows(self) -> list[int]:
        """The ids that a reader of the target sees now, sorted."""

    @abstractmethod
    def leftovers(self) -> Sequence[object]:
        """Whatever is staged or half written and not visible; empty when all is settled."""

    @contextmanager
    def writer(self, epoch: int = 1, checkpoint_id: int = 0, subtask: int = 0) -> Iterator[SinkWriter]:
        """A writer of an attempt, at the target that the attempt has fenced."""
        sink, context = self.make_sink(), self.make_context(epoch, checkpoint_id, subtask)
        sink.fence(context)
        writer = sink.create_writer(context)
        try:
            yield writer
        finally:
            writer.close()
            self.release(context)

    @contextmanager
    def committer(self, epoch: int = 1, checkpoint_id: int = 0) -> Iterator[Committer]:
        """A committer of an attempt."""
        sink, context = self.make_sink(), self.make_context(epoch, checkpoint_id, 0)
        with self._committer(sink, context) as committer:
            yield committer

    @contextmanager
    def _committer(self, sink: Sink, context: SinkContext) -> Iterator[Committer]:
        assert isinstance(sink, SupportsCommitter)
        committer = sink.create_committer(context)
        try:
            yield committer
        finally:
            committer.close()
            self.release(context)

    def release(self, context: SinkContext) -> None:  # noqa: B027 - most contexts hold nothing open
        """The attempt is over: close what the runtime would close."""

    def stage_unit(self, checkpoint_id: int, *ids: int, epoch: int = 1, subtask: int = 0) -> Committable:
        """Write and prepare one unit in a writer of its own."""
        with self.writer(epoch, checkpoint_id - 1, subtask) as writer:
            writer.write(batch_of(*ids))
            unit = writer.prepare_commit(checkpoint_id)
        assert unit is not None
        return unit

    # --- promises of every sink with a committer ------------------------------------------------------------------

    def test_rows_stay_invisible_until_commit(self) -> None:
        unit = self.stage_unit(1, 1, 2)
        assert self.visible_rows() == []
        with self.committer() as committer:
            committer.commit(unit)
        assert self.visible_rows() == [1, 2]
        assert list(self.leftovers()) == []

    def test_committable_names_its_unit(self) -> None:
        unit = self.stage_unit(7, 1, 2, 3, epoch=4)
        assert (unit.subtask, unit.checkpoint_id, unit.epoch, unit.rows) == (0, 7, 4, 3)

    def test_commit_is_idempotent(self) -> None:
        unit = self.stage_unit(1, 1, 2)
        for _ in range(2):
            with self.committer() as committer:
                committer.commit(unit)
                committer.commit(unit)
        assert self.visible_rows() == [1, 2]

    def test_units_become_visible_one_by_one(self) -> None:
        with self.writer() as writer:
            writer.write(batch_of(1))
            first = writer.prepare_commit(1)
            writer.write(batch_of(2))
            second = writer.prepare_commit(2)
            assert writer.rows == 2
        assert first is not None
        assert second is not None
        with self.committer() as committer:
            committer.commit(first)
            assert self.visible_rows() == [1]
            committer.commit(second)
        assert self.visible_rows() == [1, 2]

    def test_target_that_is_ahead_of_the_store_is_refused_where_it_can_tell(self) -> None:
        units = [self.stage_unit(number, number) for number in (1, 2)]
        with self.committer(checkpoint_id=2) as committer:
            for unit in units:
                committer.commit(unit)
        with self.committer(epoch=2, checkpoint_id=1) as committer:
            if self.tells_newest:
                assert "rows of checkpoint 2" in _state_error(lambda: committer.verify(units[:1]))
            else:
                committer.verify(units[:1])

    def test_empty_unit_leaves_nothing(self) -> None:
        with self.writer() as writer:
            writer.write(batch_of())
            assert writer.prepare_commit(1) is None
            assert writer.prepare_commit(2) is None
            assert list(self.leftovers()) == []

    def test_unit_after_an_empty_one_is_whole(self) -> None:
        with self.writer() as writer:
            assert writer.prepare_commit(1) is None
            writer.write(batch_of(5))
            unit = writer.prepare_commit(2)
        assert unit is not None
        with self.committer() as committer:
            committer.commit(unit)
        assert self.visible_rows() == [5]

    def test_close_without_prepare_leaves_nothing(self) -> None:
        with self.writer() as writer:
            writer.write(batch_of(1, 2))
        assert self.visible_rows() == []
        assert list(self.leftovers()) == []

    def test_recover_commits_what_is_recorded(self) -> None:
        unit = self.stage_unit(1, 1, 2)
        with self.committer(epoch=2, checkpoint_id=1) as committer:
            assert self.recover(committer, [unit]) == 2
            committer.verify([unit])
        assert self.visible_rows() == [1, 2]
        assert list(self.leftovers()) == []

    def test_recover_drops_what_is_not_recorded(self) -> None:
        recorded, _lost = self.stage_unit(1, 1), self.stage_unit(2, 2)
        with self.committer(epoch=2, checkpoint_id=1) as committer:
            assert self.recover(committer, [recorded]) == 1
        assert self.visible_rows() == [1]
        assert list(self.leftovers()) == []

    def test_recover_changes_nothing_when_it_is_repeated(self) -> None:
        unit = self.stage_unit(1, 1)
        for epoch in (2, 3):
            with self.committer(epoch, checkpoint_id=1) as committer:
                self.recover(committer, [unit])
                assert self.recover(committer, [unit]) == 0
                committer.verify([unit])
        assert self.visible_rows() == [1]

    def test_recover_never_touches_its_own_or_a_newer_epoch(self) -> None:
        newer = self.stage_unit(1, 1, epoch=3)
        for epoch in (2, 3):
            with self.committer(epoch) as committer:
                assert committer.recover([]) == 0
        assert self.visible_rows() == []
        with self.committer(epoch=3) as committer:
            committer.commit(newer)
        assert self.visible_rows() == [1]

    def test_replayed_checkpoint_is_not_confused_with_the_one_that_was_dropped(self) -> None:
        self.stage_unit(1, 1, epoch=1)
        with self.committer(epoch=2) as committer:
            committer.recover([])
        replayed = self.stage_unit(1, 1, epoch=2)
        with self.committer(epoch=2) as committer:
            committer.commit(replayed)
        assert self.visible_rows() == [1]

    def recover(self, committer: Committer, completed: Sequence[Committable]) -> int:
        """Recovery as the runtime does it: the rows made visible."""
        return committer.recover(completed)


class TwoPhaseSinkContract(SinkContract):
    """Promises of a sink that prepares units."""

    def test_recover_settles_all_subtasks(self) -> None:
        units = [self.stage_unit(1, 1, subtask=0), self.stage_unit(1, 2, subtask=1)]
        with self.committer(epoch=2, checkpoint_id=1) as committer:
            assert committer.recover(units) == 2
        assert self.visible_rows() == [1, 2]

    def test_lost_unit_raises_instead_of_passing_for_committed(self) -> None:
        unit = self.stage_unit(1, 1)
        with self.committer(epoch=2) as committer:
            committer.recover([])
        with self.committer(epoch=3, checkpoint_id=1) as committer:
            for settle in (lambda: committer.recover([unit]), lambda: committer.verify([unit])):
                assert "checkpoint 1" in _state_error(settle)
            assert "lost" in _state_error(lambda: committer.commit(unit))
        assert self.visible_rows() == []


class WriteAheadSinkContract(SinkContract):
    """Promises of a sink that delivers from the log."""

    exactly_once: ClassVar[bool] = False
    """Whether the target itself remembers what was delivered."""

    def test_crash_between_delivery_and_pruning_delivers_again_only_where_the_target_cannot_tell(self) -> None:
        unit = self.stage_unit(1, 1)
        context = self.make_context(1, 0, 0)
        context = replace(context, log=_CrashBeforePrune(context.log))
        with self._committer(self.make_sink(), context) as committer, suppress(_Crash):
            committer.commit(unit)
        assert self.visible_rows() == [1]
        with self.committer(epoch=2, checkpoint_id=1) as committer:
            self.recover(committer, [unit])
        assert self.visible_rows() == ([1] if self.exactly_once else [1, 1])
        assert list(self.leftovers()) == []

    def test_units_of_several_checkpoints_are_delivered_in_order(self) -> None:
        units = [self.stage_unit(number, number) for number in (1, 2, 3)]
        with self.committer(epoch=2, checkpoint_id=3) as committer:
            assert self.recover(committer, list(reversed(units))) == 3
        assert self.visible_rows() == [1, 2, 3]


class _Crash(BaseException):
    """Ends an attempt at a chosen point."""


class _CrashBeforePrune:
    def __init__(self, log: WriteAheadLog) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def prune(self, committable: Committable) -> None:
        raise _Crash(f"before pruning checkpoint {committable.checkpoint_id}")


def _state_error(call: Any) -> str:
    try:
        call()
    except StateError as error:
        return str(error)
    raise AssertionError("a lost unit was taken for a committed one")


__all__ = [
    "CONTRACT_SCHEMA",
    "MemoryWriteAheadLog",
    "SinkContract",
    "TwoPhaseSinkContract",
    "WriteAheadSinkContract",
    "batch_of",
    "plain_context",
]
