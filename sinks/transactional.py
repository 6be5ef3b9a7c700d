"""Rows in the checkpoint's own transaction: for targets in the store database."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from etl.errors import Finding
from etl.sink import Committable, Delivery, PreflightContext, SinkContext, SinkWriter
from sinks.postgres_loaders import chunked_loader, streaming_loader
from sinks.postgres_table import PostgresTable
from sinks.postgres_unit import PostgresSink
from sinks.postgres_writer import Loader, WritePlan, chunker_for


class TransactionalSink(PostgresSink):
    """Rows, positions and state commit in one transaction: exactly-once, and with the least machinery.

    The table must live in the store database, and all such sinks of a job share one connection.
    """

    delivery = Delivery.TRANSACTIONAL

    def preflight(self, context: PreflightContext) -> Sequence[Finding]:
        """See :mod:`sinks.postgres_preflight`; the target must be the store database."""
        findings = list(super().preflight(context))
        if not context.target_is_store:
            problem = f'database "{self.database}" is not the store: one transaction cannot span both'
            findings.append(Finding(f"table {self.table}", problem, "use TwoPhaseCommitSink or WriteAheadSink"))
        return findings

    def create_writer(self, context: SinkContext) -> SinkWriter:
        """See :meth:`etl.sink.Sink.create_writer`."""
        return _Writer(context, self.table)


class _Writer(SinkWriter):
    def __init__(self, context: SinkContext, table: PostgresTable) -> None:
        self._context = context
        self._table = table
        self._shared = not context.transactions.exclusive
        self._chunker = chunker_for(table, shared=self._shared)
        self._loader: Loader | None = None
        self._checkpoint_id = context.checkpoint_id + 1
        self._rows = 0
        self._begun = False

    @property
    def rows(self) -> int:
        return self._rows

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.num_rows
        for chunk in self._chunker.add(batch):
            self._load(chunk)

    def prepare_commit(self, checkpoint_id: int) -> Committable | None:
        for chunk in self._chunker.rest():
            self._load(chunk)
        if self._loader is not None and self._begun:
            self._loader.end()
            with self._context.transactions.of(checkpoint_id).use() as connection:
                self._loader.require_unchanged(connection)
        self._begun = False
        self._context.emit("sink.prepared", uid=self._context.uid, checkpoint=checkpoint_id)
        self._checkpoint_id = checkpoint_id + 1
        return None

    def _load(self, chunk: pa.RecordBatch) -> None:
        with self._context.transactions.of(self._checkpoint_id).use() as connection:
            if self._loader is None:
                plan = WritePlan.make(connection, self._context.uid, self._table, self._context.schema)
                self._loader = chunked_loader(plan) if self._shared else streaming_loader(plan)
            self._loader.load(connection, chunk)
        self._begun = True
        self._context.emit("sink.written", uid=self._context.uid, checkpoint=self._checkpoint_id, rows=chunk.num_rows)

    def close(self) -> None:
        """The transaction belongs to the runtime."""
        if self._loader is not None:
            self._loader.abandon()
