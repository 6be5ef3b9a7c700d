"""Targets compared as multisets: on the server, and in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from etl.errors import ConfigurationError
from etl.sink import ScratchTable
from etl.testing.chaos.comparison import Difference, compare_rows, compare_tables, count_rows

Connection = psycopg.Connection[Any]
Rows = Sequence[tuple[int | None, str | None]]
EXPECTED, FOUND = ScratchTable("public", "expected"), ScratchTable("public", "found")
COLUMNS = ("id", "found")
"""The second is called as a name in the query is."""

CASES = [
    ([(1, "a"), (2, "b")], [(2, "b"), (1, "a")], Difference()),
    ([], [], Difference()),
    ([(None, None), (1, None)], [(1, None), (None, None)], Difference()),
    ([(1, "a"), (1, "a"), (2, "b")], [(1, "a")], Difference(lost=2, columns=("id", "found"))),
    ([(1, "a")], [(1, "a"), (1, "a"), (1, "a")], Difference(duplicated=2, columns=("id", "found"))),
    ([(1, "a")], [(1, "b")], Difference(lost=1, unexpected=1, columns=("found",))),
    ([(1, "a")], [(1, None)], Difference(lost=1, unexpected=1, columns=("found",))),
    ([(1, "a"), (2, "b")], [(1, "b"), (2, "a")], Difference(lost=2, unexpected=2)),
    ([(1, "a"), (2, "b")], [(2, "b"), (2, "b"), (3, "c")], Difference(1, 1, 1, ("id", "found"))),
]


@pytest.mark.parametrize(("expected", "found", "difference"), CASES)
def test_tables_are_compared_as_multisets(
    connection: Connection, expected: Rows, found: Rows, difference: Difference
) -> None:
    for name, rows in (("expected", expected), ("found", found)):
        connection.execute(f"CREATE TABLE {name} (id int8, found text, at timestamptz DEFAULT clock_timestamp())")
        with connection.cursor() as cursor:
            cursor.executemany(f"INSERT INTO {name} VALUES (%s, %s)", rows)

    assert compare_tables(connection, EXPECTED, FOUND, COLUMNS, show_data=False) == difference


@pytest.mark.parametrize(("expected", "found", "difference"), CASES)
def test_batches_are_compared_as_multisets(expected: Rows, found: Rows, difference: Difference) -> None:
    wanted, there = (count_rows(batches_of(rows)) for rows in (expected, found))

    assert compare_rows(wanted, there, COLUMNS, show_data=False) == difference


def batches_of(rows: Rows) -> list[pa.RecordBatch]:
    schema = pa.schema([("id", pa.int64()), ("found", pa.string())])
    return [pa.RecordBatch.from_pylist([dict(zip(COLUMNS, row, strict=True))], schema=schema) for row in rows]


@pytest.mark.parametrize(
    ("type_", "one", "other"),
    [
        ("json", '{"a": 1}', '{"a":1}'),
        ("numeric", "1.0", "1.00"),
        ("float8", "0.1", "0.10000000000000002"),
        ("point", "(1,2)", "(1,3)"),
        ("int4[]", "{1,2}", "{2,1}"),
        ("timestamptz", "2024-01-01T00:00:00.000001Z", "2024-01-01T00:00:00Z"),
        ("bytea", "\\x00ff", "\\x00fe"),
    ],
)
def test_values_of_every_type_are_compared_exactly(connection: Connection, type_: str, one: str, other: str) -> None:
    for name, value in (("expected", one), ("found", one), ("others", other)):
        connection.execute(f"CREATE TABLE {name} (value {type_})")
        connection.execute(f"INSERT INTO {name} VALUES (%s)", [value])
    others = ScratchTable("public", "others")

    assert not compare_tables(connection, EXPECTED, FOUND, ["value"], show_data=False)
    assert compare_tables(connection, EXPECTED, others, ["value"], show_data=False) == Difference(1, 0, 1, ("value",))


def test_example_is_shown_only_when_it_is_asked_for(connection: Connection) -> None:
    connection.execute("CREATE TABLE expected AS SELECT 1 AS id, 'secret' AS found")
    connection.execute("CREATE TABLE found AS SELECT 1 AS id, NULL::text AS found WHERE false")

    silent, telling = (compare_tables(connection, EXPECTED, FOUND, COLUMNS, show_data=shown) for shown in (False, True))

    assert (silent.example, telling.example) == ({}, {"id": "1", "found": "secret"})
    rows = count_rows(batches_of([(1, "secret")]))
    assert compare_rows(rows, count_rows([]), COLUMNS, show_data=True).example == {"id": "1", "found": "'secret'"}


def test_table_that_is_not_there_is_an_error_of_ours(connection: Connection) -> None:
    with pytest.raises(ConfigurationError, match=r"comparing public\.found"):
        compare_tables(connection, EXPECTED, FOUND, COLUMNS, show_data=False)
