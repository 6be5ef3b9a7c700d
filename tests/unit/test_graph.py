from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import polars as pl
import pytest

from etl.errors import ConfigurationError
from etl.event_time import EventTime
from etl.graph import SinkNode, SourceNode, TransformationNode
from etl.job import Job
from etl.stream import Stream
from tests.support.declarations import ORDERS, DeclaredSink, DeclaredSource, orders_job


def problems(job: Job) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        job.graph()
    return [re.sub(r" at \S+:\d+", "", f"{finding.subject}: {finding.problem}") for finding in caught.value.findings]


def schema_after(step: Callable[[Stream], Stream]) -> str:
    job, orders = orders_job()
    step(orders).write("out", DeclaredSink())
    return str(job.graph().sinks[0].schema)


def problems_of(step: Callable[[Stream], Stream]) -> list[str]:
    job, orders = orders_job()
    step(orders).write("out", DeclaredSink())
    return problems(job)


def test_graph_has_nodes_in_order_with_their_edges() -> None:
    job, orders = orders_job()
    large = orders.filter(pl.col("amount") > 100)
    small = orders.filter(lambda row: row["amount"] <= 100)
    large.union(small).write("all", DeclaredSink())
    large.write("large", DeclaredSink())
    graph = job.graph()
    assert [node.id for node in graph.nodes] == ["orders", "filter-1", "filter-2", "union-1", "all", "large"]
    assert [type(node) for node in graph.nodes] == [SourceNode, *[TransformationNode] * 3, SinkNode, SinkNode]
    assert graph.consumers("orders") == ("filter-1", "filter-2")
    assert graph.consumers("filter-1") == ("union-1", "large")
    assert graph.consumers("all") == ()
    assert [node.id for node in graph.upstream("large")] == ["orders", "filter-1", "large"]
    assert ([node.uid for node in graph.sources], [node.uid for node in graph.sinks]) == (["orders"], ["all", "large"])


def test_node_is_found_by_id() -> None:
    job, orders = orders_job()
    orders.write("out", DeclaredSink())
    assert job.graph().node("out") is not None
    with pytest.raises(KeyError):
        job.graph().node("nothing")


def test_node_ids_never_collide_with_uids() -> None:
    job, orders = orders_job()
    orders.filter(pl.col("id") > 1).write("filter-1", DeclaredSink())
    assert [node.id for node in job.graph().nodes] == ["orders", "filter-2", "filter-1"]


