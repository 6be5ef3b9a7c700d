"""Every transformation, carried out on batches that are written down by hand."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from etl.errors import FencedError, InternalError, RecordError
from etl.graph import TransformationNode
from etl.job import Job
from etl.operators import operator_for
from etl.operators.rows import ROWS_MAX
from etl.schema import Schema
from etl.stream import Stream
from tests.support.declarations import DeclaredSink, DeclaredSource

Step = Callable[[Stream], Stream]

EVERY_TYPE: dict[str, list[Any]] = {
    "int2": [-(2**15), 2**15 - 1, None],
    "int4": [-(2**31), 2**31 - 1, None],
    "int8": [-(2**63), 2**63 - 1, None],
    "float4": [0.5, float("-inf"), None],
    "float8": [0.1, -0.0, None],
    "numeric(12,2)": [Decimal("9999999999.99"), Decimal("-0.01"), None],
    "numeric(38,0)": [Decimal("9" * 38), Decimal("-" + "9" * 38), None],
    "numeric(38,38)": [Decimal("0." + "9" * 38), Decimal("-0." + "9" * 38), None],
    "bool": [True, False, None],
    "text": ["", "Zoë 東京 🦄 \n\\N", None],
    "varchar(10)": ["abc", "", None],
    "date": [date(1, 1, 1), date(9999, 12, 31), None],
    "time": [time(0, 0), time(23, 59, 59, 999999), None],
    "timestamp": [datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999), None],
    "timestamptz": [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC), None],
    "uuid": ["00000000-0000-0000-0000-000000000000", "f81d4fae-7dec-11d0-a765-00a0c91e6bf6", None],
    "jsonb": ['{"a": [1, null]}', "null", None],
    "json": ["{ }", '"x"', None],
    "bytea": [b"", b"\x00\xff", None],
}
EVERY_TYPE |= {f"{name}[]": [values, [], None] for name, values in EVERY_TYPE.items()}

IDENTITIES: dict[str, Step] = {
    "filter": lambda s: s.filter(pl.col("k") >= 0),
    "filter by function": lambda s: s.filter(lambda row: row["k"] >= 0),
    "select": lambda s: s.select("k", "c"),
    "select all": lambda s: s.select(pl.all()),
    "computed": lambda s: s.select("k", pl.when(pl.col("k") >= 0).then(pl.col("c")).alias("c")),
    "with_columns": lambda s: s.with_columns(d=pl.col("c")).select("k", c="d"),
    "map": lambda s: s.map(lambda row: row),
    "flat_map": lambda s: s.flat_map(lambda row: [row]),
    "map_batches": lambda s: s.map_batches(lambda frame: frame),
    "union": lambda s: s.filter(pl.col("k") >= 0).union(s.filter(pl.col("k") < 0)),
}


def batch_of(schema: dict[str, str], rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=Schema.declare(schema).to_arrow())


def run(step: Step, batch: pa.RecordBatch, schema: dict[str, str]) -> pa.Table:
    """Send a batch along the first way from the source to the sink, and check the types on the way."""
    job = Job("test")
    step(job.read("in", DeclaredSource(schema))).write("out", DeclaredSink())
    graph = job.graph()
    batches, node = [batch], graph.nodes[0]
    while (node := graph.node(graph.consumers(node.id)[0])) and isinstance(node, TransformationNode):
        operator = operator_for(node.transformation, [graph.node(one).schema for one in node.inputs], node.schema)
        batches = list(itertools.chain.from_iterable(operator.process(given) for given in batches))
        operator.close()
        assert [found.schema for found in batches] == [node.schema.to_arrow()] * len(batches)
        for found in batches:
            found.validate(full=True)
    return pa.Table.from_batches(batches, schema=node.schema.to_arrow())


def run_rows(step: Step, schema: dict[str, str], *rows: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run(step, batch_of(schema, list(rows)), schema).to_pylist()
    return found


@pytest.mark.parametrize("identity", IDENTITIES)
@pytest.mark.parametrize("name", EVERY_TYPE)
def test_values_and_type_come_through_unchanged(name: str, identity: str) -> None:
    schema = {"k": "int8", "c": name}
    rows = [{"k": number, "c": value} for number, value in enumerate(EVERY_TYPE[name])]
    batch = batch_of(schema, rows)
    found = run(IDENTITIES[identity], batch, schema)
    assert found.equals(pa.Table.from_batches([batch]))
    assert repr(found["c"].to_pylist()) == repr(batch["c"].to_pylist())


@pytest.mark.parametrize("identity", IDENTITIES)
def test_empty_batch_stays_empty(identity: str) -> None:
    schema = {"k": "int8", "c": "text[]"}
    assert run(IDENTITIES[identity], batch_of(schema, []), schema).num_rows == 0


@pytest.mark.parametrize("identity", IDENTITIES)
def test_slice_of_a_batch_comes_through(identity: str) -> None:
    schema = {"k": "int8", "c": "text"}
    batch = batch_of(schema, [{"k": number, "c": str(number)} for number in range(9)]).slice(3, 4)
    assert run(IDENTITIES[identity], batch, schema)["c"].to_pylist() == ["3", "4", "5", "6"]


@pytest.mark.parametrize("predicate", [pl.col("n") > 1, lambda row: None if row["n"] is None else row["n"] > 1])
def test_filter_keeps_true_and_drops_false_and_null(predicate: Any) -> None:
    rows: list[dict[str, Any]] = [{"n": 1}, {"n": 2}, {"n": None}, {"n": 3}]
    assert run_rows(lambda s: s.filter(predicate), {"n": "int4"}, *rows) == [{"n": 2}, {"n": 3}]


def test_filter_accepts_a_constant() -> None:
    assert run_rows(lambda s: s.filter(pl.lit(False)), {"n": "int4"}, {"n": 1}, {"n": 2}) == []


def test_filter_hands_on_the_same_batch_when_all_rows_stay() -> None:
    schema = Schema.declare({"n": "int4"})
    job = Job("test")
    job.read("in", DeclaredSource({"n": "int4"})).filter(pl.col("n") > 0).write("out", DeclaredSink())
    node = job.graph().nodes[1]
    assert isinstance(node, TransformationNode)
    batch = batch_of({"n": "int4"}, [{"n": 1}])
    (found,) = operator_for(node.transformation, [schema], schema).process(batch)
    assert found is batch


def test_select_spreads_constants_over_all_rows() -> None:
    found = run_rows(lambda s: s.select(one=pl.lit(1), t=pl.lit("x")), {"n": "int4"}, {"n": 1}, {"n": 2})
    assert found == [{"one": 1, "t": "x"}] * 2


def test_select_can_swap_columns() -> None:
    assert run_rows(lambda s: s.select(a="b", b="a"), {"a": "int4", "b": "int4"}, {"a": 1, "b": 2}) == [
        {"a": 2, "b": 1}
    ]


def test_with_columns_sees_the_row_as_it_came() -> None:
    def step(s: Stream) -> Stream:
        return s.with_columns(
            pl.col("b") + 1, a=pl.col("b"), f=lambda row: row["a"] * 10, b2=pl.col("a"), schema={"f": "int4"}
        )

    found = run_rows(step, {"a": "int4", "b": "int4"}, {"a": 1, "b": 2})
    assert found == [{"a": 2, "b": 3, "f": 10, "b2": 1}]
    assert list(found[0]) == ["a", "b", "f", "b2"]


def test_functions_of_with_columns_do_not_disturb_each_other() -> None:
    def spoil(row: dict[str, Any]) -> int:
        row["l"].append(row["n"])
        row["n"] = 7
        return len(row["l"])

    def step(s: Stream) -> Stream:
        return s.with_columns(a=spoil, b=spoil, schema={"a": "int8", "b": "int8"})

    found = run_rows(step, {"n": "int4", "l": "int4[]"}, {"n": 1, "l": []})
    assert found == [{"n": 1, "l": [], "a": 1, "b": 1}]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (pl.col("d") * 3, Decimal("3.75")),
        (pl.col("d") * pl.col("d"), Decimal("1.56")),
        (pl.col("d") + pl.col("d"), Decimal("2.50")),
        (pl.col("d").cast(pl.Decimal(20, 4)), Decimal("1.2500")),
        (pl.lit(Decimal("1.125")), Decimal("1.125")),
        (pl.time(1, 2, 3, 4), time(1, 2, 3, 4)),
        (pl.col("ts").dt.convert_time_zone("Asia/Tokyo"), datetime(2024, 1, 1, tzinfo=UTC)),
        (pl.col("ts").dt.cast_time_unit("ms"), datetime(2024, 1, 1, tzinfo=UTC)),
        (pl.col("ts").dt.date(), date(2024, 1, 1)),
        (pl.col("n").cast(pl.UInt64), Decimal(5)),
        (pl.col("n").cast(pl.Int8), 5),
        (pl.concat_list(pl.col("t"), pl.lit("z")), ["x", "z"]),
        (pl.col("t").cast(pl.Binary), b"x"),
        (pl.col("t").is_null(), False),
    ],
)
def test_execution_yields_the_inferred_type(expression: pl.Expr, expected: Any) -> None:
    schema = {"d": "numeric(12,2)", "ts": "timestamptz", "n": "int4", "t": "text"}
    row = {"d": Decimal("1.25"), "ts": datetime(2024, 1, 1, tzinfo=UTC), "n": 5, "t": "x"}
    (found,) = run_rows(lambda s: s.select(r=expression), schema, row)
    assert found["r"] == expected
    assert type(found["r"]) is type(expected)


def test_map_takes_exact_values_and_another_schema() -> None:
    def step(s: Stream) -> Stream:
        return s.map(
            lambda row: {"b": row["a"] / 4, "c": [row["a"]]}, schema={"b": "numeric(6,3)", "c": "numeric(4,1)[]"}
        )

    found = run_rows(step, {"a": "numeric(4,1)"}, {"a": Decimal("0.5")})
    assert found == [{"b": Decimal("0.125"), "c": [Decimal("0.5")]}]


def test_map_takes_a_timestamp_of_any_zone() -> None:
    here = datetime(2024, 1, 1, 3, tzinfo=timezone(timedelta(hours=3)))
    found = run_rows(lambda s: s.map(lambda row: {"t": here}, schema={"t": "timestamptz"}), {"n": "int4"}, {"n": 1})
    assert found == [{"t": datetime(2024, 1, 1, tzinfo=UTC)}]


class Text(str):
    """Text, but not exactly."""


@pytest.mark.parametrize(
    ("type_", "value", "problem"),
    [
        ("int8", 1.0, "1.0 is float, int8 takes int"),
        ("int8", True, "True is bool, int8 takes int"),
        ("int8", "1", "'1' is str, int8 takes int"),
        ("int8", 2**63, "9223372036854775808 does not fit int8: "),
        ("int2", 40000, "40000 does not fit int2: "),
        ("float8", 1, "1 is int, float8 takes float"),
        ("float4", 0.1, "0.1 has no exact float4; declare float8"),
        ("float4", 1e300, "1e+300 has no exact float4; declare float8"),
        ("numeric(5,2)", 1.5, "1.5 is float, numeric(5,2) takes Decimal"),
        ("numeric(5,2)", 1, "1 is int, numeric(5,2) takes Decimal"),
        ("numeric(5,2)", Decimal("1.234"), "Decimal('1.234') does not fit numeric(5,2): "),
        ("numeric(5,2)", Decimal("1234.5"), "Decimal('1234.5') does not fit numeric(5,2): "),
        ("numeric(5,2)", Decimal("NaN"), "Decimal('NaN') does not fit numeric(5,2): "),
        ("bool", 1, "1 is int, bool takes bool"),
        ("text", b"x", "b'x' is bytes, text takes str"),
        ("text", Text("x"), "'x' is Text, text takes str"),
        ("text", "\ud800", "'\\ud800' does not fit text: "),
        ("bytea", "x", "'x' is str, bytea takes bytes"),
        ("date", datetime(2024, 1, 1, 5), "datetime.datetime(2024, 1, 1, 5, 0) is datetime, date takes date"),
        ("timestamp", date(2024, 1, 1), "datetime.date(2024, 1, 1) is date, timestamp takes datetime"),
        ("timestamptz", datetime(2024, 1, 1), "datetime.datetime(2024, 1, 1, 0, 0) has no time zone"),
        ("timestamp", datetime(2024, 1, 1, tzinfo=UTC), "has a time zone, which is wrong for timestamp"),
        ("time", time(1, tzinfo=UTC), "has a time zone, which is wrong for time"),
        ("uuid", "F81D4FAE-7DEC-11D0-A765-00A0C91E6BF6", "is not a canonical lower-case uuid"),
        ("jsonb", "{'a': 1}", "is not valid JSON"),
        ("jsonb", "NaN", "'NaN' is not valid JSON"),
        ("int8[]", (1, 2), "(1, 2) is tuple, int8[] takes list"),
        ("int8[]", [1, 2.0], "2.0 is float, int8 takes int"),
        ("int8[]", [[1]], "[1] is list, int8 takes int"),
        ("timestamptz[]", [datetime(2024, 1, 1)], "has no time zone"),
        ("uuid[]", ["x"], "'x' is not a canonical lower-case uuid"),
    ],
)
def test_inexact_value_is_refused_by_name(type_: str, value: Any, problem: str) -> None:
    steps: list[Step] = [
        lambda s: s.map(lambda row: {"c": value}, schema={"c": type_}),
        lambda s: s.flat_map(lambda row: [{"c": None}, {"c": value}], schema={"c": type_}),
        lambda s: s.with_columns(c=lambda row: value, schema={"c": type_}),
    ]
    for step in steps:
        with pytest.raises(RecordError) as caught:
            run_rows(step, {"n": "int4"}, {"n": 1})
        assert problem in str(caught.value)
        assert "test_operators.py" in str(caught.value)
        assert 'column "c": ' in str(caught.value)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, "the result lacks 'a', 'b'; declared are: a int4, b text"),
        ({"a": 1}, "the result lacks 'b'; declared are: a int4, b text"),
        ({"a": 1, "b": "", "c": 1}, "the result has additional 'c'; declared are: a int4, b text"),
        ({"a": 1, "c": 1}, "the result lacks 'b' and has additional 'c'; declared are: a int4, b text"),
        (defaultdict(int, a=1), "the result lacks 'b'; declared are: a int4, b text"),
        (None, "the function returned NoneType, not a dict of column values"),
        ([1, 2], "the function returned list, not a dict of column values"),
    ],
)
def test_row_of_another_shape_is_refused(row: Any, problem: str) -> None:
    with pytest.raises(RecordError, match=problem):
        run_rows(lambda s: s.map(lambda _: row, schema={"a": "int4", "b": "text"}), {"n": "int4"}, {"n": 1})


STRANGE_NAMES = ("'", '"', "{}", "\\", "a\nb", "class", "value_0", "columns", "Zoë", "𝒦", "K")


def test_rows_have_columns_of_any_name() -> None:
    schema = dict.fromkeys(STRANGE_NAMES, "int4")
    rows = [{name: 20 * row + number for number, name in enumerate(STRANGE_NAMES)} for row in range(3)]
    assert run_rows(lambda s: s.map(lambda row: {name: row[name] for name in reversed(row)}), schema, *rows) == rows


def test_filter_function_must_return_a_bool() -> None:
    with pytest.raises(RecordError, match=r"filter at .*: .*<lambda>.* returned 1, not a bool"):
        run_rows(lambda s: s.filter(lambda row: row["n"]), {"n": "int4"}, {"n": 1})


def test_flat_map_yields_any_number_of_rows() -> None:
    def repeat(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for number in range(row["n"]):
            row["n"] = number
            yield row  # the same dict again and again

    found = run_rows(lambda s: s.flat_map(repeat), {"n": "int4"}, {"n": 2}, {"n": 0}, {"n": 3})
    assert [row["n"] for row in found] == [0, 1, 0, 1, 2]


def test_flat_map_emits_batches_of_bounded_size() -> None:
    found = run(
        lambda s: s.flat_map(lambda row: [row] * (2 * ROWS_MAX + 5)), batch_of({"n": "int4"}, [{"n": 1}]), {"n": "int4"}
    )
    assert [chunk for chunk in map(len, found["n"].chunks) if chunk] == [ROWS_MAX, ROWS_MAX, 5]


def test_map_batches_may_reorder_columns() -> None:
    found = run_rows(
        lambda s: s.map_batches(lambda frame: frame.select("b", "a"), schema={"a": "int4", "b": "text"}),
        {"a": "int4", "b": "text"},
        {"a": 1, "b": "x"},
    )
    assert found == [{"a": 1, "b": "x"}]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda frame: frame.drop("n"), "the result lacks 'n'"),
        (lambda frame: frame["n"], "returned Series, not a polars.DataFrame"),
        (lambda frame: frame.cast(pl.Float64), 'column "n" came as double, declared is int4'),
        (lambda frame: frame.cast(pl.String), "declared is int4"),
        (lambda frame: frame.select(pl.col("n").cast(pl.Int64) + 2**31), 'column "n" does not fit int4: '),
    ],
)
def test_map_batches_refuses_another_result(function: Any, problem: str) -> None:
    with pytest.raises(RecordError) as caught:
        run_rows(lambda s: s.map_batches(function, schema={"n": "int4"}), {"n": "int4"}, {"n": 1})
    assert problem in str(caught.value)


def test_map_batches_accepts_wider_integers_and_nulls_that_fit() -> None:
    def widen(frame: pl.DataFrame) -> pl.DataFrame:
        return frame.select(pl.lit(7).cast(pl.Int64).alias("n"), pl.lit(None).alias("t"))

    schema = {"n": "int2", "t": "text[]"}
    found = run_rows(lambda s: s.map_batches(widen, schema=schema), {"n": "int4"}, {"n": 1})
    assert found == [{"n": 7, "t": None}]


def fail(*given: Any) -> Any:
    raise ValueError("no luck")


@pytest.mark.parametrize(
    "step",
    [
        lambda s: s.filter(fail),
        lambda s: s.map(fail),
        lambda s: s.flat_map(fail),
        lambda s: s.flat_map(lambda row: (fail() for _ in range(1))),
        lambda s: s.map_batches(fail, schema={"n": "int4"}),
        lambda s: s.with_columns(c=fail, schema={"c": "int4"}),
    ],
)
def test_exception_of_user_code_leads_back_to_it(step: Step) -> None:
    with pytest.raises(InternalError) as caught:
        run_rows(step, {"n": "int4"}, {"n": 1})
    assert "raised ValueError: no luck" in str(caught.value)
    assert "test_operators.py:" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_exception_of_user_code_names_function_and_row() -> None:
    with pytest.raises(
        InternalError, match=r"fail \(.*test_operators\.py:\d+\) raised ValueError: no luck for the row"
    ):
        run_rows(lambda s: s.map(fail), {"n": "int4"}, {"n": 1})


def test_error_that_user_code_raises_on_purpose_is_passed_on() -> None:
    def fenced(row: Any) -> Any:
        raise FencedError("stop")

    with pytest.raises(FencedError, match=r"^stop$"):
        run_rows(lambda s: s.map(fenced), {"n": "int4"}, {"n": 1})


def test_value_that_an_expression_cannot_cast_is_a_record_error() -> None:
    with pytest.raises(RecordError, match=r"select at .*test_operators\.py:\d+: conversion from `str` to `i64` failed"):
        run_rows(lambda s: s.select(pl.col("t").cast(pl.Int64)), {"t": "text"}, {"t": "x"})


def test_expression_that_yields_no_uuid_for_a_uuid_column_is_refused() -> None:
    with pytest.raises(RecordError, match="'f81d' is not a canonical lower-case uuid"):
        run_rows(
            lambda s: s.with_columns(pl.col("u").str.head(4)),
            {"u": "uuid"},
            {"u": "f81d4fae-7dec-11d0-a765-00a0c91e6bf6"},
        )


def test_declared_uuid_is_checked_when_it_comes_from_text() -> None:
    with pytest.raises(RecordError, match="'x' is not a canonical lower-case uuid"):
        run_rows(lambda s: s.select("t", schema={"t": "uuid"}), {"t": "text"}, {"t": "x"})


@pytest.mark.parametrize("function", [lambda row: row, lambda row: {"c": None}])
@pytest.mark.parametrize(
    ("type_", "raw"),
    [("date", pa.array([10**7], pa.int32())), ("timestamptz", pa.array([-(2**62)])), ("timestamp", pa.array([2**62]))],
)
def test_time_that_python_cannot_hold_is_refused(type_: str, raw: pa.Array, function: Any) -> None:
    schema = Schema.declare({"c": type_}).to_arrow()
    batch = pa.RecordBatch.from_arrays([raw.cast(schema[0].type)], schema=schema)
    with pytest.raises(RecordError, match=r'map at .*: column "c" has a value outside of the years 1 to 9999'):
        run(lambda s: s.map(function), batch, {"c": type_})


@pytest.mark.parametrize("type_", ["date", "timestamptz", "timestamp"])
def test_time_that_python_cannot_hold_passes_expressions(type_: str) -> None:
    schema = Schema.declare({"c": type_}).to_arrow()
    raw = pa.array([10**7], pa.int32()) if type_ == "date" else pa.array([-(2**62)])
    batch = pa.RecordBatch.from_arrays([raw.cast(schema[0].type)], schema=schema)
    found = run(lambda s: s.filter(pl.col("c").is_not_null()).select(c=pl.coalesce("c", "c")), batch, {"c": type_})
    assert found["c"].combine_chunks().equals(batch["c"])


@pytest.mark.parametrize("step", [lambda s: s.map(dict), lambda s: s.map_batches(lambda frame: frame)])
@pytest.mark.parametrize("type_", ["time", "time[]"])
def test_hour_24_is_refused_where_it_would_become_null(type_: str, step: Step) -> None:
    day = pa.array([86_400_000_000]).cast(pa.time64("us"))
    column = day if type_ == "time" else pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), day)
    batch = pa.RecordBatch.from_arrays([column], schema=Schema.declare({"c": type_}).to_arrow())
    with pytest.raises(RecordError, match='column "c" has a value outside of the times of day'):
        run(step, batch, {"c": type_})
