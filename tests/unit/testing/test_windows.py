"""Windows and sessions come to the same however their input is played, late rows included."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal
from typing import Any

import polars as pl
import pytest

from etl import EventTime, Job, Session, Sliding, Tumbling
from etl.testing import assert_same_result, drain, play, rows
from sinks import PostgresTable, TwoPhaseCommitSink, UpsertSink
from tests.support.declarations import DeclaredSource

COLUMNS = {"id": "int8", "card": "text", "at": "timestamp", "amount": "numeric(12,2)"}
NOON = dt.datetime(2024, 5, 17, 12)
MINUTE = dt.timedelta(minutes=1)
PROMISE = 3 * MINUTE


def payments_job(window: Any, **given: Any) -> Job:
    job = Job("windows", parallelism=2)
    payments = job.read("payments", DeclaredSource(COLUMNS), event_time=EventTime("at", out_of_orderness=PROMISE))
    total, count, first = pl.col("amount").sum(), pl.len(), pl.col("id").sort_by("at").first()
    windowed = payments.key_by("card").window(window, time="at", **given)
    totals = windowed.aggregate("totals", total=total, payments=count, first=first)
    if given:
        totals.write("out", UpsertSink(PostgresTable("totals", key=["card", "window_start"])))
    else:
        totals.write("out", TwoPhaseCommitSink(PostgresTable("totals")))
    totals.late.write("late", TwoPhaseCommitSink(PostgresTable("late")))
    return job


def payment(number: int, card: str | None, at: dt.datetime) -> dict[str, Any]:
    return {"id": number, "card": card, "at": at, "amount": Decimal(number)}


def script(count: int, seed: int) -> list[Any]:
    """Rows in disorder; of some of them more than was promised."""
    chance, now, marks = random.Random(seed), NOON, []
    for number in range(count):
        now += chance.randint(0, 90) * dt.timedelta(seconds=1)
        behind = chance.choice([0, 1, 2, 3, 3, 7, 40]) * MINUTE
        marks.append(rows("payments", payment(number, chance.choice(["a", "b", "c", None]), now - behind)))
    return [*marks, drain()]


def test_windows_of_windows_have_all_rows() -> None:
    """A result comes before the watermark that has closed it, so it is in time for the window that it is a part of."""
    job = Job("days", parallelism=2)
    payments = job.read("payments", DeclaredSource(COLUMNS), event_time=EventTime("at", out_of_orderness=PROMISE))
    short = payments.key_by("card").window(Tumbling(5 * MINUTE), time="at").aggregate("short", payments=pl.len())
    long = short.key_by("card").window(Tumbling(15 * MINUTE), time="window_start")
    totals = long.aggregate("long", payments=pl.col("payments").sum(), windows=pl.len())
    totals.write("out", TwoPhaseCommitSink(PostgresTable("totals")))
    totals.late.write("late", TwoPhaseCommitSink(PostgresTable("late")))
    moments = [("ab"[number % 3 % 2], NOON + number * MINUTE - number % 4 * MINUTE) for number in range(60)]
    marks = [rows("payments", payment(number, card, at)) for number, (card, at) in enumerate(moments)]

    result = play(job, [*marks, drain()])

    expected: dict[Any, list[dt.datetime]] = {}
    for card, at in moments:
        start = dt.datetime.min + (at - dt.datetime.min) // (15 * MINUTE) * (15 * MINUTE)
        expected.setdefault((card, start), []).append(at)
    assert {(row["card"], row["window_start"]): (row["payments"], row["windows"]) for row in result.output["out"]} == {
        key: (len(found), len({at.minute // 5 for at in found})) for key, found in expected.items()
    }
    assert len(result.output["out"]) == len(expected)
    assert (result.late_rows("short"), result.late_rows("long")) == (0, 0)
    assert_same_result(job, [*marks, drain()], number=10)


@pytest.mark.parametrize(
    "window, given",
    [
        (Tumbling(10 * MINUTE), {}),
        (Tumbling(10 * MINUTE), {"lateness": 5 * MINUTE}),
        (Sliding(10 * MINUTE, 5 * MINUTE), {"lateness": 5 * MINUTE, "emit": "checkpoint"}),
        (Session(2 * MINUTE), {}),
    ],
    ids=["tumbling", "late", "sliding", "sessions"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_windows_come_to_the_same(window: Any, given: dict[str, Any], seed: int) -> None:
    job, played = payments_job(window, **given), script(60, seed)
    result = play(job, played)
    assert result.late_rows("totals") > 0
    assert len(result.output["out"]) > 5
    assert_same_result(job, played, number=15, seed=seed)
