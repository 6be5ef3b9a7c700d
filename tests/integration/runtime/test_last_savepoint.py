"""A savepoint that the run ends with, when an attempt fails on the way to it."""

from __future__ import annotations

import psycopg
import pytest

from etl import CheckpointPolicy, Job, RestartPolicy
from etl.errors import TransientError
from etl.runtime.run import RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.telemetry import Event, Telemetry
from etl.store.database import Database
from etl.store.tables import RunStatus
from sinks import PostgresTable, TwoPhaseCommitSink
from tests.support.scripted import Numbers
from tests.support.waiting import wait_until

COUNT = 1000


def declared() -> Job:
    # One checkpoint a batch: after each the source waits, and is told to stop before it has read everything.
    policy, restart = CheckpointPolicy(interval_s=60.0, rows=2), RestartPolicy(attempts=2, delay_s=0.01)
    job = Job("job", checkpoint=policy, restart=restart)
    job.read("numbers", Numbers(COUNT)).select("id").write("t", TwoPhaseCommitSink(PostgresTable("t", create=True)))
    return job


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("step", ["checkpoint.completing", "checkpoint.completed", "commit.begin"])
def test_nothing_is_read_behind_the_savepoint_when_an_attempt_fails(store_url: str, step: str, follow: bool) -> None:
    stop, telemetry = StopSignal(), Telemetry()
    state = {"asked": False, "savepoint": False, "failed": False}

    with psycopg.connect(store_url, autocommit=True) as connection:

        def listen(event: Event) -> None:
            if event.name == "source.batch" and not state["asked"]:
                state["asked"] = True
                connection.execute(
                    "INSERT INTO etl.savepoint_request (job_id, name, stop) SELECT job_id, 'end', true FROM etl.job"
                )
                wait_until(lambda: stop.with_savepoint, "the heartbeat")
            if event.name == "checkpoint.triggered":
                state["savepoint"] = event.fields["trigger"] == "savepoint"
            if event.name == step and state["savepoint"] and not state["failed"]:
                state["failed"] = True
                raise TransientError("the connection was cut")

        telemetry.subscribe(listen)
        options = RunOptions(follow=follow, owner_timeout_s=2.0)
        summary = run_job(declared(), Database(store_url, "store"), {}, options, telemetry, stop)

        assert (summary.status, summary.exit_code, summary.restarts) == (RunStatus.STOPPED, 0, 1)
        assert summary.rows_read < COUNT
        assert connection.execute("SELECT name, checkpoint_id FROM etl.savepoint").fetchall() == [
            ("end", summary.checkpoint)
        ]
        assert connection.execute("SELECT checkpoint_id FROM etl.head").fetchall() == [(summary.checkpoint,)]
        found = connection.execute("SELECT id FROM t ORDER BY id").fetchall()
        assert [id_ for (id_,) in found] == list(range(summary.rows_read))
        assert connection.execute("SELECT * FROM etl.savepoint_request").fetchall() == []