def test_transformation_knows_the_line_of_the_call() -> None:
    job, orders = orders_job()
    orders.filter(pl.col("id") > 1).write("out", DeclaredSink())
    location = job.graph().nodes[1].location
    assert location.file == __file__
    assert location.line == test_transformation_knows_the_line_of_the_call.__code__.co_firstlineno + 2


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda s: s.filter(pl.col("id") > 1), "id int8, status text, amount numeric(12,2), token uuid"),
        (lambda s: s.select("token", "id"), "token uuid, id int8"),
        (lambda s: s.select(pl.col("token").alias("t"), key="id"), "t uuid, key int8"),
        (lambda s: s.select(pl.exclude("status")), "id int8, amount numeric(12,2), token uuid"),
        (lambda s: s.select("id", one=pl.lit(1, pl.Int16)), "id int8, one int2"),
        (lambda s: s.select(pl.col("amount") * 2), "amount numeric(38,2)"),
        (lambda s: s.select("status", schema={"status": "jsonb"}), "status jsonb"),
        (lambda s: s.select(pl.col("token").str.head(3)), "token uuid"),
        (lambda s: s.select("id").with_columns(pl.col("id").cast(pl.String), b=pl.col("id")), "id text, b int8"),
        (lambda s: s.select("id").with_columns(k=lambda row: 1, schema={"k": "int4[]"}), "id int8, k int4[]"),
        (lambda s: s.select("id", t=pl.time(1, 2, 3)), "id int8, t time"),
        (lambda s: s.select("id").map(lambda row: row), "id int8"),
        (lambda s: s.map(lambda row: {}, schema={"day": "date"}), "day date"),
        (lambda s: s.flat_map(lambda row: [], schema={"day": "date"}), "day date"),
        (lambda s: s.map_batches(lambda frame: frame.select("token", n=pl.len().cast(pl.Int64))), "token uuid, n int8"),
        (lambda s: s.map_batches(lambda frame: frame, schema={"x": "numeric(5,1)[]"}), "x numeric(5,1)[]"),
    ],
)
def test_output_schema_is_known_before_the_run(step: Callable[[Stream], Stream], expected: str) -> None:
    assert schema_after(step) == expected


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda s: s.filter(pl.col("x") > 1), 'filter: unable to find column "x"'),
        (lambda s: s.filter(pl.col("status") > 1), "filter: cannot compare string with numeric type (i32)"),
        (lambda s: s.filter(pl.col("id")), "filter: the predicate yields Int64, not one boolean"),
        (
            lambda s: s.filter(pl.col("id", "amount") > 1),
            "filter: the predicate yields Boolean, Boolean, not one boolean",
        ),
        (lambda s: s.filter("id > 1"), "filter: str is not a function"),
        (lambda s: s.select(), "select: no columns are given"),
        (lambda s: s.select(3), "select: 3 is not an expression"),
        (lambda s: s.select("nothing"), 'select: unable to find column "nothing"'),
        (
            lambda s: s.select(pl.col("id").cast(pl.Duration("us"))),
            "select: column \"id\" (Duration(time_unit='us')): Arrow type duration[us] has no exact PostgreSQL type;"
            " cast the column first",
        ),
        (lambda s: s.select("id", schema={"id": "int4"}), 'select: column "id" is int8, not int4 as declared'),
        (lambda s: s.select("id", schema={"x": "int4"}), 'select: schema declares "x", which is not yielded'),
        (lambda s: s.with_columns(), "with_columns: no columns are given"),
        (
            lambda s: s.with_columns(k=lambda row: 1),
            'with_columns: column "k" comes from a function and has no type',
        ),
        (lambda s: s.with_columns(k=3), "with_columns: int is not a function"),
        (lambda s: s.map(None), "map: NoneType is not a function"),
        (lambda s: s.map(pl.col("id")), "map: Expr is not a function"),
        (lambda s: s.flat_map(3), "flat_map: int is not a function"),
        (lambda s: s.map(len, schema={}), "map: schema: it has no columns"),
        (lambda s: s.union(s), "union: a stream is united with itself"),
        (
            lambda s: s.union(s.select("id", status=pl.lit(1), x="token")),
            'union: stream 2 differs from stream 1 in "status" (int4 instead of text), "amount" (missing), "token"'
            ' (missing), "x" (additional)',
        ),
        (
            lambda s: s.select("id", "status").union(s.select("status", "id")),
            "union: stream 2 differs from stream 1 in order (status, id instead of id, status)",
        ),
    ],
)
def test_mistake_is_found_before_the_run(step: Callable[[Stream], Stream], expected: str) -> None:
    assert problems_of(step) == [expected]


def test_every_wrong_type_of_a_declared_schema_is_found() -> None:
    found = problems_of(lambda s: s.map(dict, schema={"a": "inet", "b": "int8", "c": "nope"}))
    assert [problem.partition(" is not supported")[0] for problem in found] == [
        'map: column "a": column type "inet"',
        'map: column "c": column type "nope"',
    ]


def test_function_over_batches_must_return_a_frame() -> None:
    (found,) = problems_of(lambda s: s.map_batches(lambda frame: frame["id"]))  # type: ignore[arg-type,return-value]
    assert found.endswith("<lambda> returned Series for an empty frame")


def test_function_that_needs_rows_must_declare_its_columns() -> None:
    def first(frame: pl.DataFrame) -> pl.DataFrame:
        return pl.DataFrame({"x": [frame["id"][0] + 1]})

    (found,) = problems_of(lambda s: s.map_batches(first))
    assert found.startswith("map_batches: test_function_that_needs_rows_must_declare_its_columns.<locals>.first raised")


