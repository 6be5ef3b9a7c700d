"""Windows over runs of cron: they go on from run to run, close once, and late rows are in a table of their own."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import psycopg
import pytest

from etl import CheckpointPolicy, EventTime, Job, Session, Sliding, Tumbling
from etl.errors import RecordError
from etl.runtime.run import RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.telemetry import Event, Telemetry
from etl.sources import CsvFiles
from etl.store.database import Database
from sinks import PostgresTable, TwoPhaseCommitSink, UpsertSink

START = dt.datetime(2024, 3, 9, 22, 0, tzinfo=dt.UTC)
PROMISE = dt.timedelta(minutes=5)
HOUR = dt.timedelta(hours=1)
GAP = dt.timedelta(minutes=3)
CARDS = [None, "a", "b", "c", "d", "ü"]
PAYMENT = {"id": "int8", "card": "text", "at": "timestamptz", "amount": "numeric(12,2)"}


@dataclass(frozen=True)
class Payment:
    id: int
    card: str | None
    at: dt.datetime
    amount: Decimal


@dataclass
class Stream:
    """A log of payments, one file after the other; some of them come later than promised."""

    directory: Path
    random: random.Random = field(default_factory=lambda: random.Random(7))
    now: dt.datetime = START
    in_time: list[Payment] = field(default_factory=list)
    late: list[Payment] = field(default_factory=list)
    files: int = 0

    def write(self, rows: int, *, late: int = 0) -> None:
        late_at = set(self.random.sample(range(1, rows), late))
        payments = [self._payment(is_late=number in late_at) for number in range(rows)]
        lines = [f"{one.id},{one.card or ''},{one.at.isoformat()},{one.amount}" for one in payments]
        self.files += 1
        (self.directory / f"log-{self.files}.csv").write_text("\n".join(["id,card,at,amount", *lines, ""]), "utf-8")

    def _payment(self, *, is_late: bool) -> Payment:
        self.now += dt.timedelta(seconds=self.random.randint(0, 90))
        behind = dt.timedelta(days=2) if is_late else dt.timedelta(seconds=self.random.randint(0, 300))
        card = self.random.choice(CARDS)
        amount = Decimal(self.random.randint(-5000, 5000)) / 100
        payment = Payment(len(self.in_time) + len(self.late), card, self.now - behind, amount)
        (self.late if is_late else self.in_time).append(payment)
        return payment

    @property
    def latest(self) -> dt.datetime:
        return max(one.at for one in self.in_time)

    @property
    def watermark(self) -> dt.datetime:
        return (self.latest - PROMISE).replace(microsecond=0)


def job_of(directory: Path, parallelism: int) -> Job:
    job = Job("windows", checkpoint=CheckpointPolicy(interval_s=60.0, rows=50), parallelism=parallelism)
    payments = job.read(
        "payments",
        CsvFiles(str(directory / "*.csv"), PAYMENT, batch_rows=17),
        event_time=EventTime("at", out_of_orderness=PROMISE, in_sequence=True),
    )
    by_card = payments.key_by("card")
    aggregates: dict[str, Any] = {"total": pl.col("amount").sum(), "payments": pl.len()}
    hours = by_card.window(Tumbling(HOUR), time="at").aggregate("hourly", **aggregates)
    hours.write("hours", TwoPhaseCommitSink(PostgresTable("hours", create=True)))
    hours.late.write("late", TwoPhaseCommitSink(PostgresTable("late", create=True)))
    known = payments.filter(pl.col("card").is_not_null()).key_by("card")
    early = known.window(Sliding(HOUR, HOUR / 4), time="at", lateness=HOUR, emit="checkpoint")
    recent = early.aggregate("recently", schema={"total": "numeric(14,2)"}, **aggregates)
    recent.write("recent", UpsertSink(PostgresTable("recent", key=["card", "window_start"], create=True)))
    sessions = by_card.window(Session(GAP), time="at").aggregate("visits", **aggregates)
    sessions.write("sessions", TwoPhaseCommitSink(PostgresTable("sessions", create=True)))
    return job


def run(url: str, job: Job, *, drain: bool = False, stop_at: tuple[str, int] | None = None) -> int:
    seen = 0

    def listen(event: Event) -> None:
        nonlocal seen
        if stop_at is not None and event.name == stop_at[0]:
            seen += 1
            if seen == stop_at[1]:
                raise RecordError("stopped")

    telemetry = Telemetry()
    telemetry.subscribe(listen)
    summary = run_job(job, Database(url, "store"), {}, RunOptions(warn=print, drain=drain), telemetry, StopSignal())
    assert summary.error in (None, "stopped")
    return summary.exit_code


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        return connection.execute(statement.encode()).fetchall()


Windows = dict[tuple[Any, ...], list[Payment]]
"""Payments by card, start and end."""


def hours(payments: Iterable[Payment]) -> Windows:
    found: Windows = {}
    for one in payments:
        start = one.at.replace(minute=0, second=0, microsecond=0)
        found.setdefault((one.card, start, start + HOUR), []).append(one)
    return found


def quarters(payments: Iterable[Payment]) -> Windows:
    found: Windows = {}
    for one in payments:
        last = one.at.replace(minute=one.at.minute // 15 * 15, second=0, microsecond=0)
        for start in (last - number * HOUR / 4 for number in range(4)):
            if one.card is not None:
                found.setdefault((one.card, start, start + HOUR), []).append(one)
    return found


def sessions(payments: Iterable[Payment]) -> Windows:
    found: Windows = {}
    by_card: dict[str | None, list[Payment]] = {}
    for one in sorted(payments, key=lambda payment: payment.at):
        rows = by_card.setdefault(one.card, [])
        if rows and one.at - rows[-1].at >= GAP:
            found[one.card, rows[0].at, rows[-1].at + GAP] = rows
            rows = by_card[one.card] = []
        rows.append(one)
    return found | {(card, rows[0].at, rows[-1].at + GAP): rows for card, rows in by_card.items()}


def check(url: str, stream: Stream, *, closed_until: dt.datetime | None) -> None:
    """The tables hold what they must; windows that end after a moment are still open."""
    for table, windows in (("hours", hours), ("sessions", sessions), ("recent", quarters)):
        expected = sorted(
            (str(card), start, end, sum(one.amount for one in rows), len(rows))
            for (card, start, end), rows in windows(stream.in_time).items()
            if table == "recent" or closed_until is None or end <= closed_until
        )
        found = query(url, f"SELECT card, window_start, window_end, total, payments FROM {table}")
        assert sorted((str(card), *rest) for card, *rest in found) == expected, table
    late = [(one.id, one.card, one.at, one.amount) for one in stream.late]
    assert query(url, "SELECT id, card, at, amount FROM late ORDER BY id") == sorted(late, key=lambda row: row[0])


@pytest.mark.parametrize("parallelism", [(1,), (2,), (1, 4, 3)])
def test_windows_go_on_from_run_to_run(store_url: str, tmp_path: Path, parallelism: tuple[int, ...]) -> None:
    stream = Stream(tmp_path)
    for number in range(5):
        stream.write(120, late=3)
        at_once = parallelism[number % len(parallelism)]
        assert run(store_url, job_of(tmp_path, at_once)) == 0
        check(store_url, stream, closed_until=stream.watermark)
        assert run(store_url, job_of(tmp_path, at_once)) == 0
        check(store_url, stream, closed_until=stream.watermark)
    assert run(store_url, job_of(tmp_path, 2), drain=True) == 0
    check(store_url, stream, closed_until=None)


@pytest.mark.parametrize("event", ["checkpoint.recorded", "commit.end", "state.snapshotted"])
def test_runs_that_fail_close_no_window_twice_and_none_too_early(store_url: str, tmp_path: Path, event: str) -> None:
    stream = Stream(tmp_path)
    for number in range(3):
        stream.write(200, late=5)
        assert run(store_url, job_of(tmp_path, 2), stop_at=(event, 2 + number)) == 65
        assert run(store_url, job_of(tmp_path, 3)) == 0
        check(store_url, stream, closed_until=stream.watermark)
    assert run(store_url, job_of(tmp_path, 2), stop_at=(event, 1), drain=True) == 65
    assert run(store_url, job_of(tmp_path, 2), drain=True) == 0
    check(store_url, stream, closed_until=None)


def test_what_was_closed_on_purpose_stays_closed(store_url: str, tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.write(60)
    assert run(store_url, job_of(tmp_path, 2), drain=True) == 0
    check(store_url, stream, closed_until=None)
    closed = query(store_url, "SELECT card, window_end, payments FROM hours ORDER BY 1, 2")
    last = stream.latest.replace(minute=59, second=59)
    again = [Payment(1000, "a", last, Decimal("1.00")), Payment(1001, "new", last, Decimal("2.00"))]
    after = Payment(1002, "a", last + dt.timedelta(seconds=1), Decimal("3.00"))
    rows = [f"{one.id},{one.card},{one.at.isoformat()},{one.amount}" for one in (*again, after)]
    (tmp_path / "log-9.csv").write_text("\n".join(["id,card,at,amount", *rows, ""]), "utf-8")
    assert run(store_url, job_of(tmp_path, 3), drain=True) == 0
    assert query(store_url, "SELECT id FROM late ORDER BY id") == [(1000,), (1001,)]
    found = query(store_url, "SELECT card, window_end, payments FROM hours ORDER BY 1, 2")
    assert sorted(found, key=str) == sorted([*closed, ("a", after.at + HOUR, 1)], key=str)


def test_longer_lateness_opens_nothing_again_that_was_forgotten(store_url: str, tmp_path: Path) -> None:
    def job(lateness: dt.timedelta) -> Job:
        job = Job("windows", parallelism=2)
        source = CsvFiles(str(tmp_path / "*.csv"), PAYMENT)
        payments = job.read("payments", source, event_time=EventTime("at", in_sequence=True))
        windows = payments.key_by("card").window(Tumbling(HOUR), time="at", lateness=lateness)
        hours = windows.aggregate("hourly", payments=pl.len())
        hours.write("hours", UpsertSink(PostgresTable("hours", key=["card", "window_start"], create=True)))
        hours.late.write("late", TwoPhaseCommitSink(PostgresTable("late", create=True)))
        return job

    def write(name: str, *rows: str) -> None:
        (tmp_path / name).write_text("\n".join(["id,card,at,amount", *rows, ""]), "utf-8")

    write("log-1.csv", "1,a,2024-03-09 22:10Z,1.00", "2,a,2024-03-09 22:20Z,1.00", "3,a,2024-03-09 23:05Z,1.00")
    assert run(store_url, job(dt.timedelta(0))) == 0
    write("log-2.csv", "4,a,2024-03-09 22:30Z,1.00", "5,a,2024-03-09 23:10Z,1.00", "6,a,2024-03-10 00:05Z,1.00")
    assert run(store_url, job(2 * HOUR)) == 0
    write("log-3.csv", "7,a,2024-03-09 22:40Z,1.00", "8,a,2024-03-09 23:20Z,1.00")
    assert run(store_url, job(2 * HOUR)) == 0

    assert query(store_url, "SELECT window_start, payments FROM hours ORDER BY 1") == [(START, 2), (START + HOUR, 3)]
    assert query(store_url, "SELECT id FROM late ORDER BY 1") == [(4,), (7,)]


def test_late_rows_are_counted_with_the_checkpoint(store_url: str, tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.write(100, late=7)
    assert run(store_url, job_of(tmp_path, 2)) == 0
    assert late_rows(store_url) == {
        "hourly": 7,
        "visits": 7,
        "recently": sum(one.card is not None for one in stream.late),
    }
    stream.write(100, late=4)
    assert run(store_url, job_of(tmp_path, 3)) == 0
    assert late_rows(store_url)["hourly"] == 11
    shown = query(store_url, "SELECT event_time, late_rows FROM etl.operator_states WHERE operator = 'hourly'")
    assert shown == [(stream.watermark, 11)]


def late_rows(url: str) -> dict[str, int]:
    ((states,),) = query(url, "SELECT states FROM etl.checkpoint ORDER BY checkpoint_id DESC LIMIT 1")
    return {uid: state["late_rows"] for uid, state in states.items()}
