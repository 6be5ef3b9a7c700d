"""Rows of the schema etl that were deleted or turned back by hand stop the next run before it reads anything."""

from __future__ import annotations

import psycopg
import pytest

from etl import CheckpointPolicy, Job
from etl.errors import RecordError
from etl.runtime.run import RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.summary import RunSummary
from etl.runtime.telemetry import Event, Telemetry
from etl.sink import Sink
from etl.store.database import Database
from sinks import PostgresTable, TwoPhaseCommitSink, WriteAheadSink
from tests.support.scripted import Numbers

SINKS = {"two-phase": TwoPhaseCommitSink, "write-ahead": WriteAheadSink}
CURE = "rows were deleted or changed by hand; nothing was read: put them back, from a backup of the store"
TAMPERED = {
    "newest position": (
        "DELETE FROM etl.position WHERE checkpoint_id = 3",
        "etl.position: checkpoint 3 has counted 1 rows, and 0 are there",
    ),
    "older position of a split that moved on": (
        "DELETE FROM etl.position WHERE checkpoint_id = 2",
        "etl.position: checkpoint 2 has counted 1 rows, and 0 are there",
    ),
    "handles": ("DELETE FROM etl.committable", "etl.committable: checkpoint 3 has counted 1 rows, and 0 are there"),
    "head set back": (
        "UPDATE etl.head SET checkpoint_id = 2",
        "etl.head names checkpoint 2 of incarnation 1, and the newest in etl.checkpoint is 3",
    ),
    "head set to nothing": (
        "UPDATE etl.head SET checkpoint_id = 0",
        "etl.head names checkpoint 0 of incarnation 1, and the newest in etl.checkpoint is 3",
    ),
    "head set forward": (
        "UPDATE etl.head SET checkpoint_id = 4",
        "etl.head names checkpoint 4 of incarnation 1, and the newest in etl.checkpoint is 3",
    ),
    "incarnation": (
        "UPDATE etl.head SET incarnation = 2",
        "etl.head names checkpoint 3 of incarnation 2, and the newest in etl.checkpoint is none",
    ),
    "checkpoints": (
        "DELETE FROM etl.checkpoint",
        "etl.head names checkpoint 3 of incarnation 1, and the newest in etl.checkpoint is none",
    ),
    "epoch": (
        "UPDATE etl.head SET epoch = 0",
        "etl.head gave out epoch 1, but etl.checkpoint has one of epoch 1: an epoch is never used twice",
    ),
}


def run(url: str, sink: Sink, *, count: int = 6, keep: int = 10, stop_at: int = 0) -> RunSummary:
    def listen(event: Event) -> None:
        if event.name == "commit.begin" and event.fields["checkpoint"] == stop_at:
            raise RecordError("stopped")

    job = Job("tampered", checkpoint=CheckpointPolicy(interval_s=60.0, rows=2, keep=keep))
    job.read("numbers", Numbers(count)).write("out", sink)
    telemetry = Telemetry()
    telemetry.subscribe(listen)
    return run_job(job, Database(url, "store"), {}, RunOptions(), telemetry, StopSignal())


def ids(url: str) -> list[int]:
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute("SELECT id FROM t ORDER BY id").fetchall()]


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("what", TAMPERED)
def test_tampered_store_is_refused_and_nothing_is_touched(store_url: str, kind: str, what: str) -> None:
    statement, problem = TAMPERED[what]
    sink = SINKS[kind](PostgresTable("t", create=True))
    assert run(store_url, sink, stop_at=3).exit_code == 65
    with psycopg.connect(store_url, autocommit=True) as connection:
        connection.execute(statement)
    for _ in range(1 if what == "epoch" else 2):
        summary = run(store_url, sink, count=10)
        assert (summary.exit_code, summary.restarts, summary.error) == (70, 0, f"{problem}: {CURE}")
        assert ids(store_url) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", SINKS)
def test_pruned_store_is_whole_whatever_is_kept(store_url: str, kind: str) -> None:
    sink = SINKS[kind](PostgresTable("t", create=True))
    for count, keep in [(9, 3), (20, 1), (26, 5), (30, 2)]:
        summary = run(store_url, sink, count=count, keep=keep)
        assert (summary.exit_code, summary.error) == (0, None)
        assert ids(store_url) == list(range(count))