@pytest.mark.parametrize(
    "expression",
    [
        pl.col("id").max(),
        pl.col("id") - pl.col("id").mean(),
        pl.col("id").shift(1),
        pl.col("id").cum_sum(),
        pl.col("id").rank(),
        pl.col("id").sum().over("status"),
        pl.len(),
        pl.int_range(pl.len()),
        pl.col("status").fill_null(strategy="forward"),
        pl.col("id").is_duplicated(),
        pl.col("id").sample(fraction=1.0),
        pl.col("id").reverse(),
        pl.col("id").unique(),
        pl.all().first(),
    ],
)
def test_expression_over_several_rows_is_refused(expression: pl.Expr) -> None:
    (found,) = problems_of(lambda s: s.select(expression))
    assert found.endswith("does not look at one row at a time, so its result depends on batch borders")


@pytest.mark.parametrize(
    "expression",
    [
        pl.col("id") * 2 + 1,
        pl.lit("x"),
        pl.all(),
        pl.col("status").str.to_uppercase().str.strip_chars(),
        pl.when(pl.col("id") > 1).then(pl.lit("a")).otherwise(pl.col("status")),
        pl.coalesce("status", pl.lit("?")),
        pl.col("status").is_in(["a", "b"]),
        pl.concat_str("status", "token"),
        pl.concat_list("id", "id"),
        pl.col("status").str.split(",").list.get(0),
        pl.col("status").str.to_date("%Y-%m-%d"),
        pl.max_horizontal("id", pl.lit(3)),
        pl.col("status").replace({"a": "b"}),
        pl.col("id").map_elements(hash, return_dtype=pl.Int64),
    ],
)
def test_expression_over_single_rows_is_accepted(expression: pl.Expr) -> None:
    assert schema_after(lambda s: s.select(expression)) != ""


def test_uids_must_be_there_and_differ() -> None:
    job, orders = orders_job()
    orders.write("orders", DeclaredSink())
    orders.write("", DeclaredSink())
    orders.write(None, DeclaredSink())  # type: ignore[arg-type]
    orders.write(" x", DeclaredSink())
    orders.write("a\tb", DeclaredSink())
    found = problems(job)
    assert found[0].startswith('sink "orders": the uid "orders" is already used')
    assert found[1:] == [
        "sink: it has no uid",
        "sink: it has no uid",
        'sink " x": the uid is blank or has spaces around it',
        'sink "a\tb": the uid has control characters or more than 200 characters',
    ]


def test_uids_of_operators_must_be_there_and_differ() -> None:
    job, orders = orders_job()
    orders.deduplicate("orders", "id").write("out", DeclaredSink())
    orders.key_by("id").aggregate("out", rows=pl.len()).write("totals", DeclaredSink())
    orders.deduplicate("", "id").write("x", DeclaredSink())
    found = problems(job)
    assert found[0].startswith('deduplicate "orders": the uid "orders" is already used')
    assert found[1].startswith('aggregate "out": the uid "out" is already used')
    assert found[2] == "deduplicate: it has no uid"


@pytest.mark.parametrize("uid", ["etl-snapshots", "totals[0]", "a[12]"])
def test_uid_like_the_name_of_a_subtask_is_refused(uid: str) -> None:
    job, orders = orders_job()
    orders.deduplicate(uid, "id").write("out", DeclaredSink())
    assert problems(job) == [f'deduplicate "{uid}": the uid is like the name of a subtask']


@pytest.mark.parametrize("keys", [5, pl.col("id"), [pl.col("id")]])
def test_key_that_is_no_name_is_refused(keys: object) -> None:
    (problem,) = problems_of(lambda s: s.deduplicate("u", keys))  # type: ignore[arg-type]
    assert problem.endswith("is no name of a column")


def test_aggregation_of_results_is_refused() -> None:
    job, orders = orders_job()
    totals = orders.key_by("id", "status").aggregate("totals", rows=pl.len())
    totals.filter(pl.col("rows") > 1).key_by("status").aggregate("again", most=pl.col("rows").max()).write(
        "out", DeclaredSink()
    )
    assert problems(job) == [
        'aggregate "again": it would take each of the results of "totals" again whenever it changes'
    ]


