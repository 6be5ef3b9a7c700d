"""A job that is changed between two runs: what its former sinks staged is never lost, and never stands in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from etl import CheckpointPolicy, Job
from etl.errors import RecordError
from etl.runtime.run import RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.summary import RunSummary
from etl.runtime.telemetry import Event, Telemetry
from etl.sink import Committable, Delivery, Sink, SinkContext, SinkWriter
from etl.store.database import Database
from sinks import PostgresTable, TransactionalSink, TwoPhaseCommitSink, WriteAheadSink
from tests.support.scripted import Numbers

KINDS: dict[str, Callable[[PostgresTable], Sink]] = {
    "transactional": TransactionalSink,
    "two-phase": TwoPhaseCommitSink,
    "write-ahead": WriteAheadSink,
}
CHANGES = [(before, after) for before in ("two-phase", "write-ahead") for after in KINDS if before != after]


def job_with(sink: Sink, *, uid: str = "out", count: int = 3) -> Job:
    job = Job("changing", checkpoint=CheckpointPolicy(interval_s=60.0))
    job.read("numbers", Numbers(count)).write(uid, sink)
    return job


def append(table: str = "t") -> PostgresTable:
    return PostgresTable(table, create=True)


def run(url: str, job: Job, stop_at: str | None = None, warn: Callable[[str], None] = print) -> RunSummary:
    def listen(event: Event) -> None:
        if event.name == stop_at:
            raise RecordError("stopped")

    telemetry = Telemetry()
    telemetry.subscribe(listen)
    return run_job(job, Database(url, "store"), {}, RunOptions(warn=warn), telemetry, StopSignal())


def ids(url: str, table: str = "t") -> list[int]:
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute(f'SELECT id FROM "{table}" ORDER BY id').fetchall()]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_sink_of_another_kind_is_refused_when_rows_are_still_to_commit(store_url: str, before: str, after: str) -> None:
    assert run(store_url, job_with(KINDS[before](append())), stop_at="commit.begin").exit_code == 65
    refused = run(store_url, job_with(KINDS[after](append())))
    assert (refused.exit_code, refused.restarts) == (70, 0)
    assert refused.error == (
        "checkpoint 1 may have uncommitted rows of sink(s) out, which the job no longer has in this form; run the"
        " former version of the job once to its end, then change it"
    )
    assert run(store_url, job_with(KINDS[before](append()))).exit_code == 0
    assert ids(store_url) == [0, 1, 2]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_sink_of_another_kind_goes_on_when_a_run_has_ended_well(store_url: str, before: str, after: str) -> None:
    assert run(store_url, job_with(KINDS[before](append()))).exit_code == 0
    assert run(store_url, job_with(KINDS[after](append()), count=5)).exit_code == 0
    assert ids(store_url) == [0, 1, 2, 3, 4]


def test_renamed_sink_goes_on_when_the_former_version_has_run_once_more(store_url: str) -> None:
    former = job_with(TwoPhaseCommitSink(append()))
    renamed = job_with(TwoPhaseCommitSink(append()), uid="new", count=5)
    assert run(store_url, former, stop_at="commit.begin").exit_code == 65
    assert run(store_url, renamed).exit_code == 70
    assert run(store_url, former).exit_code == 0
    assert run(store_url, renamed).exit_code == 0
    assert ids(store_url) == [0, 1, 2, 3, 4]


def test_new_sink_is_told_that_it_gets_only_new_rows(store_url: str) -> None:
    told: list[str] = []
    assert run(store_url, job_with(TwoPhaseCommitSink(append())), warn=told.append).exit_code == 0
    assert told == []
    job = job_with(TwoPhaseCommitSink(append()), count=5)
    job.read("more", Numbers(2, first=7)).write("new", TwoPhaseCommitSink(append("u")))
    assert run(store_url, job, warn=told.append).exit_code == 0
    assert run(store_url, job, warn=told.append).exit_code == 0
    assert told == [
        "new sink(s) new: they get what is read from now on, not what was read before; for all of it, use a job of"
        " another name"
    ]
    assert (ids(store_url), ids(store_url, "u")) == ([0, 1, 2, 3, 4], [7, 8])


def test_changed_target_of_a_sink_is_told(store_url: str) -> None:
    told: list[str] = []
    assert run(store_url, job_with(TwoPhaseCommitSink(append())), warn=told.append).exit_code == 0
    assert run(store_url, job_with(TransactionalSink(append()), count=4), warn=told.append).exit_code == 0
    assert told == []
    for count in (5, 6):
        assert run(store_url, job_with(TwoPhaseCommitSink(append("u")), count=count), warn=told.append).exit_code == 0
    assert told == [
        'sink "out" wrote to table public.t before and writes to table public.u now: unless that was renamed, it gets'
        " what is read from now on, not what was read before; for all of it, use a job of another name"
    ]
    assert (ids(store_url), ids(store_url, "u")) == ([0, 1, 2, 3], [4, 5])


class _Failing(Sink):
    delivery = Delivery.DIRECT

    def create_writer(self, context: SinkContext) -> SinkWriter:
        raise RecordError("no writer today")


def test_writers_made_before_one_that_fails_are_closed(store_url: str) -> None:
    closed: list[str] = []

    class Closing(_Careless):
        def close(self) -> None:
            closed.append(self._uid)

    class Made(_CarelessSink):
        def create_writer(self, context: SinkContext) -> SinkWriter:
            return Closing(context, self._uid)

    job = job_with(Made("first"), uid="first")
    job.read("more", Numbers(1)).write("second", _Failing())
    assert run(store_url, job).error == "no writer today"
    assert closed == ["first"]


class _Careless(SinkWriter):
    rows = 0

    def __init__(self, context: SinkContext, uid: str | None) -> None:
        self._context = context
        self._uid = uid or context.uid

    def write(self, batch: pa.RecordBatch) -> None: ...

    def prepare_commit(self, checkpoint_id: int) -> Committable | None:
        return Committable(self._uid, 0, checkpoint_id, self._context.epoch, 3, {})

    def close(self) -> None: ...


class _CarelessSink(Sink):
    delivery = Delivery.DIRECT

    def __init__(self, uid: str | None) -> None:
        self._uid = uid

    def create_writer(self, context: SinkContext) -> SinkWriter:
        return _Careless(context, self._uid)


@pytest.mark.parametrize(
    ("uid", "error"),
    [
        (None, "sink out staged a unit but has no committer; derive it from SupportsCommitter"),
        ("other", "sink out staged a unit in the name of other"),
    ],
)
def test_unit_that_nobody_could_commit_is_refused_before_it_is_recorded(store_url: str, uid: Any, error: str) -> None:
    summary = run(store_url, job_with(_CarelessSink(uid)))
    assert (summary.exit_code, summary.checkpoint, summary.error) == (70, 0, error)


def renamed(forget: tuple[str, ...] = ()) -> Job:
    job = Job("changing", checkpoint=CheckpointPolicy(interval_s=60.0), forget=forget)
    job.read("other", Numbers(3)).write("out", TwoPhaseCommitSink(append()))
    return job


def test_renamed_source_is_refused_before_it_reads_everything_again(store_url: str) -> None:
    run(store_url, job_with(TwoPhaseCommitSink(append())))
    refused = run(store_url, renamed())
    assert (refused.exit_code, refused.restarts) == (70, 0)
    assert refused.error is not None
    assert "source(s) numbers have no source in the job, and source(s) other have no position" in refused.error
    assert "forget=['numbers']" in refused.error
    assert ids(store_url) == [0, 1, 2]


def test_positions_of_a_former_source_are_given_up_when_the_job_says_so(store_url: str) -> None:
    run(store_url, job_with(TwoPhaseCommitSink(append())))
    assert run(store_url, renamed(forget=("numbers",))).exit_code == 0
    assert ids(store_url) == [0, 0, 1, 1, 2, 2]
