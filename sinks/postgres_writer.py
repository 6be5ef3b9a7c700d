"""Getting batches into a PostgreSQL table, inside a transaction that somebody else begins and ends.

Loaders share one interface; which one fits follows from the table and from who owns the connection
(:mod:`sinks.postgres_loaders`):

* :class:`StreamingCopy` keeps one binary COPY open over many batches (own connection: the fastest);
* :class:`ChunkedCopy` runs one COPY a chunk (shared connection);
* :class:`ArrayInsert` sends each column as one binary array and runs ``INSERT … SELECT unnest(…), …``, with
  ``ON CONFLICT`` for upserts. There is no staging table, because a prepared transaction may not touch a temporary one.

A driver error is never retried here: the attempt fails, and the whole unit is written again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from psycopg.abc import Buffer
from psycopg.copy import Writer

from etl.errors import ConfigurationError, RecordError, StateError, TransientError
from etl.lazy import LazyModule
from etl.schema import Schema
from etl.sink import Connection
from etl.sqlstate import translate
from sinks.binary import CopyEncoder, array_parameter, parameter_type, register
from sinks.catalog import TargetTable, read_table
from sinks.chunker import Chunker
from sinks.columns import Carrier
from sinks.postgres_preflight import column_findings, key_findings, kind_findings
from sinks.postgres_table import PostgresTable

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

COPY_ROWS_MAX = 65_536
COPY_SIZE_BYTES = 1 << 20
SHARED_COPY_ROWS_MAX = 131_072
SHARED_COPY_SIZE_BYTES = 8 << 20
INSERT_ROWS_MAX = 32_768
INSERT_SIZE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class WritePlan:
    """How a stream is written to a table, made from the catalog as it is now.

    Attributes:
        uid: The sink, for messages.
        table: The target.
        schema: The stream's.
        carriers: One a column, in the stream's order.
        required: Columns in which NULL may not stand when the row is written.
        nulls_in_key: Whether NULL may stand in a key column (the unique index is NULLS NOT DISTINCT).
        row_triggers: Whether a trigger may drop or change a row before it is written.
    """

    uid: str
    table: PostgresTable
    schema: Schema
    carriers: tuple[Carrier, ...]
    required: frozenset[str]
    nulls_in_key: bool
    row_triggers: bool

    @classmethod
    def make(cls, connection: Connection, uid: str, table: PostgresTable, schema: Schema) -> WritePlan:
        """Read the catalog.

        Raises:
            ConfigurationError: The table no longer fits; it was changed after the preflight.
        """
        with translated(uid, table, "reading the catalog"):
            target = read_table(connection, table)
        if target is None:
            raise ConfigurationError(f'sink "{uid}": table {table} does not exist')
        carriers, findings = column_findings(table, target, schema)
        findings = [*kind_findings(table, target), *findings, *key_findings(table, target)]
        if findings:
            raise ConfigurationError.from_findings(f'sink "{uid}"', findings)
        required = frozenset(column.name for column in target.columns if column.not_null and column.name in schema)
        nulls_in_key, row_triggers = _nulls_allowed(table, target), bool(target.row_triggers)
        return cls(uid, table, schema, tuple(carriers), required, nulls_in_key, row_triggers)

    def require_unchanged(self, connection: Connection) -> None:
        """Compare with the catalog, in the transaction that has written rows: it keeps all others from the table.

        Without this nobody would know: a column of another type takes the binary values of COPY for something else.

        Raises:
            ConfigurationError: The table no longer fits.
            TransientError: It fits, but not with this plan.
        """
        if WritePlan.make(connection, self.uid, self.table, self.schema) != self:
            raise TransientError(
                f'sink "{self.uid}": table {self.table} was changed by others since the run began to write to it;'
                " the rows of this checkpoint are written again"
            )

    @property
    def by_array(self) -> bool:
        """Whether rows must go by INSERT: for upserts, and for arrays that COPY cannot carry."""
        return bool(self.table.key) or not all(carrier.copyable for carrier in self.carriers)

    def convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Bring a batch into wire types.

        Raises:
            RecordError: A value does not fit its column.
        """
        try:
            columns = [carrier.convert(batch.column(carrier.name)) for carrier in self.carriers]
        except RecordError as error:
            raise RecordError(f'sink "{self.uid}", table {self.table}, {error}', uid=self.uid) from None
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema([carrier.wire_field for carrier in self.carriers]))

    def refuse_nulls(self, batch: pa.RecordBatch) -> None:
        """Refuse NULLs as the server would; of rows that a trigger may yet complete, only NULL keys.

        Raises:
            RecordError: A row has no value in a column that needs one.
        """
        key = frozenset() if self.nulls_in_key else frozenset(self.table.key)
        for name in batch.schema.names:
            if name in key or (name in self.required and not self.row_triggers):
                self.refuse_null(name, batch)

    def refuse_null(self, name: str, batch: pa.RecordBatch) -> None:
        """Refuse NULLs in one column.

        Raises:
            RecordError: A row has one.
        """
        if batch.column(name).null_count:
            what = "key column" if name in self.table.key else "column"
            message = f'sink "{self.uid}", table {self.table}, {what} "{name}": a row has no value (NULL) in it'
            raise RecordError(message, uid=self.uid)


