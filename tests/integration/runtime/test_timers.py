"""Functions that go by time over runs of cron: in order, with timers; also when runs are killed."""

from __future__ import annotations

import datetime as dt
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from etl import CheckpointPolicy, EventTime, Job, Timer, ValueState
from etl.clock import SystemClock
from etl.errors import RecordError
from etl.runtime.run import RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.telemetry import Event, Telemetry
from etl.sources import CsvFiles
from etl.store.database import Database
from sinks import PostgresTable, TwoPhaseCommitSink

CHECKOUT = Path(__file__).parents[3]
START = dt.datetime(2024, 3, 9, 22, 0, tzinfo=dt.UTC)
PROMISE = dt.timedelta(minutes=2)
SILENCE, TTL = dt.timedelta(minutes=5), dt.timedelta(minutes=12)
CALL = {"id": "int8", "device": "text", "at": "timestamptz"}
RESULT = {"device": "text", "at": "timestamptz", "id": "int8", "calls": "int8"}

Call = tuple[int, str, dt.datetime]
Result = tuple[str, dt.datetime, int | None, int | None]


def on_call(call: dict[str, Any], state: Any) -> Iterator[dict[str, Any]]:
    """Counts calls, and asks to be told of a silence."""
    state.calls.value = (state.calls.value or 0) + 1
    state.timers.clear()
    state.timers.set(call["at"] + SILENCE)
    yield {"device": call["device"], "at": call["at"], "id": call["id"], "calls": state.calls.value}


def on_silence(timer: Timer, state: Any) -> Iterator[dict[str, Any]]:
    """A silence after fewer than four calls is told twice."""
    yield {"device": timer.key["device"], "at": timer.moment, "id": None, "calls": state.calls.value}
    if (state.calls.value or 4) < 4:
        state.calls.value = 4
        state.timers.set(timer.moment + SILENCE)


def job_of(directory: Path, parallelism: int) -> Job:
    job = Job("calls", checkpoint=CheckpointPolicy(interval_s=60.0, rows=40), parallelism=parallelism)
    calls = job.read(
        "calls",
        CsvFiles(str(directory / "*.csv"), CALL, batch_rows=13),
        event_time=EventTime("at", out_of_orderness=PROMISE, in_sequence=True),
    )
    results = calls.key_by("device").process(
        "silences",
        on_call,
        state={"calls": ValueState("int8")},
        schema=RESULT,
        time="at",
        in_order=True,
        on_timer=on_silence,
        ttl=TTL,
    )
    results.write("results", TwoPhaseCommitSink(PostgresTable("results", create=True)))
    results.late.write("late", TwoPhaseCommitSink(PostgresTable("late", create=True)))
    firsts = calls.deduplicate("hourly", "device", ttl=TTL, time="at")
    firsts.write("firsts", TwoPhaseCommitSink(PostgresTable("firsts", create=True)))
    return job


@dataclass
class Log:
    """Calls of devices, one file after the other; some of them come later than promised."""

    directory: Path
    random: random.Random = field(default_factory=lambda: random.Random(11))
    now: dt.datetime = START
    in_time: list[Call] = field(default_factory=list)
    late: list[Call] = field(default_factory=list)
    files: int = 0

    def write(self, rows: int, *, late: int = 0) -> None:
        late_at = set(self.random.sample(range(1, rows), late))
        calls = [self._call(is_late=number in late_at) for number in range(rows)]
        self.files += 1
        lines = [f"{id_},{device},{at.isoformat()}" for id_, device, at in calls]
        (self.directory / f"log-{self.files}.csv").write_text("\n".join(["id,device,at", *lines, ""]), "utf-8")

    def _call(self, *, is_late: bool) -> Call:
        self.now += dt.timedelta(seconds=self.random.randint(0, 90))
        behind = dt.timedelta(days=1) if is_late else dt.timedelta(seconds=self.random.randint(0, 120))
        call = (len(self.in_time) + len(self.late), self.random.choice("abcdef"), self.now - behind)
        (self.late if is_late else self.in_time).append(call)
        return call

    @property
    def watermark(self) -> dt.datetime:
        return max(at for _, _, at in self.in_time) - PROMISE


def expected(calls: list[Call], until: dt.datetime | None) -> list[Result]:
    """What comes of all calls and silences before a moment, device by device."""
    found = list[Result]()
    end = until or dt.datetime.max.replace(tzinfo=dt.UTC)
    for device in {device for _, device, _ in calls}:
        count: int | None = None
        written, silence = START - TTL, end
        for id_, _, at in [
            *sorted((one for one in calls if one[1] == device), key=lambda one: one[2]),
            (None, None, end),
        ]:
            while silence <= min(at, end) and silence < dt.datetime.max.replace(tzinfo=dt.UTC):
                moment, silence = silence, dt.datetime.max.replace(tzinfo=dt.UTC)
                count = None if moment - written >= TTL else count
                found.append((device, moment, None, count))
                if (count or 4) < 4:
                    count, written, silence = 4, moment, moment + SILENCE
            if id_ is None or at >= end:
                break
            count = 1 if count is None or at - written >= TTL else count + 1
            written, silence = at, at + SILENCE
            found.append((device, at, id_, count))
    return sorted(found, key=str)


