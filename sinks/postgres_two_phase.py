"""Two-phase commit with PostgreSQL's prepared transactions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import psycopg
import pyarrow as pa

from etl.errors import TransientError
from etl.sink import Committable, Connection, SinkContext
from etl.transaction import commit_prepared, prepare, rollback_prepared
from sinks.postgres_table import PostgresTable
from sinks.postgres_unit import PostgresSink, PostgresUnit
from sinks.postgres_writer import translated
from sinks.two_phase import PREFIX, PreparedUnits, TwoPhaseCommitSinkBase, UnitId, UnitStager

BUSY_ATTEMPTS = 100
BUSY_PAUSE_S = 0.1


class TwoPhaseCommitSink(PostgresSink, TwoPhaseCommitSinkBase):
    """Rows go into a transaction that is prepared at the barrier and committed after the checkpoint: exactly-once.

    Works in any PostgreSQL database that allows prepared transactions (``max_prepared_transactions`` > 0); the target
    need not be the store. Readers see the rows of a checkpoint all at once. Until then they hold their locks, so a
    table should not be written by others under the same keys.
    """

    def create_stager(self, context: SinkContext) -> UnitStager:
        """See :class:`TwoPhaseCommitSinkBase`."""
        return _TransactionStager(context, self.table)

    def open_prepared_units(self, context: SinkContext) -> PreparedUnits:
        """See :class:`TwoPhaseCommitSinkBase`."""
        return _PreparedTransactions(context, self.table)


class _TransactionStager(UnitStager):
    def __init__(self, context: SinkContext, table: PostgresTable) -> None:
        self._context = context
        self._table = table
        self._unit = PostgresUnit(context, table, "writer")

    def begin(self, unit: UnitId) -> None:
        self._unit.begin(unit.checkpoint_id)

    def write(self, batch: pa.RecordBatch) -> None:
        self._unit.write(batch)

    def flush(self) -> None:
        self._unit.flush()

    def prepare(self, unit: UnitId, committable: Committable) -> None:
        connection = self._unit.connection
        with translated(self._context.uid, self._table, "preparing a transaction on"):
            self._context.ledger.record(connection, committable)
            prepare(connection, str(unit))
        self._unit.ended()

    def close(self) -> None:
        self._unit.close()


class _PreparedTransactions(PreparedUnits):
    def __init__(self, context: SinkContext, table: PostgresTable) -> None:
        self._context = context
        self._table = table
        self._opened: Connection | None = None

    @property
    def _connection(self) -> Connection:
        if self._opened is None:
            self._opened = self._context.connect("committer")
        return self._opened

    def list(self) -> Sequence[UnitId]:
        with self._translated("listing prepared transactions of"):
            # starts_with, not LIKE: an underscore would match any character. Ids are cluster-wide, finishing is not.
            rows = self._connection.execute(
                "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, %s)",
                [f"{PREFIX}:{self._context.job_id}:"],
            ).fetchall()
        units = [UnitId.parse(gid) for (gid,) in rows]
        mine = (self._context.job_id, self._context.sink_id)
        return [unit for unit in units if unit is not None and (unit.job_id, unit.sink_id) == mine]

    def commit(self, unit: str) -> bool:
        return self._finish(commit_prepared, unit)

    def rollback(self, unit: str) -> None:
        self._finish(rollback_prepared, unit)

    def _finish(self, statement: Callable[[Connection, str], None], gid: str) -> bool:
        """False when the server knows no such transaction (42704): the ledger then tells what became of it."""
        with self._translated("finishing a prepared transaction on"):
            for _ in range(BUSY_ATTEMPTS):
                try:
                    statement(self._connection, gid)
                except psycopg.errors.UndefinedObject:
                    return False
                except psycopg.errors.ObjectNotInPrerequisiteState:
                    # 55000: another session, perhaps of a killed run, is finishing it right now.
                    self._connection.execute("SELECT pg_sleep(%s)", [BUSY_PAUSE_S])
                else:
                    return True
        raise TransientError(f"prepared transaction {gid} stayed busy for {BUSY_ATTEMPTS * BUSY_PAUSE_S:g} s")

    def is_committed(self, committable: Committable) -> bool:
        with self._translated("reading the ledger of"):
            return self._context.ledger.is_recorded(self._connection, committable)

    def newest(self) -> int:
        with self._translated("reading the ledger of"):
            return self._context.ledger.newest(self._connection)

    def forget(self, committable: Committable) -> None:
        with self._translated("pruning the ledger of"):
            self._context.ledger.prune(self._connection, committable.checkpoint_id)

    def _translated(self, doing: str) -> AbstractContextManager[None]:
        return translated(self._context.uid, self._table, doing)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