def _nulls_allowed(table: PostgresTable, target: TargetTable) -> bool:
    index = target.conflict_index(table.key)
    return index is not None and index.nulls_not_distinct


@contextmanager
def translated(uid: str, table: PostgresTable, doing: str) -> Iterator[None]:
    """Driver errors inside the block become errors of the framework's tree."""
    try:
        yield
    except psycopg.Error as error:
        failure = translate(error, f'sink "{uid}", {doing} table {table}')
        if isinstance(failure, RecordError):
            failure.uid = uid
        raise failure from error


class Loader(ABC):
    """Writes chunks of one unit of work; the connection has an open transaction."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan

    @abstractmethod
    def load(self, connection: Connection, chunk: pa.RecordBatch) -> None:
        """Send a chunk.

        Raises:
            RecordError: The server or a check refused a value.
            StateError: The server took another number of rows than were sent.
        """

    def end(self) -> None:
        """End the unit: after it, every row is in the transaction."""
        return None

    def abandon(self) -> None:
        """Give the unit up; the connection has been closed."""
        return None

    def require_unchanged(self, connection: Connection) -> None:
        """See :meth:`WritePlan.require_unchanged`; after :meth:`end`, before the transaction ends."""
        self._plan.require_unchanged(connection)

    def _check(self, sent: int, taken: int) -> None:
        if sent != taken:
            raise StateError(
                f'sink "{self._plan.uid}": {sent} rows were sent to table {self._plan.table} and {taken} arrived; a '
                "trigger that returns NULL, or a rule, drops rows: disable it, or filter the rows in the job"
            )

    def _copy_statement(self) -> sql.Composed:
        names = [sql.Identifier(carrier.name) for carrier in self._plan.carriers]
        return sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
            self._plan.table.identifier, sql.SQL(", ").join(names)
        )

    def _translated(self, doing: str) -> AbstractContextManager[None]:
        return translated(self._plan.uid, self._plan.table, doing)


class ChunkedCopy(Loader):
    """One COPY a chunk; the connection is free for others in between."""

    def load(self, connection: Connection, chunk: pa.RecordBatch) -> None:
        """See :class:`Loader`."""
        self.copy(connection, self._plan.convert(chunk))

    def copy(self, connection: Connection, rows: pa.RecordBatch) -> None:
        """COPY converted rows."""
        encoder = CopyEncoder(self._plan.carriers)
        with self._translated("COPY into"), connection.cursor() as cursor:
            with cursor.copy(self._copy_statement()) as copy:
                for piece in encoder.stream(rows):
                    copy.write(piece)
                copy.write(encoder.end())
            self._check(rows.num_rows, cursor.rowcount)


class StreamingCopy(Loader):
    """One COPY over the whole unit; nothing else may run on the connection until :meth:`end`."""

    def __init__(self, plan: WritePlan) -> None:
        super().__init__(plan)
        self._stream: _OpenCopy | None = None

    def load(self, connection: Connection, chunk: pa.RecordBatch) -> None:
        """See :class:`Loader`."""
        converted = self._plan.convert(chunk)
        with self._translated("COPY into"):
            if self._stream is None:
                self._stream = _OpenCopy(connection, self._copy_statement(), CopyEncoder(self._plan.carriers))
            self._stream.write(converted)

    def end(self) -> None:
        """See :class:`Loader`."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with self._translated("COPY into"):
                taken = stream.end()
            self._check(stream.rows, taken)

    def abandon(self) -> None:
        """See :class:`Loader`."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.abandon()


class _AbandonedError(Exception):
    """Unwinds the driver's COPY block."""


