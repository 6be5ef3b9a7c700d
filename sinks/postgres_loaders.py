"""Which loader fits, and the one for upserts, which bets on what kind of rows come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import LiteralString

import psycopg
import pyarrow as pa
from psycopg import sql

from etl.errors import EtlError
from etl.sink import Connection
from sinks.columns import Carrier
from sinks.postgres_writer import (
    ArrayInsert,
    ChunkedCopy,
    Loader,
    StreamingCopy,
    WritePlan,
    execute_with_columns,
    last_per_key,
    unnested,
)

PROBED_KEYS = 32
"""Keys of a chunk that are looked up to know what to bet on."""

INSERTS_AFTER_LOST_BET_MAX = 64


def streaming_loader(plan: WritePlan) -> Loader:
    """The loader for a connection of one's own."""
    return _upsert_loader(plan) or (ArrayInsert(plan) if plan.by_array else StreamingCopy(plan))


def chunked_loader(plan: WritePlan) -> Loader:
    """The loader for a shared connection."""
    return _upsert_loader(plan) or (ArrayInsert(plan) if plan.by_array else ChunkedCopy(plan))


def _upsert_loader(plan: WritePlan) -> Loader | None:
    copyable = all(carrier.copyable for carrier in plan.carriers)
    return UpsertLoader(plan) if plan.table.key and copyable else None


class UpsertLoader(Loader):
    """Upserts a chunk by COPY if none of its keys is there, by UPDATE if all are, else by ``INSERT … ON CONFLICT``.

    COPY writes new rows at more than twice the speed of INSERT, and UPDATE old ones a tenth faster, but neither deals
    with the other kind. So a few keys of the chunk are looked up, and when none or all of them are found the bet is
    that so it is with all rows: the faster statement behind a savepoint. The bet is lost when the unique index refuses
    a row, or an UPDATE finds too few, be it by the work of another session; then the chunk is inserted, and so are the
    next ones without a bet, twice as many each time. The rows in the table are the same whichever way they went.
    """

    def __init__(self, plan: WritePlan) -> None:
        super().__init__(plan)
        self._insert = ArrayInsert(plan)
        self._copy = ChunkedCopy(plan)
        self._key = [carrier for carrier in plan.carriers if carrier.name in plan.table.key]
        self._probe = _probe_statement(plan, self._key)
        # A guard leaves rows out for good reasons, and a trigger may have to see each row as one to be inserted.
        self._updates = len(self._key) < len(plan.carriers) and plan.table.version is None and not plan.row_triggers
        self._update = _update_statement(plan)
        self._inserts_after_lost_bet = 1
        self._inserts_left = 0

    def load(self, connection: Connection, chunk: pa.RecordBatch) -> None:
        """See :class:`~sinks.postgres_writer.Loader`."""
        rows = last_per_key(self._plan, self._plan.convert(chunk))
        if not self._wins_bet(connection, rows):
            self._insert.insert(connection, rows)

    def _wins_bet(self, connection: Connection, rows: pa.RecordBatch) -> bool:
        """Whether the chunk was written by the statement that was bet on; if not, nothing was."""
        if self._inserts_left:
            self._inserts_left -= 1
            return False
        some = _some_of(rows)
        with self._translated("looking up keys in"):
            found = execute_with_columns(connection, self._probe, self._key, some)
        if found == 0:
            return self._bet(connection, partial(self._copied, connection, rows))
        if found == some.num_rows and self._updates:
            return self._bet(connection, partial(self._updated, connection, rows))
        return False

    def _bet(self, connection: Connection, write: Callable[[], bool]) -> bool:
        self._execute(connection, "SAVEPOINT etl_bet")
        if write():
            self._execute(connection, "RELEASE SAVEPOINT etl_bet")
            return True
        self._execute(connection, "ROLLBACK TO SAVEPOINT etl_bet; RELEASE SAVEPOINT etl_bet")
        self._inserts_left = self._inserts_after_lost_bet
        self._inserts_after_lost_bet = min(2 * self._inserts_after_lost_bet, INSERTS_AFTER_LOST_BET_MAX)
        return False

    def _copied(self, connection: Connection, rows: pa.RecordBatch) -> bool:
        try:
            self._copy.copy(connection, rows)
        except EtlError as error:
            if isinstance(error.__cause__, psycopg.errors.UniqueViolation):
                return False
            raise
        return True

    def _updated(self, connection: Connection, rows: pa.RecordBatch) -> bool:
        # The key's index, row by row in the order of the key: never a lock out of order, nor the whole table read.
        self._execute(connection, "SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off")
        with self._translated("UPDATE of"):
            taken = execute_with_columns(connection, self._update, self._plan.carriers, rows)
        self._execute(connection, "SET LOCAL enable_hashjoin TO DEFAULT; SET LOCAL enable_mergejoin TO DEFAULT")
        return bool(taken == rows.num_rows)

    def _execute(self, connection: Connection, statement: LiteralString) -> None:
        with self._translated("writing to"):
            connection.execute(statement)


def _some_of(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows spread evenly over a batch."""
    step = -(-rows.num_rows // PROBED_KEYS)
    return pa.concat_batches([rows.slice(start, 1) for start in range(0, rows.num_rows, step)])


def _probe_statement(plan: WritePlan, key: Sequence[Carrier]) -> sql.Composed:
    return sql.SQL("SELECT FROM (SELECT {}) AS given JOIN {} AS target ON {}").format(
        _given(key), plan.table.identifier, _same_key(plan)
    )


def _update_statement(plan: WritePlan) -> sql.Composed:
    others = [sql.Identifier(carrier.name) for carrier in plan.carriers if carrier.name not in plan.table.key]
    return sql.SQL("UPDATE {} AS target SET {} FROM (SELECT {}) AS given WHERE {}").format(
        plan.table.identifier,
        sql.SQL(", ").join(sql.SQL("{0} = given.{0}").format(name) for name in others),
        _given(plan.carriers),
        _same_key(plan),
    )


def _given(carriers: Sequence[Carrier]) -> sql.Composed:
    columns = enumerate(carriers, start=1)
    return sql.SQL(", ").join(
        sql.SQL("{} AS {}").format(unnested(carrier, number), sql.Identifier(carrier.name))
        for number, carrier in columns
    )


def _same_key(plan: WritePlan) -> sql.Composed:
    names = [sql.Identifier(name) for name in plan.table.key]
    return sql.SQL(" AND ").join(sql.SQL("target.{0} = given.{0}").format(name) for name in names)
