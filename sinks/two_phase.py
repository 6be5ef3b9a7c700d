"""Two-phase commit: rows are prepared at the barrier and made visible after the checkpoint has completed.

The base class holds the protocol; a target takes part with two small classes: one that stages and prepares units
(:class:`UnitStager`, in the writer's thread), one that finishes prepared units (:class:`PreparedUnits`, in the
coordinator's). PostgreSQL's prepared transactions are the first customer (:class:`sinks.TwoPhaseCommitSink`), files
that are renamed the second (:class:`sinks.ParquetFiles`); ``etl.testing.sink_contract`` proves a third one.

The idea is that of Flink's ``TwoPhaseCommittingSink``. Added to it: the epoch in every id, a decision by the recorded
id alone, and a ledger that tells a committed unit from one that was rolled back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import pyarrow as pa

from etl.errors import LostRowsError, StateError
from etl.sink import Committable, Committer, Delivery, Sink, SinkContext, SinkWriter, SupportsCommitter

PREFIX = "etl"


@dataclass(frozen=True, slots=True)
class UnitId:
    """Global id of a unit; never used twice, because every attempt has an epoch of its own.

    Ids are public (every role of a server can list them) and so hold nothing but numbers and the job's random id.
    """

    job_id: str
    epoch: int
    checkpoint_id: int
    sink_id: int
    subtask: int

    def __str__(self) -> str:
        return f"{PREFIX}:{self.job_id}:{self.epoch}:{self.checkpoint_id}:{self.sink_id}:{self.subtask}"

    @classmethod
    def of(cls, context: SinkContext, checkpoint_id: int) -> Self:
        """The id of this writer's unit of a checkpoint."""
        return cls(context.job_id, context.epoch, checkpoint_id, context.sink_id, context.subtask)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read an id back; None when it is not one of ours."""
        prefix, _, rest = text.partition(":")
        job_id, *numbers = rest.rsplit(":", 4)
        if prefix != PREFIX or len(numbers) != 4 or not all(number.isdecimal() for number in numbers):
            return None
        return cls(job_id, *map(int, numbers))


class UnitStager(ABC):
    """Stages the rows of one unit after another, invisible to readers."""

    @abstractmethod
    def begin(self, unit: UnitId) -> None:
        """A unit's first rows are about to come."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Stage rows of the unit that was begun last."""

    @abstractmethod
    def flush(self) -> None:
        """The unit has all its rows: send what is buffered."""

    @abstractmethod
    def prepare(self, unit: UnitId, committable: Committable) -> None:
        """Make the unit durable and able to be committed by its id, also by another process after a crash.

        Must itself record the unit where :meth:`PreparedUnits.is_committed` looks, if the target does not tell.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up a unit that was begun and not prepared; nothing of it may stay. Called exactly once."""


class PreparedUnits(ABC):
    """Finishes prepared units of one sink, whichever attempt and subtask prepared them."""

    @abstractmethod
    def list(self) -> Sequence[UnitId]:
        """Every unit of this job and sink that is prepared, or was begun and abandoned and left something behind."""

    @abstractmethod
    def commit(self, unit: str) -> bool:
        """Make the unit visible; atomic. False when nothing of that id is prepared (any more)."""

    @abstractmethod
    def rollback(self, unit: str) -> None:
        """Drop the unit; fine when it is gone already."""

    @abstractmethod
    def is_committed(self, committable: Committable) -> bool:
        """Whether exactly this unit was committed, by whatever process."""

    def newest(self) -> int:
        """The newest checkpoint of which a unit of this job and sink is known to be committed.

        One that is newer than the store's own tells that the store was set back. The default, 0, tells nothing.
        """
        return 0

    def forget(self, committable: Committable) -> None:  # noqa: B027 - a hook that few targets need
        """The unit was committed: what was kept about units long before it may go."""

    @abstractmethod
    def close(self) -> None:
        """Release connections; called exactly once."""


class TwoPhaseCommitSinkBase(Sink, SupportsCommitter):
    """Base of sinks that can prepare a unit and commit it later. Exactly-once if preparing outlives a crash."""

    delivery = Delivery.TWO_PHASE

    @abstractmethod
    def create_stager(self, context: SinkContext) -> UnitStager:
        """What the writer of one attempt stages with; must not connect or touch anything before its first unit."""

    @abstractmethod
    def open_prepared_units(self, context: SinkContext) -> PreparedUnits:
        """What the committer of one attempt finishes units with."""

    def create_writer(self, context: SinkContext) -> SinkWriter:
        """See :meth:`etl.sink.Sink.create_writer`."""
        return _Writer(context, self.create_stager(context))

    def create_committer(self, context: SinkContext) -> Committer:
        """See :meth:`etl.sink.SupportsCommitter.create_committer`."""
        return _Committer(context, self.open_prepared_units(context), self.describe())


