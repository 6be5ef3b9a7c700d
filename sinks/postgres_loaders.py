"""Which loader fits, and the one for upserts, which bets on new rows."""

from __future__ import annotations

from typing import LiteralString

import psycopg
import pyarrow as pa
from psycopg import sql

from etl.errors import EtlError
from etl.sink import Connection
from sinks.binary import array_parameter, register
from sinks.columns import Carrier
from sinks.postgres_writer import (
    ArrayInsert,
    ChunkedCopy,
    Loader,
    StreamingCopy,
    WritePlan,
    last_per_key,
    unnested,
)

PROBED_KEYS = 32
"""Keys of a chunk that are looked up before it is taken for new."""

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
    """Upserts a chunk by COPY if none of its keys is there, else by ``INSERT … ON CONFLICT``.

    COPY writes rows at twice the speed and more, but has no way to deal with keys that are there. So a few keys of the
    chunk are looked up, and when none is found the bet is that all rows are new: a COPY behind a savepoint. It is lost
    when the unique index refuses a row, be it an old one or that of another session; then the chunk is inserted, and
    so are the next ones without a bet, twice as many each time. The rows in the table are the same either way.
    """

    def __init__(self, plan: WritePlan) -> None:
        super().__init__(plan)
        self._insert = ArrayInsert(plan)
        self._copy = ChunkedCopy(plan)
        self._probe = _probe_statement(plan)
        self._key = [carrier for carrier in plan.carriers if carrier.name in plan.table.key]
        self._inserts_after_lost_bet = 1
        self._inserts_left = 0

    def load(self, connection: Connection, chunk: pa.RecordBatch) -> None:
        """See :class:`~sinks.postgres_writer.Loader`."""
        rows = last_per_key(self._plan, self._plan.convert(chunk))
        if not (self._bets(connection, rows) and self._copied(connection, rows)):
            self._insert.insert(connection, rows)

    def _bets(self, connection: Connection, rows: pa.RecordBatch) -> bool:
        if self._inserts_left:
            self._inserts_left -= 1
            return False
        return not self._finds_some(connection, rows)

    def _finds_some(self, connection: Connection, rows: pa.RecordBatch) -> bool:
        """Whether one of some keys, spread evenly over the chunk, is in the table."""
        parameters = [array_parameter(carrier, _some_of(rows.column(carrier.name))) for carrier in self._key]
        with self._translated("looking up keys in"), psycopg.RawCursor(connection) as cursor:
            register(cursor)
            row = cursor.execute(self._probe, parameters).fetchone()
        return row == (True,)

    def _copied(self, connection: Connection, rows: pa.RecordBatch) -> bool:
        """Try to COPY; False when some key is there, and then nothing was written."""
        self._execute(connection, "SAVEPOINT etl_bet")
        try:
            self._copy.copy(connection, rows)
        except EtlError as error:
            if not isinstance(error.__cause__, psycopg.errors.UniqueViolation):
                raise
            self._execute(connection, "ROLLBACK TO SAVEPOINT etl_bet; RELEASE SAVEPOINT etl_bet")
            self._inserts_left = self._inserts_after_lost_bet
            self._inserts_after_lost_bet = min(2 * self._inserts_after_lost_bet, INSERTS_AFTER_LOST_BET_MAX)
            return False
        self._execute(connection, "RELEASE SAVEPOINT etl_bet")
        return True

    def _execute(self, connection: Connection, statement: LiteralString) -> None:
        with self._translated("COPY into"):
            connection.execute(statement)


def _some_of(values: pa.Array) -> pa.Array:
    step = -(-len(values) // PROBED_KEYS)
    return pa.concat_arrays([values.slice(start, 1) for start in range(0, len(values), step)])


def _probe_statement(plan: WritePlan) -> sql.Composed:
    key = [carrier for carrier in plan.carriers if carrier.name in plan.table.key]
    given = sql.SQL(", ").join(_given(carrier, number + 1) for number, carrier in enumerate(key))
    same = sql.SQL(" AND ").join(sql.SQL("target.{0} = given.{0}").format(sql.Identifier(one.name)) for one in key)
    return sql.SQL("SELECT EXISTS (SELECT FROM (SELECT {}) AS given JOIN {} AS target ON {})").format(
        given, plan.table.identifier, same
    )


def _given(carrier: Carrier, number: int) -> sql.Composed:
    return sql.SQL("{} AS {}").format(unnested(carrier, number), sql.Identifier(carrier.name))
