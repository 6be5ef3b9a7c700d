"""Two targets compared as multisets: what is missing, what is there too often, what should not be there at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import psycopg
import pyarrow as pa
from psycopg import sql

from etl.sink import Connection, ScratchTable
from etl.sqlstate import translate


@dataclass(frozen=True, slots=True)
class Difference:
    """What a target shows, compared with what it should show.

    Attributes:
        lost: Rows that are missing.
        duplicated: Rows that should be there, but not so often.
        unexpected: Rows that should not be there at all.
        columns: Columns whose values differ, each looked at by itself; empty when only their combinations do.
        example: One of the rows, by column; only filled when that was asked for.
    """

    lost: int = 0
    duplicated: int = 0
    unexpected: int = 0
    columns: tuple[str, ...] = ()
    example: Mapping[str, str | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.lost or self.duplicated or self.unexpected)

    def __str__(self) -> str:
        if self.unexpected:
            parts = [f"differs ({self.lost} missing, {self.unexpected + self.duplicated} too many)"]
        else:
            counts = (("lost", self.lost), ("duplicated", self.duplicated))
            parts = [f"{what} {count}" for what, count in counts if count]
        return ", ".join(parts) or "ok"


def compare_tables(
    connection: Connection, expected: ScratchTable, found: ScratchTable, columns: Sequence[str], *, show_data: bool
) -> Difference:
    """Compare two tables of one database, there.

    Args:
        connection: To the database.
        expected: What should be there.
        found: What is there.
        columns: What the job writes; others may hold numbers and times of their own.
        show_data: Whether the difference comes with an example.
    """
    try:
        difference = _counts(connection, expected, found, columns)
        if not difference:
            return difference
        apart = tuple(name for name in columns if _counts(connection, expected, found, [name]))
        example = _example(connection, expected, found, columns) if show_data else {}
    except psycopg.Error as error:
        raise translate(error, f"comparing {found.schema}.{found.name}") from error
    return Difference(difference.lost, difference.duplicated, difference.unexpected, apart, example)


_COUNTED = sql.SQL(
    "SELECT {names}, sum(expected) AS expected, sum(found) AS found FROM ("
    "SELECT {values}, 1 AS expected, 0 AS found FROM {wanted} UNION ALL SELECT {values}, 0, 1 FROM {there}"
    ") AS rows GROUP BY {names} HAVING sum(expected) <> sum(found)"
)
"""What EXCEPT ALL yields in both directions, in one pass, and with the rows that are there too often told apart.

Values are compared as the text that the server prints: every type has one (json has no equality of its own), it is
exact, and it tells 1.0 from 1.00.
"""


def _counted(expected: ScratchTable, found: ScratchTable, columns: Sequence[str]) -> sql.Composed:
    # Columns of the user's may be called expected as well.
    names = [sql.Identifier(f"c{number}") for number in range(len(columns))]
    values = [
        sql.SQL("{}::text AS {}").format(sql.Identifier(column), name)
        for column, name in zip(columns, names, strict=True)
    ]
    return _COUNTED.format(
        names=sql.SQL(", ").join(names),
        values=sql.SQL(", ").join(values),
        wanted=sql.Identifier(expected.schema, expected.name),
        there=sql.Identifier(found.schema, found.name),
    )


def _counts(connection: Connection, expected: ScratchTable, found: ScratchTable, columns: Sequence[str]) -> Difference:
    query = sql.SQL(
        "SELECT coalesce(sum(greatest(expected - found, 0)), 0),"
        " coalesce(sum(found - expected) FILTER (WHERE expected > 0 AND found > expected), 0),"
        " coalesce(sum(found) FILTER (WHERE expected = 0), 0) FROM ({}) AS different"
    )
    row = connection.execute(query.format(_counted(expected, found, columns))).fetchone()
    assert row is not None
    lost, duplicated, unexpected = map(int, row)
    return Difference(lost, duplicated, unexpected)


def _example(
    connection: Connection, expected: ScratchTable, found: ScratchTable, columns: Sequence[str]
) -> Mapping[str, str | None]:
    query = sql.SQL("{} ORDER BY {} LIMIT 1").format(_counted(expected, found, columns), sql.Identifier("c0"))
    row = connection.execute(query).fetchone()
    assert row is not None
    return dict(zip(columns, row[: len(columns)], strict=True))


def count_rows(batches: Iterable[pa.RecordBatch]) -> Counter[tuple[str, ...]]:
    """How often each row is there, its values as Python shows them."""
    counted: Counter[tuple[str, ...]] = Counter()
    for batch in batches:
        columns = [map(repr, column.to_pylist()) for column in batch.columns]
        counted.update(zip(*columns, strict=True))
    return counted


def compare_rows(
    expected: Counter[tuple[str, ...]], found: Counter[tuple[str, ...]], columns: Sequence[str], *, show_data: bool
) -> Difference:
    """Compare what was counted by :func:`count_rows`."""
    lost, excess = expected - found, found - expected
    unexpected = sum(count for row, count in excess.items() if row not in expected)
    if not lost and not excess:
        return Difference()
    apart = tuple(name for number, name in enumerate(columns) if _column(expected, number) != _column(found, number))
    example = dict(zip(columns, min((lost + excess).keys()), strict=True)) if show_data else {}
    return Difference(lost.total(), excess.total() - unexpected, unexpected, apart, example)


def _column(rows: Counter[tuple[str, ...]], number: int) -> Counter[str]:
    counted: Counter[str] = Counter()
    for row, count in rows.items():
        counted[row[number]] += count
    return counted
