"""What is wrong with windows, and what their results promise."""

from __future__ import annotations

import datetime as dt
from datetime import timedelta
from typing import Any

import polars as pl
import pytest

from etl import Job, Session, Sliding, Tumbling
from etl.errors import ConfigurationError
from etl.event_time import EventTime
from etl.guarantee import guarantees_of
from etl.schema import Schema
from etl.sink import CheckpointMode
from etl.stream import ResultStream, Stream
from tests.support.declarations import DeclaredSink, DeclaredSource, DirectSink

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
HOURLY = Tumbling(HOUR)
COLUMNS = {"card": "text", "at": "timestamptz", "day": "date", "amount": "numeric(12,2)"}


def payments(job: Job, uid: str = "payments") -> Stream:
    return job.read(uid, DeclaredSource(COLUMNS), event_time=EventTime("at"))


def windowed(window: Any = HOURLY, *, keys: tuple[str, ...] = ("card",), time: Any = "at", **given: Any) -> Job:
    job = Job("windows")
    expressions = given.pop("expressions", {"total": pl.col("amount").sum()})
    result = payments(job).key_by(*keys).window(window, time=time, **given).aggregate("hourly", **expressions)
    result.write("out", DeclaredSink())
    return job


def problems(job: Job) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        job.graph()
    return [f"{finding.problem}; {finding.cure}" for finding in caught.value.findings]


def test_results_have_the_key_the_window_and_the_aggregates() -> None:
    expected = {"card": "text", "window_start": "timestamptz", "window_end": "timestamptz", "total": "numeric(38,2)"}
    assert windowed().graph().node("hourly").schema == Schema.declare(expected)
    days = windowed(Tumbling(timedelta(days=1)), time="day").graph().node("hourly").schema
    assert (days["window_start"].name, days["window_end"].name) == ("date", "date")


@pytest.mark.parametrize(
    "window, problem",
    [
        (Tumbling(timedelta(0)), "size=datetime.timedelta(0) is no timedelta above 0 and up to 366000 days"),
        (
            Tumbling(-HOUR),
            "size=datetime.timedelta(days=-1, seconds=82800) is no timedelta above 0 and up to 366000 days",
        ),
        (Tumbling(60), "size=60 is no timedelta above 0 and up to 366000 days"),  # type: ignore[arg-type]
        (Tumbling(timedelta.max), f"size={timedelta.max!r} is no timedelta above 0 and up to 366000 days"),
        (Tumbling(HOUR, offset=None), "offset=None is no timedelta of at most 366000 days"),  # type: ignore[arg-type]
        (Sliding(HOUR, every=2 * HOUR), "windows of 1:00:00 every 2:00:00 leave rows out between them"),
        (Sliding(HOUR, every=timedelta(seconds=1)), "a row would be in 3600 windows, more than 1000"),
        (
            Sliding(HOUR, every=timedelta(0)),
            "every=datetime.timedelta(0) is no timedelta above 0 and up to 366000 days",
        ),
        (Session(timedelta(0)), "gap=datetime.timedelta(0) is no timedelta above 0 and up to 366000 days"),
        (HOUR, "datetime.timedelta(seconds=3600) is no window"),
        (Tumbling, f"{Tumbling!r} is no window"),
    ],
)
def test_mistakes_in_windows_are_told(window: Any, problem: str) -> None:
    (found,) = problems(windowed(window))
    assert found.partition(";")[0] == problem


@pytest.mark.parametrize(
    "given, problem",
    [
        (
            {"lateness": -HOUR},
            "lateness=datetime.timedelta(days=-1, seconds=82800) is no timedelta from 0 to 366000 days",
        ),
        ({"lateness": 5}, "lateness=5 is no timedelta from 0 to 366000 days"),
        ({"emit": "update"}, "emit='update' is unknown; choose from close, checkpoint"),
        ({"emit": "never"}, "emit='never' is unknown; choose from close, checkpoint"),
        ({"time": "when"}, "event time 'when' is no column here"),
        ({"time": "amount"}, 'event time "amount" is numeric(12,2), not a moment'),
        ({"time": "day"}, '"day" is a date, and tumbling windows of 1:00:00 do not begin and end at midnight'),
        ({"expressions": {"window_end": pl.len()}}, 'column "window_end" is that of the window'),
        ({"expressions": {}}, "no columns are given"),
        ({"keys": ()}, "it has no key"),
    ],
)
def test_mistakes_beside_windows_are_told(given: dict[str, Any], problem: str) -> None:
    (found,) = problems(windowed(**given))
    assert found.startswith(problem)


