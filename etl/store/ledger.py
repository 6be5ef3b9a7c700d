"""Fence and commit ledger of a target database (contract: :class:`etl.sink.Ledger`).

These statements run on the sink's own session, inside the transaction that carries the rows, hence through psycopg.
"""

from __future__ import annotations

import psycopg

from etl.errors import FenceBlockedError, FencedError
from etl.sink import Committable, Connection
from etl.store.lease import terminate_sessions
from etl.transaction import transaction

FENCE_LOCK_TIMEOUT_MS = 500


class DatabaseLedger:
    """Ledger of one sink for one attempt.

    Args:
        job_id: The job.
        incarnation: Its line of checkpoints; numbers may repeat in another one.
        epoch: Fencing token of the attempt.
        sink_id: Number of the sink.
        keep: How many of the newest ledger rows are never pruned.
    """

    def __init__(self, job_id: str, incarnation: int, epoch: int, sink_id: int, keep: int) -> None:
        self._job_id = job_id
        self._incarnation = incarnation
        self._epoch = epoch
        self._sink_id = sink_id
        self._keep = keep

    def fence(self, connection: Connection) -> None:
        """See :meth:`etl.sink.Ledger.fence`."""
        terminate_sessions(connection, self._job_id, below_epoch=self._epoch)
        connection.execute(
            "INSERT INTO etl.fence (job_id, epoch) VALUES (%s, 0) ON CONFLICT (job_id) DO NOTHING", [self._job_id]
        )
        try:
            with transaction(connection):
                connection.execute(f"SET LOCAL lock_timeout = {FENCE_LOCK_TIMEOUT_MS}")
                # Waits for every transaction that holds the row FOR SHARE, prepared ones included.
                connection.execute(
                    "UPDATE etl.fence SET epoch = %s WHERE job_id = %s AND epoch < %s",
                    [self._epoch, self._job_id, self._epoch],
                )
        except psycopg.errors.LockNotAvailable:
            raise FenceBlockedError(
                f"a transaction of an older run of job {self._job_id} still holds the fence"
            ) from None
        row = connection.execute("SELECT epoch FROM etl.fence WHERE job_id = %s", [self._job_id]).fetchone()
        if row != (self._epoch,):
            raise FencedError(f"epoch {self._epoch} was overtaken by a newer run of the job")

    def hold_fence(self, connection: Connection) -> None:
        """See :meth:`etl.sink.Ledger.hold_fence`."""
        # FOR SHARE waits for a fencing UPDATE and then checks the epoch again (READ COMMITTED); a bare SELECT does not.
        row = connection.execute(
            "SELECT 1 FROM etl.fence WHERE job_id = %s AND epoch = %s FOR SHARE", [self._job_id, self._epoch]
        ).fetchone()
        if row is None:
            raise FencedError(f"epoch {self._epoch} was overtaken by a newer run of the job")

    def record(self, connection: Connection, committable: Committable) -> None:
        """See :meth:`etl.sink.Ledger.record`."""
        connection.execute(
            "INSERT INTO etl.commit_ledger (job_id, incarnation, sink_id, subtask, checkpoint_id, epoch, rows)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s)",
            [*self._key(committable), committable.rows],
        )

    def is_recorded(self, connection: Connection, committable: Committable) -> bool:
        """See :meth:`etl.sink.Ledger.is_recorded`."""
        row = connection.execute(
            "SELECT 1 FROM etl.commit_ledger WHERE job_id = %s AND incarnation = %s AND sink_id = %s AND subtask = %s"
            " AND checkpoint_id = %s AND epoch = %s",
            self._key(committable),
        ).fetchone()
        return row is not None

    def newest(self, connection: Connection) -> int:
        """See :meth:`etl.sink.Ledger.newest`."""
        row = connection.execute(
            "SELECT coalesce(max(checkpoint_id), 0) FROM etl.commit_ledger"
            " WHERE job_id = %s AND incarnation = %s AND sink_id = %s",
            [self._job_id, self._incarnation, self._sink_id],
        ).fetchone()
        assert row is not None
        return int(row[0])

    def prune(self, connection: Connection, checkpoint_id: int) -> None:
        """See :meth:`etl.sink.Ledger.prune`."""
        connection.execute(
            "DELETE FROM etl.commit_ledger WHERE job_id = %s AND incarnation = %s AND sink_id = %s"
            " AND checkpoint_id < %s",
            [self._job_id, self._incarnation, self._sink_id, checkpoint_id - self._keep],
        )

    def _key(self, committable: Committable) -> list[str | int]:
        return [
            self._job_id,
            self._incarnation,
            self._sink_id,
            committable.subtask,
            committable.checkpoint_id,
            committable.epoch,
        ]
