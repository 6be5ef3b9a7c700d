"""Timers, time to live and rows in order of time in plays."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from etl import EventTime, Job, ValueState
from etl.testing import advance, assert_same_result, checkpoint, crash, drain, play, rows, wait
from etl.transformation import Row
from sinks import PostgresTable, TwoPhaseCommitSink
from tests.support.declarations import DeclaredSource

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def event(card: str, minute: int) -> Row:
    return {"card": card, "at": NOON + minute * MINUTE}


def noted(row: Row, state: Any) -> None:
    """Ask to be called ten minutes after the first event, by event time and by the clock."""
    if state.first.value is None:
        state.first.value = row["at"]
        state.timers.set(row["at"] + 10 * MINUTE)
        state.clock_timers.set(NOON + 10 * MINUTE)


def fired(timer: Any, state: Any) -> Iterator[Row]:
    yield {"card": timer.key["card"], "at": timer.moment, "by": "rows"}


def fired_by_clock(timer: Any, state: Any) -> Iterator[Row]:
    yield {"card": timer.key["card"], "at": timer.moment, "by": "clock"}


def timed_job() -> Job:
    job = Job("timers")
    events = job.read("events", DeclaredSource({"card": "text", "at": "timestamptz"}), event_time=EventTime("at"))
    events.key_by("card").process(
        "reminders",
        noted,
        state={"first": ValueState("timestamptz")},
        schema={"card": "text", "at": "timestamptz", "by": "text"},
        time="at",
        on_timer=fired,
        on_clock_timer=fired_by_clock,
    ).write("reminded", TwoPhaseCommitSink(PostgresTable("reminded")))
    return job


def test_timers_of_event_time_fire_by_rows_and_those_of_the_clock_by_waiting() -> None:
    script = [rows("events", event("a", 0)), checkpoint(), crash(), rows("events", event("b", 11)), wait(9 * MINUTE)]
    by_rows = {"card": "a", "at": NOON + 10 * MINUTE, "by": "rows"}
    by_clock = [{"card": card, "at": NOON + 10 * MINUTE, "by": "clock"} for card in "ab"]

    before = play(timed_job(), script, now=NOON)
    after = play(timed_job(), [*script, wait(MINUTE), crash()], now=NOON)

    assert before.output["reminded"] == [by_rows]
    assert sorted(after.output["reminded"], key=lambda row: (row["by"], row["card"])) == [*by_clock, by_rows]


def test_timers_are_a_part_of_the_state() -> None:
    moment = NOON + 10 * MINUTE

    state = play(timed_job(), [rows("events", event("a", 0)), crash()], now=NOON).state("reminders")

    assert state == {("a",): {"first": NOON, "timers": [moment], "clock_timers": [moment]}}


def test_timers_do_not_depend_on_how_rows_are_played() -> None:
    script = [
        rows("events", *(event(f"card-{number % 3}", number * 4) for number in range(9))),
        wait(11 * MINUTE),
        advance(NOON + 60 * MINUTE),
        rows("events", event("card-4", 70)),
        drain(),
    ]

    assert_same_result(timed_job(), script, number=12, now=NOON)


def test_state_is_forgotten_when_its_time_is_over() -> None:
    job = Job("ttl")
    events = job.read("events", DeclaredSource({"card": "text", "at": "timestamptz"}))
    events.deduplicate("seen", "card", ttl=10 * MINUTE).write("sink", TwoPhaseCommitSink(PostgresTable("t")))
    once, again = event("a", 0), event("a", 1)

    passed = play(job, [rows("events", once), wait(9 * MINUTE), checkpoint(), crash(), rows("events", again)])
    forgotten = play(job, [rows("events", once), checkpoint(), wait(10 * MINUTE), crash(), rows("events", again)])

    assert passed.output["sink"] == [once]
    assert forgotten.output["sink"] == [once, again]
