"""Idempotent upserts: one transaction a checkpoint, committed before the checkpoint completes."""

from __future__ import annotations

import pyarrow as pa

from etl.errors import ConfigurationError
from etl.sink import Committable, Delivery, SinkContext, SinkWriter
from etl.transaction import commit
from sinks.postgres_table import PostgresTable
from sinks.postgres_unit import PostgresSink, PostgresUnit
from sinks.postgres_writer import translated


class UpsertSink(PostgresSink):
    """The last row of each key wins; a replay is applied again and ends in the same state.

    Rows become visible when their unit is flushed, a moment before the checkpoint is recorded. After a crash in that
    moment they are read and written again, so a reader can see a value go back for a while; with
    ``PostgresTable(version=…)`` it cannot.

    Raises:
        ConfigurationError: The table has no key.
    """

    delivery = Delivery.IDEMPOTENT

    def __init__(self, table: PostgresTable) -> None:
        super().__init__(table)
        if not table.key:
            raise ConfigurationError(
                f"UpsertSink needs a key: a replay would append the rows of {table} again; give PostgresTable(key=[…]),"
                " or use TwoPhaseCommitSink to append"
            )

    @property
    def monotone(self) -> bool:
        """Whether a version guards every row."""
        return self.table.version is not None

    def create_writer(self, context: SinkContext) -> SinkWriter:
        """See :meth:`etl.sink.Sink.create_writer`."""
        return _Writer(context, self.table)


class _Writer(SinkWriter):
    def __init__(self, context: SinkContext, table: PostgresTable) -> None:
        self._context = context
        self._table = table
        self._unit = PostgresUnit(context, table, "writer")
        self._checkpoint_id = context.checkpoint_id + 1
        self._rows = 0

    @property
    def rows(self) -> int:
        return self._rows

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        if not self._unit.begun:
            self._unit.begin(self._checkpoint_id)
        self._rows += batch.num_rows
        self._unit.write(batch)

    def prepare_commit(self, checkpoint_id: int) -> Committable | None:
        self._checkpoint_id = checkpoint_id + 1
        self._unit.flush()
        if self._unit.begun:
            self._context.emit("sink.prepare.before", uid=self._context.uid, checkpoint=checkpoint_id)
            with translated(self._context.uid, self._table, "committing rows of"):
                commit(self._unit.connection)
            self._unit.ended()
            self._context.emit("sink.prepared", uid=self._context.uid, checkpoint=checkpoint_id)
        return None

    def close(self) -> None:
        self._unit.close()
