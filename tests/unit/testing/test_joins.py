"""Joins in plays: rows that wait for partners, and those that come too late."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest

from etl.errors import ConfigurationError
from etl.event_time import EventTime
from etl.job import Job
from etl.lookup import Lookup
from etl.testing import advance, assert_same_result, checkpoint, crash, drain, play, rows
from etl.window import Tumbling
from sinks import PostgresLookup, PostgresTable, TwoPhaseCommitSink
from tests.support.declarations import DeclaredSource
from tests.unit.operators.keyed.test_lookup_join import Dictionary


def at(minute: int) -> datetime:
    return datetime(2024, 5, 1, 12, tzinfo=UTC) + timedelta(minutes=minute)


def order(number: int, minute: int) -> dict[str, Any]:
    return {"id": number, "at": at(minute)}


def payment(number: int, minute: int, cents: int = 0) -> dict[str, Any]:
    return {"order_id": number, "paid_at": at(minute), "cents": cents}


def paid_job() -> Job:
    """Orders with their payments within an hour."""
    job = Job("paid")
    orders = job.read("orders", DeclaredSource({"id": "int8", "at": "timestamptz"}), event_time=EventTime("at"))
    payments = job.read(
        "payments",
        DeclaredSource({"order_id": "int8", "paid_at": "timestamptz", "cents": "int8"}),
        event_time=EventTime("paid_at"),
    )
    paid = orders.key_by("id").interval_join(
        "pairs",
        payments.key_by("order_id"),
        time=("at", "paid_at"),
        lower=timedelta(0),
        upper=timedelta(hours=1),
        how="left",
    )
    paid.write("paid", TwoPhaseCommitSink(PostgresTable("paid")))
    paid.late.write("late_orders", TwoPhaseCommitSink(PostgresTable("late_orders")))
    paid.late_right.write("late_payments", TwoPhaseCommitSink(PostgresTable("late_payments")))
    return job


@pytest.mark.parametrize("parallelism", [1, 3])
def test_rows_wait_for_partners_also_over_a_crash(parallelism: int) -> None:
    script = [
        rows("orders", order(1, 0), order(2, 5)),
        rows("payments", payment(3, 10, 9)),
        checkpoint(),
        crash(),
        rows("payments", payment(1, 20, 1), payment(1, 30, 2)),
    ]

    result = play(paid_job(), script, parallelism=parallelism)

    pairs = [(row["id"], row["paid_at"], row["cents"]) for row in result.output["paid"]]
    assert pairs == [(1, at(20), 1), (1, at(30), 2)]
    assert result.state("pairs") == {
        (1,): {"left": [{"at": at(0)}], "right": [{"paid_at": at(20), "cents": 1}, {"paid_at": at(30), "cents": 2}]},
        (2,): {"left": [{"at": at(5)}]},
        (3,): {"right": [{"paid_at": at(10), "cents": 9}]},
    }


def test_orders_without_payment_come_when_their_hour_is_over() -> None:
    script = [rows("orders", order(1, 0)), rows("payments"), advance(at(61)), checkpoint(), crash()]

    result = play(paid_job(), [*script, rows("orders", order(2, 60)), rows("payments", payment(1, 59))])

    assert result.output["paid"] == [{**order(1, 0), "paid_at": None, "cents": None}]
    assert result.output["late_orders"] == [order(2, 60)]
    assert result.output["late_payments"] == [payment(1, 59)]
    assert result.late_rows("pairs") == 2
    assert result.state("pairs") == {}


def test_pairs_do_not_depend_on_how_rows_are_played() -> None:
    script = [
        rows("orders", *(order(number, number * 7) for number in range(8))),
        rows("payments", *(payment(number % 5, number * 9, number) for number in range(12))),
        advance(at(100)),
        rows("orders", order(1, 99), order(2, 120)),
        drain(),
    ]

    assert_same_result(paid_job(), script, number=15)


def named_job(lookup: Lookup) -> Job:
    job = Job("named")
    orders = job.read("orders", DeclaredSource({"id": "int8", "k": "text", "part": "float8"}))
    orders.lookup_join("named", lookup, on=["k", "part"]).write("out", TwoPhaseCommitSink(PostgresTable("out")))
    return job


def test_lookup_that_holds_its_rows_is_played() -> None:
    found = {("a", 0.5): ("Ada", 1)}
    result = play(named_job(Dictionary(found)), [rows("orders", *({"id": 1, "k": k, "part": 0.5} for k in "ab"))])
    assert [(row["k"], row["name"], row["n"]) for row in result.output["out"]] == [("a", "Ada", 1), ("b", None, None)]


def test_lookup_that_asks_a_database_is_refused() -> None:
    lookup = PostgresLookup("customers", key=["k", "part"], columns={"k": "text", "part": "float8", "name": "text"})
    with pytest.raises(ConfigurationError, match='lookup join "named" asks a database, and a play opens none'):
        play(named_job(lookup), [rows("orders", {"id": 1, "k": "a", "part": 0.5})])


@pytest.mark.parametrize("time", ["at", "paid_at"])
def test_no_pair_is_late_for_a_window_behind_the_join(time: str) -> None:
    """Payments before and after their orders: each row of a pair may have happened long before the pair comes out."""
    job = Job("hourly")
    orders = job.read("orders", DeclaredSource({"id": "int8", "at": "timestamptz"}), event_time=EventTime("at"))
    paid = {"order_id": "int8", "paid_at": "timestamptz", "cents": "int8"}
    payments = job.read("payments", DeclaredSource(paid), event_time=EventTime("paid_at"))
    pairs = orders.key_by("id").interval_join(
        "pairs",
        payments.key_by("order_id"),
        time=("at", "paid_at"),
        lower=-timedelta(minutes=30),
        upper=timedelta(hours=1),
    )
    by_id = pairs.key_by("id").window(Tumbling(timedelta(minutes=10)), time=time)
    hourly = by_id.aggregate("windows", cents=pl.col("cents").sum())
    hourly.write("out", TwoPhaseCommitSink(PostgresTable("out")))
    script = [mark for minute in range(0, 200, 5) for mark in (
        rows("orders", order(minute % 3, minute)),
        rows("payments", payment(minute % 3, minute, minute), payment((minute + 1) % 3, minute, 1000)),
    )]  # fmt: skip
    result = play(job, [*script, drain()])
    expected: dict[tuple[int, datetime], int] = {}
    for minute in range(0, 200, 5):
        for paid_minute in range(max(0, minute - 30), min(195, minute + 60) + 1, 5):
            for key, cents in ((paid_minute % 3, paid_minute), ((paid_minute + 1) % 3, 1000)):
                if key == minute % 3:
                    window = (key, at((minute if time == "at" else paid_minute) // 10 * 10))
                    expected[window] = expected.get(window, 0) + cents
    found = {(row["id"], row["window_start"]): row["cents"] for row in result.output["out"]}
    assert found == expected
    assert len(result.output["out"]) == len(expected)
    assert (result.late_rows("pairs"), result.late_rows("windows")) == (0, 0)


def test_batches_checkpoints_and_crashes_make_no_difference_to_versions() -> None:
    job = Job("rated")
    orders = job.read("orders", DeclaredSource({"id": "int8", "at": "timestamptz"}), event_time=EventTime("at"))
    rate = {"key": "int8", "from": "timestamptz", "rate": "int4"}
    rates = job.read("rates", DeclaredSource(rate), event_time=EventTime("from"))
    rated = orders.key_by("id").as_of_join("rated", rates.key_by("key"), time=("at", "from"), how="left")
    rated.write("out", TwoPhaseCommitSink(PostgresTable("rated")))
    assert_same_result(job, [
        rows("orders", *(order(number % 3, number) for number in range(0, 60, 2))),
        rows("rates", *({"key": number % 4, "from": at(number), "rate": number} for number in range(0, 60, 3))),
    ])  # fmt: skip
