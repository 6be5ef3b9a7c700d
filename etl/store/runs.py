"""The record of runs, for people: who ran when, what came of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

import sqlalchemy as sa

from etl.errors import FencedError
from etl.store import tables
from etl.store.database import StoreConnection
from etl.store.lease import Lease
from etl.store.tables import RunStatus
from etl.transaction import transaction


@dataclass(slots=True)
class RunTotals:
    """Rows of the checkpoints that a run has completed; every checkpoint counts in exactly one run.

    Attributes:
        rows_read: Records read.
        rows_written: Rows by sink uid.
    """

    rows_read: int = 0
    rows_written: dict[str, int] = field(default_factory=dict)

    def plus(self, rows_read: int, rows_written: Mapping[str, int]) -> RunTotals:
        """The totals with another checkpoint."""
        summed = {uid: self.rows_written.get(uid, 0) + rows for uid, rows in rows_written.items()}
        return RunTotals(self.rows_read + rows_read, self.rows_written | summed)

    def set(self, other: RunTotals) -> None:
        """Take over other totals."""
        self.rows_read, self.rows_written = other.rows_read, dict(other.rows_written)


def start(connection: StoreConnection, lease: Lease, version: str, first_epoch: int | None = None) -> int:
    """Record that a run has begun and mark former ones that never ended as crashed; called by the owner.

    Args:
        connection: The owner's session.
        lease: The owner's claim.
        version: Of the program.
        first_epoch: Epoch of the run's first attempt. A former attempt may have written the record and not have heard
            of it; then that one counts. None: there was none.

    Raises:
        FencedError: A newer run owns the job by now; its record is left alone.
    """
    run = tables.run
    values = {
        "job_id": lease.job_id,
        "status": RunStatus.RUNNING,
        "epoch": lease.epoch,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": version,
    }
    with transaction(connection.driver):
        _require_owner(connection, lease)
        begun = _record_since(connection, lease, first_epoch)
        if begun is not None:
            return begun
        connection.core.execute(
            sa.update(run)
            .where(run.c.job_id == lease.job_id, run.c.status == RunStatus.RUNNING)
            .values(status=RunStatus.CRASHED, ended_at=sa.func.now(), error="the process ended without a word")
        )
        return int(connection.core.execute(sa.insert(run).values(**values).returning(run.c.run_id)).scalar_one())


def _require_owner(connection: StoreConnection, lease: Lease) -> None:
    # Relies on READ COMMITTED: an epoch that is seen to be another is not waited for; else the lock keeps newer runs
    # from claiming the job, and so from finding this one's record missing, before it is written.
    head = tables.head.c
    query = sa.select(head.epoch).where(head.job_id == lease.job_id, head.epoch == lease.epoch)
    if connection.core.execute(query.with_for_update(read=True)).one_or_none() is None:
        raise FencedError(f"epoch {lease.epoch} was overtaken by a newer run of the job")


def _record_since(connection: StoreConnection, lease: Lease, first_epoch: int | None) -> int | None:
    # Nobody else has claimed the job since that epoch: what has begun after it is the run's own.
    if first_epoch is None:
        return None
    run = tables.run.c
    query = sa.select(run.run_id).where(
        run.job_id == lease.job_id, run.status == RunStatus.RUNNING, run.epoch >= first_epoch
    )
    found: int | None = connection.core.execute(query).scalar_one_or_none()
    return found


def finish(
    connection: StoreConnection,
    run_id: int,
    status: RunStatus,
    *,
    exit_code: int,
    error: str | None,
    totals: RunTotals,
    checkpoint_id: int,
    restarts: int,
) -> bool:
    """Record the end of a run; False when a later run has already declared this one dead.

    A fenced run does not call this: its successor has declared it dead already.
    """
    run = tables.run
    done = connection.core.execute(
        sa.update(run)
        .where(run.c.run_id == run_id, run.c.status == RunStatus.RUNNING)
        .values(
            status=status,
            ended_at=sa.func.now(),
            exit_code=exit_code,
            error=error,
            rows_read=totals.rows_read,
            rows_written=totals.rows_written,
            checkpoint_id=checkpoint_id,
            restarts=restarts,
        )
    )
    return done.rowcount == 1


def save_totals(connection: StoreConnection, run_id: int, totals: RunTotals, checkpoint_id: int) -> None:
    """Write totals in the transaction that completes a checkpoint: they are as exact as the checkpoint itself."""
    connection.core.execute(
        sa.update(tables.run)
        .where(tables.run.c.run_id == run_id)
        .values(rows_read=totals.rows_read, rows_written=totals.rows_written, checkpoint_id=checkpoint_id)
    )


def load_totals(connection: StoreConnection, run_id: int) -> tuple[RunTotals, int] | None:
    """Read totals and checkpoint back after a failed attempt, whose last commit may have succeeded without an answer.

    Waits for a completing transaction of this run that is still under way at the server: it holds the row's lock.

    Returns:
        None when somebody has deleted the row.
    """
    row = tables.run.c
    query = sa.select(row.rows_read, row.rows_written, row.checkpoint_id).where(row.run_id == run_id)
    found = connection.core.execute(query.with_for_update()).one_or_none()
    if found is None:
        return None
    rows_read, rows_written, checkpoint_id = found
    return RunTotals(int(rows_read), dict(rows_written)), int(checkpoint_id or 0)