class _Silence(Writer):
    """Sends nothing: the driver would otherwise wait for the server's answer to a COPY that nobody wants any more."""

    def write(self, data: Buffer) -> None:
        """Drop it."""


class _OpenCopy:
    def __init__(self, connection: Connection, statement: sql.Composed, encoder: CopyEncoder) -> None:
        self.rows = 0
        self._encoder = encoder
        self._cursor = connection.cursor()
        self._context = self._cursor.copy(statement)
        self._copy = self._context.__enter__()

    def write(self, batch: pa.RecordBatch) -> None:
        for piece in self._encoder.stream(batch):
            self._copy.write(piece)
        self.rows += batch.num_rows

    def end(self) -> int:
        self._copy.write(self._encoder.end())
        self._context.__exit__(None, None, None)
        return self._cursor.rowcount

    def abandon(self) -> None:
        self._copy.writer = _Silence()
        with suppress(_AbandonedError):
            self._context.__exit__(_AbandonedError, _AbandonedError("the unit was given up"), None)


class ArrayInsert(Loader):
    """``INSERT … SELECT … FROM unnest(arrays)``, with ``ON CONFLICT`` when the table has a key.

    The last row of each key within a chunk wins (by version, where there is one), and rows are sorted by key, so that
    writers that meet lock rows in the same order and cannot deadlock on them.
    """

    def __init__(self, plan: WritePlan) -> None:
        super().__init__(plan)
        self._statement = _insert_statement(plan)

    def load(self, connection: Connection, chunk: pa.RecordBatch) -> None:
        """See :class:`Loader`."""
        rows = self._plan.convert(chunk)
        self.insert(connection, last_per_key(self._plan, rows) if self._plan.table.key else rows)

    def insert(self, connection: Connection, rows: pa.RecordBatch) -> None:
        """Insert converted rows, no key twice among them."""
        with self._translated("INSERT into"):
            taken = execute_with_columns(connection, self._statement, self._plan.carriers, rows)
        if not self._may_skip:
            self._check(rows.num_rows, taken)

    @property
    def _may_skip(self) -> bool:
        """Whether the statement may rightly leave rows out: older versions, or keys that are there already."""
        table = self._plan.table
        return table.version is not None or (bool(table.key) and len(table.key) == len(self._plan.carriers))


def execute_with_columns(
    connection: Connection, statement: sql.Composed, carriers: Sequence[Carrier], rows: pa.RecordBatch
) -> int:
    """Run a statement whose parameters are the columns of these carriers; returns the rows it yielded or changed."""
    parameters = [array_parameter(carrier, rows.column(carrier.name)) for carrier in carriers]
    with psycopg.RawCursor(connection) as cursor:
        register(cursor)
        cursor.execute(statement, parameters)
        return cursor.rowcount