class _Writer(SinkWriter):
    def __init__(self, context: SinkContext, stager: UnitStager) -> None:
        self._context = context
        self._stager = stager
        self._next_checkpoint_id = context.checkpoint_id + 1
        self._rows = 0
        self._unit_rows = 0

    @property
    def rows(self) -> int:
        return self._rows

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        if self._unit_rows == 0:
            self._stager.begin(UnitId.of(self._context, self._next_checkpoint_id))
        self._stager.write(batch)
        self._unit_rows += batch.num_rows
        self._rows += batch.num_rows

    def prepare_commit(self, checkpoint_id: int) -> Committable | None:
        self._next_checkpoint_id = checkpoint_id + 1
        rows, self._unit_rows = self._unit_rows, 0
        if rows == 0:
            return None
        unit = UnitId.of(self._context, checkpoint_id)
        committable = Committable(self._context.uid, unit.subtask, checkpoint_id, unit.epoch, rows, {"gid": str(unit)})
        self._stager.flush()
        self._emit("sink.prepare.before", checkpoint_id, rows)
        self._stager.prepare(unit, committable)
        self._emit("sink.prepared", checkpoint_id, rows)
        return committable

    def _emit(self, name: str, checkpoint_id: int, rows: int) -> None:
        self._context.emit(name, uid=self._context.uid, checkpoint=checkpoint_id, rows=rows)

    def close(self) -> None:
        self._stager.close()


class _Committer(Committer):
    def __init__(self, context: SinkContext, units: PreparedUnits, target: str) -> None:
        self._context = context
        self._units = units
        self._target = target

    def recover(self, completed: Sequence[Committable]) -> int:
        # A unit whose epoch is not below ours belongs to a newer run: touching it could lose that run's rows.
        recorded = {str(one.payload["gid"]): one for one in oldest_first(completed) if one.epoch < self._context.epoch}
        left = [unit for unit in self._units.list() if unit.epoch < self._context.epoch]
        self._context.emit("recover.listed", uid=self._context.uid, units=len(left))
        rows = 0
        for gid, committable in recorded.items():
            self._emit("recover.each.before", committable.checkpoint_id)
            rows += self._finish(gid, committable)
            self._emit("recover.each.after", committable.checkpoint_id)
        for unit in sorted(left, key=lambda unit: (unit.checkpoint_id, unit.epoch, unit.subtask)):
            if str(unit) not in recorded:
                self._emit("recover.each.before", unit.checkpoint_id)
                self._units.rollback(str(unit))
                self._emit("recover.each.after", unit.checkpoint_id)
        return rows

    def verify(self, completed: Sequence[Committable]) -> None:
        require_none_ahead(self._context, self._target, self._units.newest())
        for committable in completed:
            if not self._units.is_committed(committable):
                raise self._lost(str(committable.payload["gid"]), committable)

    def commit(self, committable: Committable) -> None:
        self._emit("commit.before", committable.checkpoint_id)
        self._finish(str(committable.payload["gid"]), committable)
        self._emit("commit.after", committable.checkpoint_id)
        self._units.forget(committable)

    def _finish(self, gid: str, committable: Committable) -> int:
        """Rows made visible by this call. That a unit is not there is never taken for success."""
        if self._units.commit(gid):
            return committable.rows
        if self._units.is_committed(committable):
            return 0
        raise self._lost(gid, committable)

    def _lost(self, gid: str, committable: Committable) -> LostRowsError:
        number = committable.checkpoint_id
        return LostRowsError(
            f'ALARM: sink "{committable.uid}", {self._target}: the {committable.rows} rows of checkpoint {number} are '
            f"lost: unit {gid} was prepared and recorded as completed, and now it is neither prepared nor committed "
            "(rolled back by hand, or the target was restored to an earlier state). Nothing was written after it. To "
            f"replay them, go back to checkpoint {number - 1}: the sources then read the range of checkpoint {number} "
            "again",
            uid=committable.uid,
        )

    def _emit(self, name: str, checkpoint_id: int) -> None:
        self._context.emit(name, uid=self._context.uid, checkpoint=checkpoint_id)

    def close(self) -> None:
        self._units.close()


def require_none_ahead(context: SinkContext, target: str, newest: int) -> None:
    """Refuse a target that has units of checkpoints which the store does not know: it would get their rows again.

    Args:
        context: The sink's.
        target: For the message.
        newest: The newest checkpoint of which the target has a unit.

    Raises:
        StateError: There are such units.
    """
    if newest > context.checkpoint_id:
        raise StateError(
            f'sink "{context.uid}", {target}: the target has rows of checkpoint {newest}, and the store knows none'
            f" after {context.checkpoint_id}: it was restored to an earlier state; nothing was written. Bring store and"
            " target to the same moment"
        )


def oldest_first(committables: Sequence[Committable]) -> list[Committable]:
    """In the order in which units must become visible."""
    return sorted(committables, key=lambda one: (one.checkpoint_id, one.subtask))
