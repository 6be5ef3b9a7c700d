"""Write-ahead delivery: rows wait in the store's log until their checkpoint has completed.

For targets that cannot prepare anything. The base class delivers at least once, in order and one unit at a time; how
good that is in the end is the target's business: :class:`sinks.WriteAheadSink` writes rows and ledger row in one
transaction and so delivers exactly once.

The idea is that of Flink's ``GenericWriteAheadSink``, whose flush and confirmation are two steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain

import pyarrow as pa

from etl.errors import LostRowsError
from etl.sink import Committable, Committer, Delivery, Sink, SinkContext, SinkWriter, SupportsCommitter
from sinks.chunker import Chunker
from sinks.two_phase import require_none_ahead

SEGMENT_ROWS_MAX = 65_536
SEGMENT_SIZE_BYTES = 1 << 20


class UnitDelivery(ABC):
    """Delivers units to a target; subclass it for a target of your own. Lives for one attempt, in one thread."""

    @abstractmethod
    def deliver(self, unit: Committable, batches: Iterator[pa.RecordBatch]) -> None:
        """Write all rows of a unit to the target and return when they are safe there.

        Units come in checkpoint order. A unit comes again, with the same ``(epoch, checkpoint_id, subtask)`` and the
        same batches, when a crash hits after the delivery and before the log was pruned: a target that can remember
        these three numbers delivers exactly once.

        Args:
            unit: Which rows these are.
            batches: The rows, in order; read them once.
        """

    def is_delivered(self, unit: Committable) -> bool | None:  # noqa: ARG002 - the default knows no unit
        """Whether the target itself knows that the unit is there; None when it cannot tell."""
        return None

    def newest(self) -> int:
        """The newest checkpoint of which the target knows a unit.

        One that is newer than the store's own tells that the store was set back. The default, 0, tells nothing.
        """
        return 0

    def is_ready(self) -> bool:
        """Asked in recovery before units of former epochs are delivered; False puts them off until after fencing."""
        return True

    def close(self) -> None:
        """Release connections; called exactly once."""
        return


class BatchCheck:
    """Looks at rows before they are logged; the default has nothing against any. Used in one thread."""

    def check(self, batch: pa.RecordBatch) -> None:
        """Look at a batch.

        Raises:
            RecordError: The target would refuse a value.
        """

    def close(self) -> None:
        """Release connections; called exactly once."""


class WriteAheadSinkBase(Sink, SupportsCommitter):
    """Base of sinks without transactions: at-least-once, never a row before its checkpoint has completed."""

    delivery = Delivery.WRITE_AHEAD_AT_LEAST_ONCE

    @abstractmethod
    def create_delivery(self, context: SinkContext) -> UnitDelivery:
        """What the committer of one attempt delivers with."""

    def create_check(self, context: SinkContext) -> BatchCheck:  # noqa: ARG002 - the default checks nothing
        """What looks at rows before they are logged, for one attempt.

        What the log holds has to be delivered. So whatever can be told about the target's refusal is told here, where
        the user can still correct the input.
        """
        return BatchCheck()

    def create_writer(self, context: SinkContext) -> SinkWriter:
        """See :meth:`etl.sink.Sink.create_writer`."""
        return _Writer(context, self.create_check(context))

    def create_committer(self, context: SinkContext) -> Committer:
        """See :meth:`etl.sink.SupportsCommitter.create_committer`."""
        return _Committer(context, self.create_delivery(context), self.describe())


class _Writer(SinkWriter):
    def __init__(self, context: SinkContext, check: BatchCheck) -> None:
        self._context = context
        self._check = check
        self._chunker = Chunker(SEGMENT_ROWS_MAX, SEGMENT_SIZE_BYTES)
        self._checkpoint_id = context.checkpoint_id + 1
        self._rows = 0
        self._begun = False

    @property
    def rows(self) -> int:
        return self._rows

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.num_rows
        for chunk in self._chunker.add(batch):
            self._append(chunk)

    def _append(self, chunk: pa.RecordBatch) -> None:
        self._check.check(chunk)
        if not self._begun:
            self._begun = True
            self._context.emit("sink.begun", uid=self._context.uid, checkpoint=self._checkpoint_id)
        self._context.log.append(self._checkpoint_id, chunk)
        self._context.emit("sink.written", uid=self._context.uid, checkpoint=self._checkpoint_id, rows=chunk.num_rows)

    def prepare_commit(self, checkpoint_id: int) -> Committable | None:
        for chunk in self._chunker.rest():
            self._append(chunk)
        self._checkpoint_id = checkpoint_id + 1
        if not self._begun:
            return None
        self._begun = False
        context = self._context
        context.emit("sink.prepare.before", uid=context.uid, checkpoint=checkpoint_id)
        rows = context.log.seal(checkpoint_id)
        context.emit("sink.prepared", uid=context.uid, checkpoint=checkpoint_id, rows=rows)
        return Committable(context.uid, context.subtask, checkpoint_id, context.epoch, rows, {})

    def close(self) -> None:
        """The log belongs to the runtime; what was not sealed is gone with it."""
        self._check.close()


class _Committer(Committer):
    def __init__(self, context: SinkContext, delivery: UnitDelivery, target: str) -> None:
        self._context = context
        self._delivery = delivery
        self._target = target

    def recover(self, completed: Sequence[Committable]) -> int:
        log = self._context.log
        log.discard_unfinished(completed)
        pending = log.pending(completed)
        self._context.emit("recover.listed", uid=self._context.uid, units=len(pending))
        if not pending or not self._delivery.is_ready():
            return 0
        return sum(self._recover_unit(unit) for unit in pending)

    def _recover_unit(self, unit: Committable) -> int:
        self._emit("recover.each.before", unit)
        rows = self._finish(unit)
        self._emit("recover.each.after", unit)
        return rows

    def verify(self, completed: Sequence[Committable]) -> None:
        require_none_ahead(self._context, self._target, self._delivery.newest())
        for unit in self._context.log.pending(completed):
            self._recover_unit(unit)
        for unit in completed:
            if self._delivery.is_delivered(unit) is False:
                raise self._lost(unit)

    def commit(self, committable: Committable) -> None:
        self._emit("commit.before", committable)
        self._finish(committable)
        self._emit("commit.after", committable)

    def _finish(self, unit: Committable) -> int:
        """Deliver the unit unless the target has it; returns the rows made visible by this call."""
        known = self._delivery.is_delivered(unit)
        if not known and not self._deliver(unit, must_be_there=known is not None):
            return 0
        self._context.log.prune(unit)
        return 0 if known else unit.rows

    def _deliver(self, unit: Committable, *, must_be_there: bool) -> bool:
        """False when the log does not hold the unit: it was delivered before, and pruned after that only."""
        with self._context.log.read(unit) as batches:
            first = next(batches, None)
            if first is None and not must_be_there:
                return False
            self._delivery.deliver(unit, self._complete(unit, chain([first] if first is not None else [], batches)))
        self._emit("commit.delivered", unit)
        return True

    def _complete(self, unit: Committable, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches, and an error at their end when the log does not hold all of the unit."""
        rows = 0
        for batch in batches:
            rows += batch.num_rows
            yield batch
        if rows != unit.rows:
            raise self._lost(unit)

    def _lost(self, unit: Committable) -> LostRowsError:
        number = unit.checkpoint_id
        return LostRowsError(
            f'ALARM: sink "{unit.uid}", {self._target}: the {unit.rows} rows of checkpoint {number} are'
            " lost: neither the target nor the write-ahead log has all of them. Nothing was written after them."
            f" To replay them, go back to checkpoint {number - 1}: the sources then read the range of checkpoint"
            f" {number} again",
            uid=unit.uid,
        )

    def _emit(self, name: str, unit: Committable) -> None:
        self._context.emit(name, uid=self._context.uid, checkpoint=unit.checkpoint_id, rows=unit.rows)

    def close(self) -> None:
        self._delivery.close()
