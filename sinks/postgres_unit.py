"""What the PostgreSQL sinks have in common: the declaration's checks, and one fenced transaction after another."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Self

import psycopg
import pyarrow as pa

from etl.errors import ConfigurationError, Finding
from etl.sink import Connection, PreflightContext, Scratch, ScratchTable, Sink, SinkContext, SupportsScratch, Upsert
from etl.sqlstate import translate
from etl.transaction import begin
from sinks.postgres_loaders import streaming_loader
from sinks.postgres_preflight import create_table, inspect
from sinks.postgres_scratch import copy_definition, table_in
from sinks.postgres_table import PostgresTable
from sinks.postgres_writer import Loader, WritePlan, chunker_for, translated


class PostgresSink(Sink, SupportsScratch):
    """A sink that writes to a table.

    Args:
        table: What to write to and what the rows mean.
    """

    def __init__(self, table: PostgresTable) -> None:
        if not isinstance(table, PostgresTable):
            raise ConfigurationError(f"{type(self).__name__} takes a PostgresTable, not {type(table).__name__}")
        self.table = table

    @property
    def database(self) -> str | None:
        """Name of the configured database; None is the store database."""
        return self.table.database

    @property
    def target_name(self) -> str:
        """The table, and its database unless that is the store."""
        return f"table {self.table}" + (f" of database {self.database}" if self.database is not None else "")

    @property
    def exclusive_target(self) -> str | None:
        """An upserted table: two sinks that lock the same keys would wait for each other's checkpoint."""
        return f"table {self.table}" if self.table.key else None

    @property
    def upsert(self) -> Upsert | None:
        """As the table was declared."""
        return Upsert(self.table.key, self.table.version) if self.table.key else None

    def preflight(self, context: PreflightContext) -> Sequence[Finding]:
        """See :mod:`sinks.postgres_preflight`."""
        return inspect(context, self.table, self.delivery)

    def prepare_target(self, context: PreflightContext) -> None:
        """Create the table when it was declared with ``create=True``."""
        if self.table.create:
            create_table(context, self.table)

    def describe(self) -> str:
        """One line for ``etl explain``."""
        return f"{type(self).__name__}({self.table.describe()})"

    def aimed_at(self, scratch: Scratch) -> Self:
        """The same sink with a copy of its table. A subclass that writes anywhere else has more to turn."""
        aimed = copy(self)
        aimed.table = table_in(scratch, self.table)
        return aimed

    def copy_target(self, context: PreflightContext, scratch: Scratch) -> None:
        """Copy the table's definition; a table that the run will create is left to it."""
        copy_definition(context, self.table, table_in(scratch, self.table))

    def visible_rows(self, context: PreflightContext) -> ScratchTable:  # noqa: ARG002 - the table says it all
        """The table itself."""
        return ScratchTable(self.table.schema, self.table.name)

    def fence(self, context: SinkContext) -> None:
        """See :meth:`etl.sink.Sink.fence`."""
        connection = context.connect("fence")
        try:
            context.ledger.fence(connection)
        except psycopg.Error as error:
            raise translate(error, f'sink "{context.uid}", fencing') from error
        finally:
            connection.close()


class PostgresUnit:
    """One unit of work after another on a connection of its own; one transaction at a time.

    The owner ends a unit with a statement of its choice (COMMIT, PREPARE TRANSACTION) and then calls :meth:`ended`.
    """

    def __init__(self, context: SinkContext, table: PostgresTable, role: str) -> None:
        self._context = context
        self._table = table
        self._role = role
        self._chunker = chunker_for(table)
        self._connection: Connection | None = None
        self._loader: Loader | None = None
        self._begun = False
        self._checkpoint_id = 0

    @property
    def begun(self) -> bool:
        """Whether a transaction is open."""
        return self._begun

    @property
    def connection(self) -> Connection:
        """The connection, opened at first use."""
        if self._connection is None:
            self._connection = self._context.connect(self._role)
        return self._connection

    def begin(self, checkpoint_id: int) -> None:
        """Begin the transaction of a unit and hold the fence, before its first row."""
        self._checkpoint_id = checkpoint_id
        with translated(self._context.uid, self._table, "beginning a transaction for"):
            begin(self.connection)
            self._begun = True
            self._emit("sink.begun")
            self._context.ledger.hold_fence(self.connection)
            self._emit("sink.fenced")

    def write(self, batch: pa.RecordBatch) -> None:
        """Take a batch; what fills a chunk is sent."""
        for chunk in self._chunker.add(batch):
            self._load(chunk)

    def flush(self) -> None:
        """Send the rest: after it, every row is in the transaction."""
        for chunk in self._chunker.rest():
            self._load(chunk)
        if self._begun and self._loader is not None:
            self._loader.end()
            self._loader.require_unchanged(self.connection)

    def ended(self) -> None:
        """The transaction was ended; before the next rows another is begun."""
        self._begun = False

    def close(self) -> None:
        """Give up what is open. The server rolls it back when the connection ends."""
        # The connection first: a statement that waits for a lock would keep us waiting for its answer.
        if self._connection is not None:
            self._connection.close()
        if self._loader is not None:
            self._loader.abandon()

    def _load(self, chunk: pa.RecordBatch) -> None:
        if self._loader is None:
            plan = WritePlan.make(self.connection, self._context.uid, self._table, self._context.schema)
            self._loader = streaming_loader(plan)
        self._loader.load(self.connection, chunk)
        self._emit("sink.written", rows=chunk.num_rows)

    def _emit(self, name: str, **measures: int) -> None:
        self._context.emit(name, uid=self._context.uid, checkpoint=self._checkpoint_id, **measures)