def last_per_key(plan: WritePlan, rows: pa.RecordBatch) -> pa.RecordBatch:
    """The row of each key that counts, sorted by key: the highest version, among equals the last that came.

    Raises:
        RecordError: A key is NULL.
    """
    key, version = list(plan.table.key), plan.table.version
    if not plan.nulls_in_key:
        for name in key:
            plan.refuse_null(name, rows)
    if len(key) == 1 and _is_ascending(rows.column(key[0])):
        return rows
    order = [*key, *([version] if version else [])]
    frame = pl.DataFrame({name: pl.Series(rows.column(name)) for name in order}).with_columns(_folded(plan))
    numbered = frame.with_row_index("\0row")
    kept = numbered.sort(order, maintain_order=True).unique(key, keep="last", maintain_order=True)
    return rows.take(kept["\0row"].rename("row").to_arrow())


def _is_ascending(values: pa.Array) -> bool:
    """Whether each value is surely greater than the one before; looked at for integers, the most common keys."""
    if not pa.types.is_integer(values.type) or values.null_count:
        return False
    return bool(pc.all(pc.less(values.slice(0, len(values) - 1), values.slice(1)), min_count=0).as_py())


def _folded(plan: WritePlan) -> list[pl.Expr]:
    """Keys that differ only in case are one key to citext."""
    folding = [carrier.name for carrier in plan.carriers if carrier.home == "citext" and carrier.name in plan.table.key]
    return [pl.col(name).str.to_lowercase() for name in folding]


def _insert_statement(plan: WritePlan) -> sql.Composed:
    # The arrays are unnested in the list of results: in FROM the server would first write all rows aside.
    table, carriers = plan.table, plan.carriers
    return sql.SQL("INSERT INTO {} AS target ({}) SELECT {}{}").format(
        table.identifier,
        sql.SQL(", ").join(sql.Identifier(carrier.name) for carrier in carriers),
        sql.SQL(", ").join(unnested(carrier, number + 1) for number, carrier in enumerate(carriers)),
        _on_conflict(table, [carrier.name for carrier in carriers]) if table.key else sql.SQL(""),
    )


def unnested(carrier: Carrier, number: int) -> sql.Composable:
    """The values of a column, given as array parameter ``$number``, one a row."""
    values = sql.SQL(f"unnest(${number})")
    # No explicit cast to varchar: it would cut without a word, where assignment refuses.
    if parameter_type(carrier) == "text" and (carrier.target.is_array or carrier.home not in {"text", "varchar"}):
        return sql.SQL("CAST({} AS {})").format(values, sql.SQL(carrier.target.cast))
    return values


def _on_conflict(table: PostgresTable, names: Sequence[str]) -> sql.Composed:
    key = sql.SQL(", ").join(sql.Identifier(name) for name in table.key)
    others = [sql.Identifier(name) for name in names if name not in table.key]
    if not others:
        return sql.SQL(" ON CONFLICT ({}) DO NOTHING").format(key)
    pairs = sql.SQL(", ").join(sql.SQL("{0} = EXCLUDED.{0}").format(name) for name in others)
    guard: sql.Composable = sql.SQL("")
    if table.version is not None:
        guard = sql.SQL(" WHERE target.{0} IS NULL OR target.{0} <= EXCLUDED.{0}").format(sql.Identifier(table.version))
    return sql.SQL(" ON CONFLICT ({}) DO UPDATE SET {}{}").format(key, pairs, guard)


def chunker_for(table: PostgresTable, *, shared: bool = False) -> Chunker:
    """Chunks of the size that measured best for the way the rows are written.

    Args:
        table: Where they are written to.
        shared: Whether the connection is shared, so that each chunk is a COPY of its own: at the end of each the
            server catches up and then waits for the next.
    """
    if table.key:
        return Chunker(INSERT_ROWS_MAX, INSERT_SIZE_BYTES)
    return Chunker(SHARED_COPY_ROWS_MAX, SHARED_COPY_SIZE_BYTES) if shared else Chunker(COPY_ROWS_MAX, COPY_SIZE_BYTES)
