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
