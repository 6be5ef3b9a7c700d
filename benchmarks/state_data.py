"""The payments that are added up by key: SQL queries that are a file's content and the expected totals at once.

The server makes them, so that no part of the product decides what is right.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from benchmarks.process import measure
from benchmarks.server import Server

VERSION = 1
"""Part of the files' names: a change of a query makes new files."""

CHANGED_SHARE = 100
"""One key in so many is hit by rows that hit few."""

_TABLE = "CREATE TABLE totals (key int8 PRIMARY KEY, total numeric(38,2), rows int8)"
_ROWS = """
SELECT {key} AS key, ((n * 37 % 1000000)::numeric(14,2) / 100 - 1000)::numeric(12,2) AS amount
  FROM generate_series(0, {last}::int8) AS n
"""
_TOTALS = "SELECT key, sum(amount)::numeric(38,2) AS total, count(*) AS rows FROM ({}) AS made GROUP BY key"
_FOUND = """
SELECT count(*), coalesce(sum(total), 0)::text, coalesce(sum(rows), 0)::int8,
       coalesce(sum(hashtextextended(t::text, 0)), 0)::text
  FROM {} AS t
"""


class Spread(StrEnum):
    """Which keys the rows of a file have."""

    RANDOM = "random"
    """Any, by chance."""
    ONCE = "once"
    """Each of them once, in no order."""
    FEW = "few"
    """One in :data:`CHANGED_SHARE`, by chance."""


# A hash and no arithmetic sequence: keys come as often, and in as little order, as those of real rows.
_KEYS = {
    Spread.RANDOM: "(hashint8extended(n, 0) & 9223372036854775807) % {keys}",
    Spread.ONCE: "n * 7368787 % {keys}",
    Spread.FEW: "(hashint8extended(n, 0) & 9223372036854775807) % greatest({keys} / {share}, 1) * {share}",
}


@dataclass(frozen=True, slots=True)
class Payments:
    """The content of a file.

    Attributes:
        rows: How many.
        keys: Of how many keys they have some.
        spread: Which of them.
    """

    rows: int
    keys: int
    spread: Spread = Spread.RANDOM

    @property
    def query(self) -> sql.Composed:
        """The rows."""
        numbers = {"keys": sql.Literal(self.keys), "share": sql.Literal(CHANGED_SHARE)}
        key = sql.SQL(_KEYS[self.spread]).format(**numbers)
        return sql.SQL(_ROWS).format(key=key, last=sql.Literal(self.rows - 1))

    def file(self, cache_dir: Path, server: Server, url: str) -> Path:
        """The file with the rows and a header, made when the cache does not hold it.

        It takes shape under another name: one that was left half written is never used.
        """
        file = cache_dir / f"payments-{VERSION}-{self.spread}-{self.rows}-{self.keys}.csv"
        if not file.exists():
            cache_dir.mkdir(parents=True, exist_ok=True)
            making = file.with_name(f"{file.name}.{os.getpid()}")
            with psycopg.connect(url) as connection:
                query = self.query.as_string(connection).replace("\n", " ")
            measure([*server.psql(url), "-c", f"\\copy ({query}) TO '{making}' CSV HEADER"], cache_dir)
            making.rename(file)
        return file


@dataclass(frozen=True, slots=True)
class Totals:
    """What the table of totals holds, independent of the order of its rows.

    Attributes:
        keys: Number of its rows.
        total: Sum of all totals, as text.
        rows: Sum of all counts.
        checksum: Of key, total and count of every row.
    """

    keys: int
    total: str
    rows: int
    checksum: str

    @property
    def summary(self) -> str:
        """What a contender prints that writes no table."""
        return f"{self.keys} {self.total} {self.rows}"


def create_table(connection: psycopg.Connection[Any]) -> None:
    """Make the empty table with its primary key."""
    connection.execute(_TABLE)


def totals_of_table(connection: psycopg.Connection[Any]) -> Totals:
    """What the table holds."""
    return _found(connection, sql.Identifier("totals"))


def expected_totals(connection: psycopg.Connection[Any], files: Sequence[Payments]) -> Totals:
    """What the table must hold after these files."""
    rows = sql.SQL(" UNION ALL ").join(file.query for file in files)
    return _found(connection, sql.SQL("({})").format(sql.SQL(_TOTALS).format(rows)))


def _found(connection: psycopg.Connection[Any], relation: sql.Composable) -> Totals:
    row = connection.execute(sql.SQL(_FOUND).format(relation)).fetchone()
    assert row is not None
    return Totals(*row)