def test_sessions_are_emitted_once() -> None:
    first = {"first": pl.col("amount").first()}
    assert problems(windowed(Session(HOUR), emit="checkpoint", lateness=HOUR, expressions=first)) == [
        'a session that has been emitted may become a part of another one, and its row would stay; choose emit="close"',
        "a late row may connect sessions that have been emitted, and their rows would stay; leave out lateness=…; a"
        " source may promise more out_of_orderness=… instead",
        'column "first": sessions merge, and which row came first is not kept; go by time, e.g.'
        ' pl.col(…).sort_by("at").first()',
    ]


def test_source_must_say_when_its_rows_happened() -> None:
    job = Job("windows")
    rows = job.read("payments", DeclaredSource(COLUMNS))
    rows.key_by("card").window(HOURLY, time="at").aggregate("hourly", rows=pl.len()).write("out", DeclaredSink())
    (problem,) = problems(job)
    assert problem.startswith('its rows come from source "payments", which does not say when they happened')


def days(hourly: ResultStream) -> None:
    daily = hourly.key_by("card").window(Tumbling(timedelta(days=1)), time="window_start")
    daily.aggregate("daily", total=pl.col("total").sum()).write("out", DeclaredSink())


def test_windows_of_windows_that_come_once() -> None:
    job = Job("windows")
    days(payments(job).key_by("card").window(HOURLY, time="at").aggregate("hourly", total=pl.col("amount").sum()))
    assert job.graph().node("daily").schema["total"].name == "numeric(38,2)"


@pytest.mark.parametrize("given", [{"emit": "checkpoint"}, {"lateness": dt.timedelta(minutes=1)}])
def test_results_that_come_again_are_not_aggregated(given: dict[str, Any]) -> None:
    job = Job("windows")
    hourly = payments(job).key_by("card").window(HOURLY, time="at", **given)
    days(hourly.aggregate("hourly", total=pl.col("amount").sum()))
    (problem,) = problems(job)
    assert problem.startswith('it would take each of the results of "hourly" again whenever it changes')


def test_late_rows_of_windows_that_come_again_may_be_aggregated() -> None:
    job = Job("windows")
    hourly = (
        payments(job).key_by("card").window(HOURLY, time="at", emit="checkpoint").aggregate("hourly", rows=pl.len())
    )
    hourly.write("out", DeclaredSink())
    hourly.late.key_by("card").aggregate("late", rows=pl.len()).write("late-out", DeclaredSink())
    assert job.graph().node("late").schema == Schema.declare({"card": "text", "rows": "int8"})


AGAIN = (
    '"hourly" emits a row again whenever it has changed: write it by card, window_start, or what stays depends on when'
    " checkpoints are taken"
)


@pytest.mark.parametrize(
    "given, comes_again", [({}, False), ({"emit": "checkpoint"}, True), ({"lateness": HOUR}, True)]
)
def test_guarantee_says_whether_rows_come_again(given: dict[str, Any], comes_again: bool) -> None:
    job = Job("windows")
    hourly = payments(job).key_by("card").window(HOURLY, time="at", **given).aggregate("hourly", rows=pl.len())
    hourly.write("out", DeclaredSink())
    hourly.late.write("late", DeclaredSink())
    results, late = guarantees_of(job.graph(), CheckpointMode.EXACTLY_ONCE)
    assert (AGAIN in results.reasons) is comes_again
    assert AGAIN not in late.reasons
    assert str(results.guarantee) == "exactly-once"


def test_guarantee_says_that_lateness_is_decided_by_arrival_behind_a_union() -> None:
    job = Job("windows")
    both = payments(job).union(payments(job, "refunds"))
    both.key_by("card").window(HOURLY, time="at").aggregate("hourly", rows=pl.len()).write("out", DirectSink())
    (found,) = guarantees_of(job.graph(), CheckpointMode.EXACTLY_ONCE)
    assert found.reasons[0] == (
        '"hourly" depends on the order in which rows of several inputs arrive: a replay may leave other rows beside'
        " those already visible"
    )


def test_description_names_windows() -> None:
    graph = windowed(Sliding(HOUR, timedelta(minutes=15), timedelta(minutes=5)), lateness=timedelta(minutes=1)).graph()
    assert graph.operators[0].transformation.describe() == (
        'aggregate by card: total=col("amount").sum() in sliding windows of 1:00:00 every 0:15:00 offset by 0:05:00 of'
        " at, up to 0:01:00 late"
    )