def test_operators_with_state_are_nodes_of_their_own() -> None:
    job, orders = orders_job()
    orders.deduplicate("seen", ["id"]).filter(pl.col("id") > 1).write("out", DeclaredSink())
    graph = job.graph()
    assert [(node.uid, node.id) for node in graph.operators] == [("seen", "seen")]
    assert graph.consumers("seen") == ("filter-1",)


def test_stream_that_is_never_written_is_found() -> None:
    job, orders = orders_job()
    orders.filter(pl.col("id") > 1)
    orders.write("out", DeclaredSink())
    assert problems(job) == ["filter: its rows are never written"]


def test_empty_job_is_refused() -> None:
    assert problems(Job("nothing")) == ["job: it reads nothing", "job: it writes nothing"]


def test_wrong_objects_are_refused() -> None:
    job = Job("revenue")
    job.read("a", "data.csv").write("b", DeclaredSink())  # type: ignore[arg-type]
    job.read("c", DeclaredSource()).write("d", "table")  # type: ignore[arg-type]
    assert problems(job) == ['source "a": str is not a source', 'sink "d": str is not a sink']


def test_broken_source_schema_is_found() -> None:
    job = Job("revenue")
    job.read("a", DeclaredSource({"x": "inet"})).write("b", DeclaredSink())
    (found,) = problems(job)
    assert found.startswith('column "x": column type "inet" is not supported')


@pytest.mark.parametrize(
    ("event_time", "expected"),
    [
        (EventTime("at"), []),
        (EventTime("moment"), ["event time 'moment' is no column of it"]),
        (EventTime("name"), ['event time "name" is text, not a moment']),
        (
            EventTime("at", out_of_orderness=timedelta(seconds=-1), every=timedelta(0)),
            [
                "out_of_orderness=datetime.timedelta(days=-1, seconds=86399) is no timedelta of at least 0 and up to"
                " 366000 days",
                "every=datetime.timedelta(0) is no timedelta above 0 and up to 366000 days",
            ],
        ),
        (
            EventTime("at", future_skew=timedelta(days=366_001)),
            ["future_skew=datetime.timedelta(days=366001) is no timedelta of at least 0 and up to 366000 days"],
        ),
        (
            EventTime("at", idle_after=5),  # type: ignore[arg-type]
            ["idle_after=5 is no timedelta of at least 0 and up to 366000 days"],
        ),
        ("at", ["event_time is str"]),
    ],
)
def test_event_time_is_a_column_with_moments(event_time: EventTime, expected: list[str]) -> None:
    job = Job("revenue")
    source = DeclaredSource({"at": "timestamptz", "name": "text"})
    job.read("a", source, event_time=event_time).write("b", DeclaredSink())
    if expected:
        assert problems(job) == [f'source "a": {one}' for one in expected]
    else:
        assert job.graph().sources[0].event_time == event_time


def test_exclusive_target_belongs_to_one_sink() -> None:
    job, orders = orders_job()
    orders.write("a", DeclaredSink(target="totals"))
    orders.write("b", DeclaredSink(target="totals"))
    orders.write("c", DeclaredSink(target="totals", other_database="archive"))
    assert problems(job) == ['sink "b": sink "a" writes to totals as well']


def test_mistakes_are_not_repeated_downstream() -> None:
    assert len(problems_of(lambda s: s.select("x").filter(pl.col("y") > 1).map(lambda row: row))) == 1


def test_finding_names_place_and_columns() -> None:
    job, orders = orders_job()
    orders.filter(pl.col("x") > 1).write("out", DeclaredSink())
    with pytest.raises(ConfigurationError, match=r"filter at .*test_graph\.py:\d+: unable to find") as caught:
        job.graph()
    columns = ", ".join(f"{name} {type_}" for name, type_ in ORDERS.items())
    assert caught.value.findings[0].cure == f"correct the expression; the columns here are: {columns}"
