"""The write-ahead log: rows staged in the store until their checkpoint completes.

Contract: :class:`etl.sink.WriteAheadLog`.

A row of the table is one *segment*: a compressed Arrow IPC stream of one batch. Appending happens in a transaction
that holds the store's fence, from the first row of a unit to :meth:`DatabaseWriteAheadLog.seal`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.ipc
from psycopg import sql
from psycopg.rows import tuple_row

from etl.errors import InternalError, StateError
from etl.sink import Committable, Connection, Ledger
from etl.store.read_ahead import read_ahead
from etl.transaction import begin, commit, transaction

READ_AHEAD_BATCHES = 4

_COPY = (
    "COPY etl.write_ahead_log"
    " (job_id, incarnation, sink_id, subtask, checkpoint_id, epoch, sequence, rows, segment) FROM STDIN (FORMAT BINARY)"
)
_COPY_TYPES = ["text", "int8", "int4", "int4", "int8", "int8", "int4", "int8", "bytea"]
_UNIT = sql.SQL(
    " WHERE job_id = %s AND incarnation = %s AND sink_id = %s AND subtask = %s AND checkpoint_id = %s AND epoch = %s"
)
_SELECT = sql.SQL("SELECT segment FROM etl.write_ahead_log") + _UNIT + sql.SQL(" ORDER BY sequence")
_DELETE = sql.SQL("DELETE FROM etl.write_ahead_log") + _UNIT
_IPC = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)


class DatabaseWriteAheadLog:
    """The log of one sink subtask for one attempt; ``append`` and ``seal`` are the writer's, the rest the committer's.

    Args:
        connect: Opens a session in the store.
        ledger: The store's fence.
        uid: The sink's uid, for the handles it returns.
        job_id: The job.
        incarnation: Its line of checkpoints.
        epoch: Fencing token of the attempt.
        sink_id: Number of the sink.
        subtask: Which parallel instance.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        ledger: Ledger,
        uid: str,
        job_id: str,
        incarnation: int,
        epoch: int,
        sink_id: int,
        subtask: int,
    ) -> None:
        self._connect = connect
        self._ledger = ledger
        self._uid = uid
        self._job = (job_id, incarnation, sink_id)
        self._subtask = subtask
        self._epoch = epoch
        self._writing: Connection | None = None
        self._reading: Connection | None = None
        self._open_for: int | None = None
        self._sequence = 0
        self._rows = 0

    def append(self, checkpoint_id: int, batch: pa.RecordBatch) -> None:
        """See :meth:`etl.sink.WriteAheadLog.append`."""
        connection = self._begin(checkpoint_id)
        segment = pa.BufferOutputStream()
        with pa.ipc.new_stream(segment, batch.schema, options=_IPC) as writer:
            writer.write_batch(batch)
        row = (
            *self._job,
            self._subtask,
            checkpoint_id,
            self._epoch,
            self._sequence,
            batch.num_rows,
            segment.getvalue(),
        )
        with connection.cursor() as cursor, cursor.copy(_COPY) as copy:
            copy.set_types(_COPY_TYPES)
            copy.write_row((*row[:-1], row[-1].to_pybytes()))
        self._sequence += 1
        self._rows += batch.num_rows

    def _begin(self, checkpoint_id: int) -> Connection:
        if self._writing is None:
            self._writing = self._connect()
        if self._open_for is None:
            begin(self._writing)
            self._ledger.hold_fence(self._writing)
            self._open_for = checkpoint_id
        self._require_open(checkpoint_id)
        return self._writing

    def _require_open(self, checkpoint_id: int) -> None:
        if self._open_for != checkpoint_id:
            raise InternalError(f"log of sink {self._uid}: open for checkpoint {self._open_for}, not {checkpoint_id}")

    def seal(self, checkpoint_id: int) -> int:
        """See :meth:`etl.sink.WriteAheadLog.seal`."""
        if self._writing is None or self._open_for is None:
            return 0
        self._require_open(checkpoint_id)
        commit(self._writing)
        rows, self._open_for, self._sequence, self._rows = self._rows, None, 0, 0
        return rows

    @contextmanager
    def read(self, committable: Committable) -> Iterator[Iterator[pa.RecordBatch]]:
        """See :meth:`etl.sink.WriteAheadLog.read`."""
        connection = self._committing()
        with transaction(connection), connection.cursor("segments", row_factory=tuple_row) as cursor:
            cursor.itersize = 4
            cursor.execute(
                _SELECT,
                self._unit(committable),
                binary=True,
            )
            batches = (batch for (segment,) in cursor for batch in self._decoded(segment, committable))
            # The server sends the next segments while the target takes the rows of these.
            with read_ahead(batches, READ_AHEAD_BATCHES) as taken:
                yield taken

    def _decoded(self, segment: bytes, committable: Committable) -> Iterator[pa.RecordBatch]:
        try:
            yield from pa.ipc.open_stream(segment)
        except (pa.ArrowInvalid, OSError) as error:
            raise StateError(
                f'etl.write_ahead_log: a segment of sink "{self._uid}", checkpoint {committable.checkpoint_id}, is not'
                f" one that was written ({error}): put it back, from a backup of the store"
            ) from error

    def prune(self, committable: Committable) -> None:
        """See :meth:`etl.sink.WriteAheadLog.prune`."""
        self._committing().execute(_DELETE, self._unit(committable))

    def discard_unfinished(self, completed: Sequence[Committable]) -> None:
        """See :meth:`etl.sink.WriteAheadLog.discard_unfinished`."""
        connection = self._committing()
        for unit in self._units(connection):
            if not any(_same_unit(unit, one) for one in completed):
                connection.execute(_DELETE, self._unit(unit))

    def pending(self, completed: Sequence[Committable]) -> Sequence[Committable]:
        """See :meth:`etl.sink.WriteAheadLog.pending`."""
        there = self._units(self._committing())
        recorded = [one for one in completed if any(_same_unit(unit, one) for unit in there)]
        return sorted(recorded, key=lambda one: one.checkpoint_id)

    def _units(self, connection: Connection) -> list[Committable]:
        """Units of former epochs only: a newer run may already be writing."""
        rows = connection.execute(
            "SELECT subtask, checkpoint_id, epoch, sum(rows)::bigint FROM etl.write_ahead_log"
            " WHERE job_id = %s AND incarnation = %s AND sink_id = %s AND subtask = %s AND epoch < %s GROUP BY 1, 2, 3",
            [*self._job, self._subtask, self._epoch],
        ).fetchall()
        return [Committable(self._uid, subtask, number, epoch, count, {}) for subtask, number, epoch, count in rows]

    def _unit(self, committable: Committable) -> list[str | int]:
        return [*self._job, committable.subtask, committable.checkpoint_id, committable.epoch]

    def _committing(self) -> Connection:
        if self._reading is None:
            self._reading = self._connect()
        return self._reading

    def close(self) -> None:
        """See :meth:`etl.sink.WriteAheadLog.close`."""
        for connection in (self._writing, self._reading):
            if connection is not None:
                connection.close()


def _same_unit(one: Committable, other: Committable) -> bool:
    return (one.subtask, one.checkpoint_id, one.epoch) == (other.subtask, other.checkpoint_id, other.epoch)
