"""Every value arrives exactly or is refused by name: one round trip a type, by COPY and by INSERT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from etl.errors import RecordError
from etl.schema import PostgresType, Schema
from etl.transaction import transaction
from sinks import PostgresTable
from sinks.catalog import read_table
from sinks.columns import carrier_for
from sinks.postgres_writer import ArrayInsert, ChunkedCopy, Loader, StreamingCopy, WritePlan
from tests.support.databases import fresh_database
from tests.support_sinks.stage import Stage

UUID_TEXT = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
NASTY = ["", " ", 'a"b', "back\\slash", "{x,y}", "NULL", "tab\tline\nend", "Ü€😀", "\\.", None]

EXACT: list[tuple[str, str, Sequence[Any], Sequence[Any]]] = [
    # stream type, column type, values given, values found
    ("int8", "int8", [2**63 - 1, -(2**63), None], [2**63 - 1, -(2**63), None]),
    ("int8", "int2", [32767, -32768], [32767, -32768]),
    ("int2", "int8", [1], [1]),
    ("int4", "numeric(12,2)", [-7], [Decimal("-7.00")]),
    ("int8", "numeric", [2**63 - 1], [Decimal(2**63 - 1)]),
    ("int4", "float8", [2**31 - 1], [float(2**31 - 1)]),
    ("float4", "float8", [0.5, None], [0.5, None]),
    ("float8", "float8", [1e-300, float("inf"), -0.0], [1e-300, float("inf"), -0.0]),
    (
        "numeric(12,2)",
        "numeric",
        [Decimal("-0.01"), Decimal("9999999999.99")],
        [Decimal("-0.01"), Decimal("9999999999.99")],
    ),
    ("numeric(38,2)", "numeric(14,4)", [Decimal("1.25")], [Decimal("1.2500")]),
    ("numeric(38,38)", "numeric", [Decimal("0." + "1" * 38)], [Decimal("0." + "1" * 38)]),
    ("bool", "bool", [True, False, None], [True, False, None]),
    ("text", "text", NASTY, NASTY),
    ("text", "varchar(3)", ["äöü", None], ["äöü", None]),
    ("varchar(5)", "text", ["abcde"], ["abcde"]),
    ("text", "mood", ["happy", None], ["happy", None]),
    ("text", "short", ["abc"], ["abc"]),
    ("text", "uuid", [UUID_TEXT.upper(), UUID_TEXT.replace("-", ""), None], [UUID(UUID_TEXT), UUID(UUID_TEXT), None]),
    ("uuid", "uuid", [UUID_TEXT, None], [UUID(UUID_TEXT), None]),
    ("uuid", "text", [UUID_TEXT], [UUID_TEXT]),
    ("text", "jsonb", ['{"a": [1, null]}', None], [{"a": [1, None]}, None]),
    ("jsonb", "jsonb", ['"x"'], ["x"]),
    ("jsonb", "json", ["[1]"], [[1]]),
    ("bytea", "bytea", [b"", b"\0\xff\\x", None], [b"", b"\0\xff\\x", None]),
    ("date", "date", [date(1, 1, 1), date(9999, 12, 31), None], [date(1, 1, 1), date(9999, 12, 31), None]),
    ("time", "time", [time(23, 59, 59, 999999), time(0)], [time(23, 59, 59, 999999), time(0)]),
    (
        "timestamp",
        "timestamp",
        [datetime(1969, 12, 31, 23, 59, 59, 999999)],
        [datetime(1969, 12, 31, 23, 59, 59, 999999)],
    ),
    (
        "timestamptz",
        "timestamptz(6)",
        [datetime(2024, 2, 29, 1, 2, 3, 4, UTC)],
        [datetime(2024, 2, 29, 1, 2, 3, 4, UTC)],
    ),
    ("int8[]", "int8[]", [[1, None], [], None], [[1, None], [], None]),
    ("int8[]", "int2[]", [[7]], [[7]]),
    ("numeric(5,2)[]", "numeric(7,3)[]", [[Decimal("1.25"), None]], [[Decimal("1.250"), None]]),
    ("text[]", "text[]", [NASTY, [], None], [NASTY, [], None]),
    ("text[]", "varchar(9)[]", [["NULL", None, 'a"\\'], None, []], [["NULL", None, 'a"\\'], None, []]),
    ("text[]", "mood[]", [["sad", None]], ["{sad,NULL}"]),
    ("uuid[]", "uuid[]", [[UUID_TEXT, None], None], [[UUID(UUID_TEXT), None], None]),
    ("jsonb[]", "jsonb[]", [['{"a": "b\\"c"}', None]], [[{"a": 'b"c'}, None]]),
    ("bytea[]", "bytea[]", [[b"\0\xff", None]], [[b"\0\xff", None]]),
    ("float8[]", "float8[]", [[0.1, float("inf"), None]], [[0.1, float("inf"), None]]),
    ("bool[]", "bool[]", [[True, None]], [[True, None]]),
    ("date[]", "date[]", [[date(2024, 2, 29), None]], [[date(2024, 2, 29), None]]),
    ("time[]", "time[]", [[time(1, 2, 3, 4)]], [[time(1, 2, 3, 4)]]),
    ("timestamp[]", "timestamp[]", [[datetime(2024, 1, 1, 0, 0, 0, 1)]], [[datetime(2024, 1, 1, 0, 0, 0, 1)]]),
    (
        "timestamptz[]",
        "timestamptz[]",
        [[datetime(1969, 1, 1, 0, 0, 0, 1, UTC), None]],
        [[datetime(1969, 1, 1, 0, 0, 0, 1, UTC), None]],
    ),
]


BY_INSERT_ONLY = {"varchar(9)[]", "mood[]", "uuid[]", "timestamptz[]"}
CASES = [
    pytest.param(loader, *case, id=f"{loader.__name__}-{case[0]}-{case[1]}")
    for case in EXACT
    for loader in (ArrayInsert, StreamingCopy, ChunkedCopy)
    if loader is ArrayInsert or case[1] not in BY_INSERT_ONLY
]


@pytest.fixture(scope="module")
def shared_stage(server_url: str, store_template: str) -> Iterator[Stage]:
    """One database for all types: making one for each takes longer than the tests."""
    with fresh_database(server_url, store_template) as url:
        stage = Stage(url)
        stage.admin.execute("CREATE TYPE mood AS ENUM ('happy', 'sad')")
        stage.admin.execute("CREATE DOMAIN short AS varchar(3) CHECK (VALUE <> 'bad')")
        yield stage
        stage.close()


@pytest.fixture
def stage(shared_stage: Stage) -> Iterator[Stage]:
    yield shared_stage
    shared_stage.admin.execute("DROP TABLE IF EXISTS typed")


def _load(stage: Stage, loader: type[Loader], stream: str, column: str, values: pa.Array) -> None:
    stage.admin.execute(f"CREATE TABLE typed (n int8, v {column})")
    plan = WritePlan.make(stage.admin, "out", PostgresTable("typed"), Schema.declare({"n": "int8", "v": stream}))
    numbers = pa.array(range(len(values)), pa.int64())
    with transaction(stage.admin):
        one = loader(plan)
        one.load(stage.admin, pa.RecordBatch.from_arrays([numbers, values], names=["n", "v"]))
        one.end()


def _array(stream: str, values: Sequence[Any]) -> pa.Array:
    return pa.array(values, PostgresType.parse(stream).arrow)


@pytest.mark.parametrize(("loader", "stream", "column", "given", "found"), CASES)
def test_value_arrives_exactly(
    stage: Stage, loader: type[Loader], stream: str, column: str, given: Sequence[Any], found: Sequence[Any]
) -> None:
    _load(stage, loader, stream, column, _array(stream, given))
    assert [repr(value) for value in stage.scalars("SELECT v FROM typed ORDER BY n")] == [
        repr(value) for value in found
    ]


@pytest.mark.parametrize("loader", [ArrayInsert, StreamingCopy])
@pytest.mark.parametrize(
    ("stream", "column", "value", "message"),
    [
        ("int8", "int4", 2**31, "2147483648"),
        ("int8", "int2", -40000, "-40000"),
        ("int8", "numeric(3,0)", 1000, "22003"),
        ("numeric(38,2)", "numeric(5,2)", Decimal("1000.00"), "22003"),
        ("text", "varchar(3)", "abc ", "'abc ' is longer than 3 characters"),
        ("text", "short", "abcd", "longer than 3 characters"),
        ("text", "short", "bad", "23514"),
        ("text", "uuid", "0a1b2c3d", "'0a1b2c3d' is not a uuid"),
        ("text", "uuid", "zz1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9", "is not a uuid"),
        ("text", "mood", "angry", "22P02"),
        ("text", "jsonb", "{", "22P02"),
        ("text", "text", "a\0b", "22021"),
    ],
)
def test_value_is_refused(
    stage: Stage, loader: type[Loader], stream: str, column: str, value: Any, message: str
) -> None:
    with pytest.raises(RecordError) as caught:
        _load(stage, loader, stream, column, _array(stream, [value]))
    assert message in str(caught.value)
    assert caught.value.uid == "out"
    assert stage.scalars("SELECT v FROM typed") == []


@pytest.mark.parametrize("type_name", ["timestamptz", "timestamp"])
def test_value_that_would_turn_into_infinity_is_refused(stage: Stage, type_name: str) -> None:
    values = pa.array([-(2**63) + 946_684_800_000_000], pa.int64()).cast(PostgresType.parse(type_name).arrow)
    with pytest.raises(RecordError, match="out of range"):
        _load(stage, StreamingCopy, type_name, type_name, values)


@pytest.mark.parametrize("layout", [pa.large_string(), pa.string_view()])
def test_other_layouts_of_text_are_normalised(stage: Stage, layout: pa.DataType) -> None:
    _load(stage, StreamingCopy, "text", "text", pa.array(["a", None], layout))
    assert stage.scalars("SELECT v FROM typed ORDER BY n") == ["a", None]


@pytest.mark.parametrize(
    ("stream", "column", "reason"),
    [
        ("float8", "float4", "does not fit"),
        ("int8", "float8", "does not fit"),
        ("int8", "text", "does not fit"),
        ("numeric(12,4)", "numeric(12,2)", "round to 2 decimals"),
        ("numeric(12,0)", "numeric(5,-2)", "round to -2 decimals"),
        ("int4", "numeric(5,-2)", "round to -2 decimals"),
        ("timestamp", "timestamptz", "does not fit"),
        ("timestamptz", "timestamp", "does not fit"),
        ("timestamptz", "timestamptz(3)", "round to 3 digits"),
        ("time", "time(0)", "round to 0 digits"),
        ("text", "char(5)", "does not fit"),
        ("text", "name", "does not fit"),
        ("text", "inet", "does not fit"),
        ("text", "date", "does not fit"),
        ("text", "text[]", "does not fit"),
        ("text[]", "text", "does not fit"),
    ],
)
def test_type_is_refused_before_the_run(stage: Stage, stream: str, column: str, reason: str) -> None:
    stage.admin.execute(f"CREATE TABLE typed (v {column})")
    target = read_table(stage.admin, PostgresTable("typed"))
    assert target is not None
    refusal = carrier_for("v", PostgresType.parse(stream), target.columns[0])
    assert isinstance(refusal, str)
    assert reason in refusal
