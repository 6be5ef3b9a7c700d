"""Whole runs on a server: shapes of graphs, triggers, modes, restarts, stops, and what the summary says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import polars as pl
import psycopg
import pytest

from etl import CheckpointMode, CheckpointPolicy, Job, RestartPolicy
from etl.errors import AlreadyRunningError, ConfigurationError, RecordError, TransientError
from etl.runtime.run import RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.summary import RunSummary
from etl.runtime.telemetry import Event, Telemetry
from etl.store.database import Database
from etl.store.tables import RunStatus
from sinks import PostgresTable, TransactionalSink, TwoPhaseCommitSink, UpsertSink, WriteAheadSink
from tests.support.scripted import Numbers

EVERY_FOUR = CheckpointPolicy(interval_s=60.0, rows=4)
AT_ONCE = RestartPolicy(attempts=3, delay_s=0.01, delay_max_s=0.01)


class Bench:
    """A store with tables, and a way to run jobs on it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.events: list[Event] = []
        self.connection = psycopg.connect(url, autocommit=True)

    def run(
        self,
        job: Job,
        *,
        follow: bool = False,
        listener: Callable[[Event], None] | None = None,
        stop: StopSignal | None = None,
    ) -> RunSummary:
        telemetry = Telemetry()
        telemetry.subscribe(self.events.append)
        if listener is not None:
            telemetry.subscribe(listener)
        database = Database(self.url, "store")
        options = RunOptions(follow=follow, owner_timeout_s=1.0)
        return run_job(job, database, {}, options, telemetry, stop or StopSignal())

    def ids(self, table: str) -> list[int]:
        return [row[0] for row in self.connection.execute(f'SELECT id FROM "{table}" ORDER BY id').fetchall()]

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(query).fetchall()


@pytest.fixture
def bench(store_url: str) -> Iterator[Bench]:
    bench = Bench(store_url)
    yield bench
    bench.connection.close()


class AfterFirstCheckpoint:
    """Raises in the source, but not before the first checkpoint is visible."""

    def __init__(self, error: Exception) -> None:
        self._visible = threading.Event()
        self._error = error

    def listen(self, event: Event) -> None:
        if event.name == "commit.end":
            self._visible.set()

    def before(self, first: int) -> None:
        if first == 6:
            assert self._visible.wait(10)
            raise self._error


def append(table: str) -> PostgresTable:
    return PostgresTable(table, create=True)


def simple(source: Numbers, **options: Any) -> Job:
    job = Job("simple", **{"checkpoint": EVERY_FOUR, "restart": AT_ONCE, **options})
    job.read("numbers", source).write("t", TwoPhaseCommitSink(append("t")))
    return job


SINKS = {
    "transactional": lambda: TransactionalSink(append("t")),
    "two-phase": lambda: TwoPhaseCommitSink(append("t")),
    "write-ahead": lambda: WriteAheadSink(append("t")),
    "upsert": lambda: UpsertSink(PostgresTable("t", key=["id"], create=True)),
}


@pytest.mark.parametrize("sink", SINKS.values(), ids=SINKS.keys())
@pytest.mark.parametrize("mode", CheckpointMode)
def test_run_writes_every_row_once_in_every_mode(bench: Bench, sink: Callable[[], Any], mode: CheckpointMode) -> None:
    job = Job("j", mode=mode, checkpoint=EVERY_FOUR)
    job.read("numbers", Numbers(11)).write("t", sink())
    summary = bench.run(job)
    assert (summary.status, summary.exit_code, summary.error) == (RunStatus.SUCCEEDED, 0, None)
    assert (summary.rows_read, summary.rows_written, summary.checkpoint) == (11, {"t": 11}, 3)
    assert bench.ids("t") == list(range(11))


def test_second_run_reads_only_what_is_new(bench: Bench) -> None:
    bench.run(simple(Numbers(5)))
    summary = bench.run(simple(Numbers(8)))
    assert (summary.rows_read, summary.rows_written) == (3, {"t": 3})
    assert bench.ids("t") == list(range(8))


def test_run_with_nothing_new_takes_no_checkpoint(bench: Bench) -> None:
    first = bench.run(simple(Numbers(5)))
    summary = bench.run(simple(Numbers(5)))
    assert (summary.rows_read, summary.rows_written, summary.checkpoint) == (0, {"t": 0}, first.checkpoint)


