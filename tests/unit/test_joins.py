"""What a declared join yields, and what is wrong with one that cannot be carried out."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import polars as pl
import pytest

from etl.errors import ConfigurationError
from etl.event_time import EventTime
from etl.graph import OperatorNode, TransformationNode
from etl.guarantee import Guarantee, guarantees_of
from etl.job import Job
from etl.runtime.plan import MAIN, plan_of
from etl.sink import CheckpointMode
from etl.stream import JoinStream, Stream
from sinks import PostgresLookup
from tests.support.declarations import DeclaredSink, DeclaredSource, IdempotentSink

ORDERS = {"id": "int8", "at": "timestamptz", "amount": "numeric(12,2)", "day": "date"}
PAYMENTS = {"order_id": "int8", "code": "text", "at": "timestamptz", "amount": "numeric(12,2)"}
SPAN: dict[str, Any] = {"lower": timedelta(0), "upper": timedelta(hours=1)}
Joining = Callable[[Stream, Stream], Stream]


def joined_job(join: Joining) -> Job:
    job = Job("paid")
    orders = job.read("orders", DeclaredSource(ORDERS), event_time=EventTime("at"))
    payments = job.read("payments", DeclaredSource(PAYMENTS), event_time=EventTime("at"))
    join(orders, payments).write("out", DeclaredSink())
    return job


def problems(job: Job) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        job.graph()
    return [re.sub(r" at \S+:\d+", "", f"{finding.subject}: {finding.problem}") for finding in caught.value.findings]


def interval(orders: Stream, payments: Stream, **changed: Any) -> JoinStream:
    left = orders.key_by(*changed.pop("left", ["id"]))
    right = payments.key_by(*changed.pop("right", ["order_id"]))
    return left.interval_join("paid", right, **{"time": "at", **SPAN, **changed})


def problems_of(**changed: Any) -> list[str]:
    found = problems(joined_job(lambda orders, payments: interval(orders, payments, **changed)))
    assert all(problem.startswith('interval join "paid": ') for problem in found)
    return [problem.removeprefix('interval join "paid": ') for problem in found]


def test_columns_of_the_right_follow_without_its_key_and_with_a_suffix_where_names_clash() -> None:
    graph = joined_job(interval).graph()
    assert str(graph.sinks[0].schema) == (
        "id int8, at timestamptz, amount numeric(12,2), day date, code text, at_right timestamptz,"
        " amount_right numeric(12,2)"
    )
    node = graph.node("paid")
    assert isinstance(node, OperatorNode)
    assert node.inputs == ("orders", "payments")
    described = "inner interval join by id = order_id: left.at + 0:00:00 <= right.at <= left.at + 1:00:00"
    assert node.transformation.describe() == described


def test_late_rows_have_the_columns_of_their_side() -> None:
    job = Job("paid")
    orders = job.read("orders", DeclaredSource(ORDERS), event_time=EventTime("at"))
    payments = job.read("payments", DeclaredSource(PAYMENTS), event_time=EventTime("at"))
    joined = interval(orders, payments)
    for name, stream in (("out", joined), ("left", joined.late), ("right", joined.late_right)):
        stream.write(name, DeclaredSink())
    assert joined.late_right is joined.late_right
    schemas = {sink.uid: sink.schema.names for sink in job.graph().sinks}
    assert schemas["left"] == tuple(ORDERS)
    assert schemas["right"] == tuple(PAYMENTS)


def test_stream_may_be_joined_with_itself() -> None:
    job = Job("self")
    orders = job.read("orders", DeclaredSource(ORDERS), event_time=EventTime("at"))
    interval(orders, orders, right=["id"]).write("out", DeclaredSink())
    assert job.graph().sinks[0].schema.names == (*ORDERS, "at_right", "amount_right", "day_right")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"lower": timedelta(2), "upper": timedelta(1)},
         ["no time lies between lower=2 days, 0:00:00 and upper=1 day, 0:00:00"]),
        ({"lower": 0, "upper": None}, ["lower=0 is no timedelta", "upper=None is no timedelta"]),
        ({"how": "outer"}, ["how='outer' is unknown here"]),
        ({"suffix": None}, ["suffix=None is no text"]),
        ({"suffix": ""}, ['both sides have a column "amount"', 'both sides have a column "at"']),
        ({"suffix": "x" * 60}, ['column "amount' + "x" * 60 + '": the name has 66 bytes, PostgreSQL allows 1 to 63']),
        ({"time": ("at", "paid_at")}, ["event time 'paid_at' is no column here"]),
        ({"time": ("amount", "at")}, ['"amount" is numeric(12,2), "at" of the right is timestamptz']),
        ({"time": ("day", "at")}, ['"day" is date, "at" of the right is timestamptz']),
        ({"time": "amount"}, ['event time "amount" is numeric(12,2), not a moment'] * 2),
        ({"time": 7}, ["time=(7, 7) is not two names of columns"]),
        ({"time": ("at",)}, ["time=('at',) is not two names of columns"]),
        ({"right": ["code"]}, ['key column "id" is int8, "code" of the right is text']),
        ({"right": ["order_id", "code"]}, ["the left is keyed by 1 column(s), the right by 2"]),
        ({"left": ["no"], "right": []}, ["left side: key column 'no' is not there", "right side: it has no key"]),
        ({"parallelism": 200}, ["parallelism 200 is not 1 to 128"]),
    ],
)  # fmt: skip
def test_wrong_declaration_is_told(changed: dict[str, Any], expected: list[str]) -> None:
    assert problems_of(**changed) == expected


def test_both_sides_must_say_when_their_rows_happened() -> None:
    job = Job("paid")
    orders = job.read("orders", DeclaredSource(ORDERS))
    payments = job.read("payments", DeclaredSource(PAYMENTS))
    interval(orders, payments).write("out", DeclaredSink())
    assert problems(job) == [
        f'interval join "paid": its rows come from source "{uid}", which does not say when they happened'
        for uid in ("orders", "payments")
    ]


@pytest.mark.parametrize("right", [None, "stream", "other job"])
def test_right_must_be_a_keyed_stream_of_the_same_job(right: str | None) -> None:
    job = Job("paid")
    orders = job.read("orders", DeclaredSource(ORDERS))
    given: Any = {
        None: None,
        "stream": orders,
        "other job": Job("other").read("orders", DeclaredSource(ORDERS)).key_by("id"),
    }[right]
    with pytest.raises(ConfigurationError, match=r"interval_join at .*is not a keyed stream of Job\('paid'\)"):
        orders.key_by("id").interval_join("paid", given, time="at", **SPAN)


def test_results_that_are_emitted_again_are_not_joined() -> None:
    def join(orders: Stream, payments: Stream) -> Stream:
        totals = payments.key_by("order_id").aggregate("totals", at=pl.col("at").max())
        return interval(orders, totals)

    assert problems(joined_job(join)) == [
        'interval join "paid": it would take each of the results of "totals" again whenever it changes'
    ]


def test_as_of_join_has_the_columns_of_the_left_then_those_of_the_version() -> None:
    def join(orders: Stream, payments: Stream) -> Stream:
        return orders.key_by("id").as_of_join("rated", payments.key_by("order_id"), time="at", how="left")

    graph = joined_job(join).graph()
    names = (*ORDERS, "code", "at_right", "amount_right")
    assert graph.sinks[0].schema.names == names
    node = graph.node("rated")
    assert isinstance(node, OperatorNode)
    described = "left as-of join by id = order_id: the latest right.at <= left.at"
    assert node.transformation.describe() == described


def test_versions_without_a_row_never_come_out() -> None:
    def join(orders: Stream, payments: Stream) -> Stream:
        return orders.key_by("id").as_of_join("rated", payments.key_by("order_id"), time="at", how="full")

    assert problems(joined_job(join)) == ["as-of join \"rated\": how='full' is unknown here"]


CUSTOMERS = PostgresLookup("customers", key="id", columns={"id": "int8", "name": "text", "amount": "numeric(12,2)"})


def lookup(orders: Stream, **changed: Any) -> Stream:
    return orders.lookup_join("named", **{"lookup": CUSTOMERS, "on": "id", **changed})


def test_lookup_adds_the_columns_of_the_table_but_its_key() -> None:
    job = Job("named")
    lookup(job.read("orders", DeclaredSource(ORDERS))).write("out", DeclaredSink())
    graph = job.graph()
    assert graph.sinks[0].schema.names == (*ORDERS, "name", "amount_right")
    node = graph.node("named")
    assert isinstance(node, TransformationNode)
    described = "left lookup join by id = id in table public.customers, remembered for 0:10:00"
    assert node.transformation.describe() == described
    assert [one.uid for one in graph.lookups] == ["named"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"lookup": "customers"}, ["str is no lookup"]),
        ({"on": "no"}, ["column 'no' of on= is not there"]),
        ({"on": ["id", "amount"]}, ["on=['id', 'amount'] has 2 column(s), the key of the table 1"]),
        ({"on": "amount"}, ['column "amount" is numeric(12,2), "id" of the table is declared int8']),
        ({"how": "full"}, ["how='full' is unknown here"]),
        ({"suffix": ""}, ['both sides have a column "amount"']),
        ({"cache_rows": 0, "cache_ttl": 10},
         ["cache_rows=0 is no number of at least 1", "cache_ttl=10 is no timedelta of at least 0"]),
        ({"cache_ttl": -timedelta(1)}, ["cache_ttl=datetime.timedelta(days=-1) is no timedelta of at least 0"]),
    ],
)  # fmt: skip
def test_wrong_lookup_is_told(changed: dict[str, Any], expected: list[str]) -> None:
    job = Job("named")
    lookup(job.read("orders", DeclaredSource(ORDERS)), **changed).write("out", DeclaredSink())
    assert problems(job) == [f'lookup join "named": {problem}' for problem in expected]


def test_uid_of_a_lookup_is_its_own() -> None:
    job = Job("named")
    lookup(job.read("orders", DeclaredSource(ORDERS))).write("named", DeclaredSink())
    assert problems(job) == ['sink "named": the uid "named" is already used']


def test_lookup_has_a_thread_of_its_own_in_the_main_process() -> None:
    job = Job("named")
    orders = job.read("orders", DeclaredSource(ORDERS)).map(lambda row: row)
    named = lookup(orders).map(lambda row: row).filter(lambda row: True)
    named.write("out", DeclaredSink())
    plan = plan_of(job.graph(), workers=2)
    assert [chain.id for chain in plan.chains] == ["map-1", "named", "filter-1"]
    assert plan.places == {"map-1": (1,), "named": (MAIN,), "filter-1": (2,)}


def test_lookup_may_find_something_else_on_a_replay() -> None:
    for sink, guarantee in ((DeclaredSink(), Guarantee.EXACTLY_ONCE), (IdempotentSink(), Guarantee.AT_LEAST_ONCE)):
        job = Job("named")
        lookup(job.read("orders", DeclaredSource(ORDERS))).write("out", sink)
        (promise,) = guarantees_of(job.graph(), CheckpointMode.EXACTLY_ONCE)
        assert promise.guarantee is guarantee
        assert any('"named" is not deterministic' in reason for reason in promise.reasons)


@pytest.mark.parametrize("sink", [DeclaredSink(), IdempotentSink()])
def test_which_row_is_late_depends_on_what_arrives_first(sink: DeclaredSink) -> None:
    job = Job("paid")
    orders = job.read("orders", DeclaredSource(ORDERS), event_time=EventTime("at"))
    payments = job.read("payments", DeclaredSource(PAYMENTS), event_time=EventTime("at"))
    interval(orders, payments).write("out", sink)
    (promise,) = guarantees_of(job.graph(), CheckpointMode.EXACTLY_ONCE)
    shows_early = isinstance(sink, IdempotentSink)
    assert promise.guarantee is (Guarantee.AT_LEAST_ONCE if shows_early else Guarantee.EXACTLY_ONCE)
    assert any("in which rows of several inputs arrive" in reason for reason in promise.reasons) is shows_early