def expected_firsts(calls: list[Call]) -> list[Call]:
    passed = list[Call]()
    for call in calls:
        if not any(one[1] == call[1] and abs(one[2] - call[2]) < TTL for one in passed):
            passed.append(call)
    return passed


def run(
    url: str,
    job: Job,
    *,
    drain: bool = False,
    stop_at: tuple[str, int] | None = None,
    kill: bool = False,
    clock: Any = None,
) -> int:
    seen = 0

    def listen(event: Event) -> None:
        nonlocal seen
        if stop_at is not None and event.name == stop_at[0]:
            seen += 1
            if seen == stop_at[1]:
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RecordError("stopped")

    telemetry = Telemetry()
    telemetry.subscribe(listen)
    options = RunOptions(warn=print, drain=drain, clock=clock or SystemClock())
    summary = run_job(job, Database(url, "store"), {}, options, telemetry, StopSignal())
    assert summary.error in (None, "stopped")
    return summary.exit_code


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        return connection.execute(statement.encode()).fetchall()


def check(url: str, log: Log, *, until: dt.datetime | None) -> None:
    found = query(url, "SELECT device, at, id, calls FROM results")
    assert sorted(found, key=str) == expected(log.in_time, until)
    assert query(url, "SELECT id, device, at FROM late ORDER BY id") == log.late
    assert query(url, "SELECT id, device, at FROM firsts ORDER BY id") == expected_firsts(log.in_time)


@pytest.mark.parametrize("parallelism", [(1,), (1, 4, 3)])
def test_silences_are_told_from_run_to_run(store_url: str, tmp_path: Path, parallelism: tuple[int, ...]) -> None:
    log = Log(tmp_path)
    for number in range(4):
        log.write(90, late=2)
        for _ in range(2):
            assert run(store_url, job_of(tmp_path, parallelism[number % len(parallelism)])) == 0
            check(store_url, log, until=log.watermark.replace(microsecond=0))
    assert run(store_url, job_of(tmp_path, 2), drain=True) == 0
    check(store_url, log, until=None)


@pytest.mark.parametrize("step", ["state.snapshotted", "sink.prepared", "checkpoint.recorded", "checkpoint.completed"])
def test_a_run_that_failed_tells_nothing_twice(store_url: str, tmp_path: Path, step: str) -> None:
    log = Log(tmp_path)
    log.write(200, late=3)
    assert run(store_url, job_of(tmp_path, 2), stop_at=(step, 3)) == 65
    assert run(store_url, job_of(tmp_path, 3)) == 0
    check(store_url, log, until=log.watermark.replace(microsecond=0))


def killed(url: str, directory: str, step: str, occurrence: str) -> None:
    """The body of a process that kills itself at a step."""
    run(url, job_of(Path(directory), 2), stop_at=(step, int(occurrence)), kill=True)


@pytest.mark.parametrize("step, occurrence", [("source.barrier", 3), ("checkpoint.recorded", 4), ("commit.begin", 3)])
def test_a_run_that_was_killed_is_gone_on_with(store_url: str, tmp_path: Path, step: str, occurrence: int) -> None:
    log = Log(tmp_path)
    log.write(200, late=3)
    script = f"from {__name__} import killed; import sys; killed(*sys.argv[1:])"
    command = [sys.executable, "-c", script, store_url, str(tmp_path), step, str(occurrence)]
    ended = subprocess.run(command, cwd=CHECKOUT, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert run(store_url, job_of(tmp_path, 1), drain=True) == 0
    check(store_url, log, until=None)


class LaterClock(SystemClock):
    def now(self) -> dt.datetime:
        return super().now() + dt.timedelta(days=2)


def test_timers_of_the_clock_fire_in_the_run_that_comes_after_their_moment(store_url: str, tmp_path: Path) -> None:
    def tomorrow(call: dict[str, Any], state: Any) -> None:
        state.id.value = call["id"]
        state.clock_timers.set(dt.datetime.now(dt.UTC) + dt.timedelta(days=1))

    def remind(timer: Timer, state: Any) -> Iterator[dict[str, Any]]:
        yield {"device": timer.key["device"], "id": state.id.value}
        state.id.clear()

    def job() -> Job:
        job = Job("reminders", parallelism=2)
        calls = job.read("calls", CsvFiles(str(tmp_path / "*.csv"), CALL))
        schema = {"device": "text", "id": "int8"}
        states = {"id": ValueState("int8")}
        reminders = calls.key_by("device").process(
            "remind", tomorrow, state=states, schema=schema, on_clock_timer=remind
        )
        reminders.write("reminders", TwoPhaseCommitSink(PostgresTable("reminders", create=True)))
        return job

    (tmp_path / "calls.csv").write_text(f"id,device,at\n1,a,{START.isoformat()}\n2,b,{START.isoformat()}\n")
    assert run(store_url, job()) == 0
    assert run(store_url, job()) == 0
    assert query(store_url, "SELECT * FROM reminders") == []
    assert run(store_url, job(), clock=LaterClock()) == 0
    assert query(store_url, "SELECT device, id FROM reminders ORDER BY id") == [("a", 1), ("b", 2)]
    assert run(store_url, job(), clock=LaterClock()) == 0
    assert query(store_url, "SELECT device, id FROM reminders ORDER BY id") == [("a", 1), ("b", 2)]