def test_checkpoint_completes_without_a_prepared_transaction_when_every_row_is_filtered_out(bench: Bench) -> None:
    job = Job("j", checkpoint=EVERY_FOUR)
    job.read("numbers", Numbers(8)).filter(pl.col("id") < 0).write("t", TwoPhaseCommitSink(append("t")))
    summary = bench.run(job)
    assert (summary.rows_read, summary.rows_written, summary.checkpoint) == (8, {"t": 0}, 2)
    assert not [event for event in bench.events if event.name == "sink.prepared"]


def test_diamond_of_streams_keeps_every_row_and_every_barrier_in_place(bench: Bench) -> None:
    job = Job("j", checkpoint=EVERY_FOUR)
    numbers = job.read("numbers", Numbers(20))
    even = numbers.filter(pl.col("id") % 2 == 0)
    odd = numbers.filter(pl.col("id") % 2 == 1).with_columns(name=pl.lit("odd"))
    even.union(odd).write("t", TwoPhaseCommitSink(append("t")))
    even.write("u", WriteAheadSink(append("u")))
    summary = bench.run(job)
    assert summary.rows_written == {"t": 20, "u": 10}
    assert bench.ids("t") == list(range(20))
    assert bench.ids("u") == list(range(0, 20, 2))
    assert bench.rows("SELECT count(*) FROM t WHERE name = 'odd'") == [(10,)]


def test_sources_of_different_length_are_united(bench: Bench) -> None:
    job = Job("j", checkpoint=EVERY_FOUR)
    short = job.read("short", Numbers(3, first=100))
    job.read("long", Numbers(30)).union(short).write("t", TransactionalSink(append("t")))
    assert bench.run(job).rows_read == 33
    assert bench.ids("t") == [*range(30), 100, 101, 102]
    splits = bench.rows("SELECT uid, position FROM etl.positions ORDER BY uid")
    assert splits == [("long", {"next": 30}), ("short", {"next": 3})]


def test_every_checkpoint_is_recorded_with_its_rows(bench: Bench) -> None:
    bench.run(simple(Numbers(10)))
    rows = bench.rows("SELECT checkpoint, trigger, rows_read, rows_written FROM etl.checkpoints ORDER BY 1")
    assert rows == [(1, "rows", 4, {"t": 4}), (2, "rows", 4, {"t": 4}), (3, "end-of-input", 2, {"t": 2})]


def test_transient_failure_is_repeated_from_the_last_checkpoint(bench: Bench) -> None:
    failures = iter([TransientError("once"), TransientError("twice")])

    def before(first: int) -> None:
        error = next(failures, None) if first == 6 else None
        if error is not None:
            raise error

    summary = bench.run(simple(Numbers(10, before=before)))
    assert (summary.exit_code, summary.restarts, summary.rows_read) == (0, 2, 10)
    assert bench.ids("t") == list(range(10))
    assert bench.rows("SELECT failures FROM etl.head") == [(0,)]


def test_run_gives_up_after_its_restarts_and_leaves_only_whole_checkpoints(bench: Bench) -> None:
    failing = AfterFirstCheckpoint(TransientError("always"))
    summary = bench.run(simple(Numbers(10, before=failing.before)), listener=failing.listen)
    assert (summary.status, summary.exit_code, summary.restarts) == (RunStatus.FAILED, 70, 3)
    assert (summary.rows_read, summary.rows_written) == (4, {"t": 4})
    assert bench.ids("t") == list(range(4))
    assert bench.rows("SELECT status, exit_code, error FROM etl.runs") == [("failed", 70, "always")]


def test_bad_record_stops_the_run_at_once(bench: Bench) -> None:
    failing = AfterFirstCheckpoint(RecordError("f.csv:7 is bad"))
    summary = bench.run(simple(Numbers(10, before=failing.before)), listener=failing.listen)
    assert (summary.exit_code, summary.restarts, summary.error) == (65, 0, "f.csv:7 is bad")
    assert bench.ids("t") == list(range(4))


