"""What a crash test does when it cannot go on: no time, no patience, no process."""

from __future__ import annotations

import threading
from pathlib import Path

import psycopg
import pytest

from etl.clock import SystemClock
from etl.errors import InternalError
from etl.testing.chaos import ChaosOptions, ChaosPlan, ChaosStoppedError, JobLoader, StopRequest, crash_test
from etl.testing.chaos.report import ChaosStatus
from tests.integration.chaos import jobs


def plan_of(store_url: str, name: str) -> ChaosPlan:
    return ChaosPlan(getattr(jobs, name)(), JobLoader(jobs.__name__, name), store_url)


def assert_nothing_left(url: str) -> None:
    with psycopg.connect(url) as connection:
        schemas = "SELECT count(*) FROM pg_namespace WHERE starts_with(nspname, 'etl_chaos_')"
        assert connection.execute(schemas).fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM etl.job").fetchone() == (0,)


class TurnedClock(SystemClock):
    """Time as it is, and as much more as is wanted."""

    more_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.more_s


def test_kills_that_there_is_no_time_for_are_told_and_not_ok(store_url: str) -> None:
    clock = TurnedClock()
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if "kills to come" in line:
            clock.more_s = 601.0

    report = crash_test(plan_of(store_url, "numbers"), ChaosOptions(minutes=10), tell, clock=clock)

    assert (report.status, report.kills, report.exit_code) == (ChaosStatus.INCOMPLETE, 0, 1)
    assert len(report.untried) == int(told[-1].split()[0]) > 0
    assert {str(report.cell(step, "numbers")) for step in report.steps} == {"not tried"}
    assert_nothing_left(store_url)


def test_job_that_does_not_end_is_killed_when_the_time_is_over(store_url: str) -> None:
    with pytest.raises(InternalError, match="the first undisturbed run: not ended within"):
        crash_test(plan_of(store_url, "endless"), ChaosOptions(minutes=0.05))

    assert_nothing_left(store_url)


def test_request_to_stop_ends_a_run_that_does_not_end_by_itself(store_url: str, tmp_path: Path) -> None:
    flag, stop = tmp_path / "flag", StopRequest()
    arguments = (str(flag),)
    plan = ChaosPlan(jobs.waiting(*arguments), JobLoader(jobs.__name__, "waiting", arguments), store_url)

    def tell(line: str) -> None:
        assert line.startswith("first undisturbed run")
        flag.touch()
        # Set when the second run has come to where it stands still, which is in nobody's way.
        threading.Timer(1.0, stop.set).start()

    with pytest.raises(ChaosStoppedError):
        crash_test(plan, ChaosOptions(), tell, stop)

    assert_nothing_left(store_url)


def test_process_that_ends_without_a_word_is_told(store_url: str) -> None:
    told = r"the first undisturbed run failed: the run ended without a word, by exit code 3"
    with pytest.raises(InternalError, match=told):
        crash_test(plan_of(store_url, "failing"), ChaosOptions())

    assert_nothing_left(store_url)
