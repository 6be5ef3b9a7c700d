"""Write-ahead delivery into a PostgreSQL table: exactly-once without prepared transactions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pyarrow as pa

from etl.errors import FenceBlockedError, TransientError
from etl.sink import Committable, Delivery, SinkContext
from etl.transaction import commit
from sinks.postgres_table import PostgresTable
from sinks.postgres_unit import PostgresSink, PostgresUnit
from sinks.postgres_writer import WritePlan, translated
from sinks.write_ahead import BatchCheck, UnitDelivery, WriteAheadSinkBase


class WriteAheadSink(PostgresSink, WriteAheadSinkBase):
    """Rows wait in the store and are written, with their ledger row, in one transaction after the checkpoint.

    Exactly-once in any PostgreSQL database, also without ``max_prepared_transactions``. Between checkpoints the target
    sees no transaction and no lock; the price is that rows are written twice.
    """

    delivery = Delivery.WRITE_AHEAD

    def create_check(self, context: SinkContext) -> BatchCheck:
        """See :class:`WriteAheadSinkBase`."""
        return _TableCheck(context, self.table)

    def create_delivery(self, context: SinkContext) -> UnitDelivery:
        """See :class:`WriteAheadSinkBase`."""
        return _TransactionDelivery(context, self.table)


class _TableCheck(BatchCheck):
    """Everything that the client can tell: ranges, lengths, NULLs. Constraints are the server's to judge."""

    def __init__(self, context: SinkContext, table: PostgresTable) -> None:
        self._context = context
        self._table = table
        self._plan: WritePlan | None = None

    def check(self, batch: pa.RecordBatch) -> None:
        if self._plan is None:
            with closing(self._context.connect("check")) as connection:
                self._plan = WritePlan.make(connection, self._context.uid, self._table, self._context.schema)
        self._plan.refuse_nulls(batch)
        self._plan.convert(batch)


class _TransactionDelivery(UnitDelivery):
    def __init__(self, context: SinkContext, table: PostgresTable) -> None:
        self._context = context
        self._table = table
        self._unit = PostgresUnit(context, table, "committer")

    def deliver(self, unit: Committable, batches: Iterator[pa.RecordBatch]) -> None:
        self._unit.begin(unit.checkpoint_id)
        self._record(unit)
        for batch in batches:
            self._unit.write(batch)
        self._unit.flush()
        with translated(self._context.uid, self._table, "committing rows of"):
            commit(self._unit.connection)
            self._unit.ended()
            self._context.ledger.prune(self._unit.connection, unit.checkpoint_id)

    def _record(self, unit: Committable) -> None:
        # First, not last: a session of another run that delivers the same unit makes us wait here, before any row.
        with translated(self._context.uid, self._table, "writing the ledger of"):
            try:
                self._context.ledger.record(self._unit.connection, unit)
            except psycopg.errors.UniqueViolation:
                raise TransientError(f"checkpoint {unit.checkpoint_id} was delivered by another session") from None

    def is_delivered(self, unit: Committable) -> bool:
        with translated(self._context.uid, self._table, "reading the ledger of"):
            return self._context.ledger.is_recorded(self._unit.connection, unit)

    def newest(self) -> int:
        with translated(self._context.uid, self._table, "reading the ledger of"):
            return self._context.ledger.newest(self._unit.connection)

    def is_ready(self) -> bool:
        """Fence first: the delivering transaction holds the fence at our epoch.

        Blocked by what another sink has yet to recover, delivery waits for the runtime's own fencing.
        """
        with translated(self._context.uid, self._table, "fencing"):
            try:
                self._context.ledger.fence(self._unit.connection)
            except FenceBlockedError:
                return False
        return True

    def close(self) -> None:
        self._unit.close()
