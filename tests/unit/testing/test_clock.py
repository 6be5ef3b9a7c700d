"""The clock in plays: it stands still but for what a script says."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from etl.event_time import microseconds_since_1970
from etl.job import Job
from etl.operators.keyed.deduplicate import DeduplicateOperator
from etl.testing import assert_same_result, checkpoint, crash, play, rows, wait
from sinks import PostgresTable, TwoPhaseCommitSink
from tests.support.declarations import DeclaredSource

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Hours after noon of the ticks of an operator to which every full hour is due."""
    told: list[int] = []

    def due(_operator: DeduplicateOperator) -> int:
        return microseconds_since_1970(NOON + HOUR * (len(told) + 1))

    def tick(_operator: DeduplicateOperator, now: int) -> Iterable[Any]:
        told.append((now - microseconds_since_1970(NOON)) // 3_600_000_000)
        return ()

    monkeypatch.setattr(DeduplicateOperator, "due", property(due))
    monkeypatch.setattr(DeduplicateOperator, "tick", tick)
    return told


def numbers_job() -> Job:
    job = Job("numbers")
    numbers = job.read("numbers", DeclaredSource({"n": "int8"}))
    numbers.deduplicate("seen", "n").write("sink", TwoPhaseCommitSink(PostgresTable("t")))
    return job


def test_clock_goes_on_by_what_is_waited_and_not_by_a_crash(ticks: list[int]) -> None:
    script = [rows("numbers", {"n": 1}), wait(HOUR / 2), checkpoint(), wait(HOUR / 2), crash(), wait(HOUR)]

    play(numbers_job(), script, now=NOON)

    assert ticks == [1, 2]


def test_what_was_due_several_times_is_done_at_once(ticks: list[int]) -> None:
    play(numbers_job(), [rows("numbers"), wait(3 * HOUR)], now=NOON)

    assert ticks == [3, 3, 3]


def test_clock_stays_at_its_place_when_it_is_played_otherwise(ticks: list[int]) -> None:
    script = [rows("numbers", {"n": 1}, {"n": 2}), wait(HOUR), rows("numbers", {"n": 1}, {"n": 3})]

    assert_same_result(numbers_job(), script, number=8, now=NOON)

    assert ticks == [1]
