"""The rows that are loaded: one SQL query is the file's content, the existing rows and the expected result.

The server makes them, so that no part of the product decides what is right.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from benchmarks.process import measure
from benchmarks.server import Server

VERSION = 1
"""Part of the file's name: a change of the query makes new files."""

COLUMNS = ("id", "ts", "user", "amount", "flag", "note")

_TABLE = """
CREATE TABLE events (
    id int8 PRIMARY KEY, ts timestamptz, "user" text, amount numeric(12,2), flag bool, note text
)
"""
# One note in eight is NULL, one in forty holds a comma and quotes, one in sixteen a tab, some letters are not ASCII.
_ROWS = """
SELECT n AS id,
       timestamptz '2024-01-01 00:00:00+00' + n * interval '7 seconds' AS ts,
       'user' || n * 7919 % 100000 AS "user",
       (n * 37 % 1000000)::numeric(14,2) / 100 + {increase} AS amount,
       n % 3 = 0 AS flag,
       CASE WHEN n % 8 = 0 THEN NULL
            WHEN n % 40 = 1 THEN 'note ' || n || ', "some" text'
            WHEN n % 16 = 3 THEN 'note ' || n || E'\\tsome text'
            WHEN n % 16 = 5 THEN 'Größe ' || n || ' some text'
            ELSE 'note ' || n || ' some text' END AS note
  FROM generate_series(0, {last}::int8) AS n
"""
_DIGEST = "SELECT count(*), coalesce(sum(hashtextextended(t::text, 0)), 0)::text FROM {} AS t"


@dataclass(frozen=True, slots=True)
class Digest:
    """What a table holds, independent of the order of its rows."""

    rows: int
    checksum: str


def rows_query(rows: int, increase: int = 0) -> sql.Composed:
    """The rows; with ``increase`` every row differs from the one that is loaded, under the same key."""
    cast = sql.SQL('SELECT id, ts, "user", amount::numeric(12,2), flag, note FROM ({}) AS made')
    made = sql.SQL(_ROWS).format(increase=sql.Literal(increase), last=sql.Literal(rows - 1))
    return cast.format(made)


def create_table(connection: psycopg.Connection[Any]) -> None:
    """Make the empty table with its primary key."""
    connection.execute(_TABLE)


def fill_table(connection: psycopg.Connection[Any], rows: int) -> None:
    """Put rows under all keys into the table, each of which differs from the one that will be loaded."""
    connection.execute(sql.SQL("INSERT INTO events {}").format(rows_query(rows, increase=1)))


def digest_of_table(connection: psycopg.Connection[Any]) -> Digest:
    """What the table holds."""
    return _digest(connection, sql.Identifier("events"))


def expected_digest(connection: psycopg.Connection[Any], rows: int) -> Digest:
    """What the table must hold."""
    return _digest(connection, sql.SQL("({})").format(rows_query(rows)))


def _digest(connection: psycopg.Connection[Any], relation: sql.Composable) -> Digest:
    row = connection.execute(sql.SQL(_DIGEST).format(relation)).fetchone()
    assert row is not None
    return Digest(*row)


def csv_file(cache_dir: Path, server: Server, url: str, rows: int) -> Path:
    """The file with the rows and a header, made when the cache does not hold it.

    It takes shape under another name: one that was left half written is never used.
    """
    file = cache_dir / f"events-{VERSION}-{rows}.csv"
    if not file.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        making = file.with_name(f"{file.name}.{os.getpid()}")
        with psycopg.connect(url) as connection:
            query = rows_query(rows).as_string(connection).replace("\n", " ")
        measure([*server.psql(url), "-c", f"\\copy ({query}) TO '{making}' CSV HEADER"], cache_dir)
        making.rename(file)
    return file