def test_user_function_that_raises_ends_the_run_without_a_row(bench: Bench) -> None:
    job = Job("j", checkpoint=EVERY_FOUR, restart=AT_ONCE)
    job.read("numbers", Numbers(3)).map(lambda row: {**row, "id": row["id"] // 0}).write(
        "t", TransactionalSink(append("t"))
    )
    summary = bench.run(job)
    assert (summary.exit_code, summary.restarts) == (70, 0)
    assert bench.ids("t") == []
    assert bench.rows("SELECT count(*) FROM etl.position") == [(0,)]


def test_follow_goes_on_until_it_is_asked_to_stop(bench: Bench) -> None:
    stop = StopSignal()

    def listener(event: Event) -> None:
        if event.name == "commit.end" and event.fields["checkpoint"] == 2:
            stop.request(15)

    summary = bench.run(simple(Numbers(8)), follow=True, listener=listener, stop=stop)
    assert (summary.status, summary.exit_code, summary.rows_read) == (RunStatus.STOPPED, 0, 8)
    assert bench.ids("t") == list(range(8))


def test_stop_takes_a_final_checkpoint_of_what_was_read(bench: Bench) -> None:
    stop = StopSignal()
    summary = bench.run(simple(Numbers(1000, before=lambda first: stop.request(2) if first == 10 else None)), stop=stop)
    assert (summary.status, summary.exit_code) == (RunStatus.STOPPED, 130)
    assert bench.ids("t") == list(range(summary.rows_read))
    assert 10 <= summary.rows_read < 1000
    assert bench.rows("SELECT trigger FROM etl.checkpoints WHERE current") == [("stop",)]


def test_second_run_is_refused_while_the_first_one_works(bench: Bench) -> None:
    refused = threading.Event()

    def listener(event: Event) -> None:
        if event.name == "checkpoint.completed" and event.fields["checkpoint"] == 1:
            with pytest.raises(AlreadyRunningError, match='job "simple" is already running'):
                run_job(simple(Numbers(8)), Database(bench.url, "store"), {}, RunOptions(), Telemetry(), StopSignal())
            refused.set()

    assert bench.run(simple(Numbers(8)), listener=listener).exit_code == 0
    assert refused.is_set()
    assert bench.ids("t") == list(range(8))


def test_run_that_was_overtaken_writes_nothing_more(bench: Bench) -> None:
    """Every session of the first run is ended by its successor, which finishes the job meanwhile."""

    def listener(event: Event) -> None:
        if event.name == "checkpoint.completing" and event.fields["checkpoint"] == 2:
            bench.connection.execute("UPDATE etl.head SET owner_pid = NULL")
            successor = Bench(bench.url)
            assert successor.run(simple(Numbers(8))).exit_code == 0
            successor.connection.close()

    summary = bench.run(simple(Numbers(8)), listener=listener)
    assert (summary.status, summary.exit_code) == (RunStatus.FENCED, 78)
    assert bench.ids("t") == list(range(8))


def test_job_is_refused_with_every_finding_before_it_starts(bench: Bench) -> None:
    job = Job("j")
    numbers = job.read("numbers", Numbers(3))
    numbers.write("t", TwoPhaseCommitSink(PostgresTable("missing")))
    numbers.write("u", UpsertSink(PostgresTable("absent", key=["id"])))
    with pytest.raises(ConfigurationError) as caught:
        bench.run(job)
    assert ["missing" in str(finding) or "absent" in str(finding) for finding in caught.value.findings] == [True, True]
    assert bench.rows("SELECT count(*) FROM etl.head") == [(0,)]


def test_removed_sink_with_rows_still_to_commit_is_refused(bench: Bench) -> None:
    def listener(event: Event) -> None:
        if event.name == "commit.begin":
            raise RecordError("stop before the commit")

    assert bench.run(simple(Numbers(3)), listener=listener).exit_code == 65
    job = Job("simple", checkpoint=EVERY_FOUR)
    job.read("numbers", Numbers(3)).write("other", TransactionalSink(append("u")))
    summary = bench.run(job)
    assert summary.exit_code == 70
    assert summary.error is not None
    assert "sink(s) t, which the job no longer has" in summary.error
    assert bench.run(simple(Numbers(3))).exit_code == 0
    assert bench.ids("t") == [0, 1, 2]
