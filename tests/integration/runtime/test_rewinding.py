"""Going back to savepoints, and taking over what is stored under another uid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event as ThreadEvent
from typing import Any

import polars as pl
import psycopg
import pyarrow.parquet as pq
import pytest

from etl import CheckpointPolicy, Job
from etl.clock import SystemClock
from etl.errors import ConfigurationError
from etl.runtime.rewinding import StartFrom
from etl.runtime.run import RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.summary import RunSummary
from etl.runtime.telemetry import Telemetry
from etl.sink import CheckpointMode, Sink
from etl.store import pruning, savepoints
from etl.store.database import Database
from sinks import ParquetFiles, PostgresTable, TransactionalSink, TwoPhaseCommitSink, UpsertSink, WriteAheadSink
from tests.support.scripted import Numbers

KEYS = 7
CURE = "rows were deleted or changed by hand; nothing was read: put them back, from a backup of the store"


@dataclass(frozen=True, slots=True)
class Declared:
    """A job that appends the numbers below ``count``, totals them by their remainder and keeps the first of each."""

    count: int
    parallelism: int = 1
    source: str = "numbers"
    totals: str = "totals"
    keep: int = 10
    more: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    sink: Callable[[PostgresTable], Sink] = TwoPhaseCommitSink

    def job(self) -> Job:
        policy = CheckpointPolicy(interval_s=60.0, rows=10, keep=self.keep)
        job = Job("job", checkpoint=policy, parallelism=self.parallelism, **self.options)
        numbers = job.read(self.source, Numbers(self.count, batch_rows=5))
        if self.more:
            job.read("more", Numbers(self.count, first=1000)).write("extra", UpsertSink(table("more", key="id")))
        keyed = numbers.with_columns(key=pl.col("id") % KEYS)
        numbers.select("id").write("all", self.sink(table("all")))
        totals = keyed.key_by("key").aggregate(self.totals, total=pl.col("id").sum(), rows=pl.len())
        totals.write("by_key", UpsertSink(table("totals", key="key")))
        keyed.deduplicate("firsts", "key").write("first", TransactionalSink(table("firsts", key="key")))
        return job


def table(name: str, key: str | None = None) -> PostgresTable:
    return PostgresTable(name, key=key, create=True)


def run(
    url: str, job: Job, start: str | None = None, *, keep_written: bool = False, warn: Callable[[str], None] = print
) -> RunSummary:
    options = RunOptions(warn=warn, start=None if start is None else StartFrom(start, keep_written=keep_written))
    return run_job(job, Database(url, "store"), {}, options, Telemetry(), StopSignal())


def go(url: str, job: Job, start: str | None = None, *, keep_written: bool = False) -> list[str]:
    """Run well; what was told."""
    told: list[str] = []
    summary = run(url, job, start, keep_written=keep_written, warn=told.append)
    assert (summary.exit_code, summary.error) == (0, None)
    return told


def save(url: str, name: str, job: str = "job") -> int:
    with Database(url, "store").session("test") as session:
        (job_id,) = session.driver.execute("SELECT job_id FROM etl.job WHERE name = %s", [job]).fetchone() or ("",)
        return savepoints.take(
            session, job_id, name, stop=False, timeout_s=5.0, clock=SystemClock(), cancelled=ThreadEvent()
        )


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def totals(count: int) -> list[tuple[int, int, int]]:
    return [(key, sum(range(key, count, KEYS)), len(range(key, count, KEYS))) for key in range(min(KEYS, count))]


def check(url: str, count: int, *again: range) -> None:
    """Every number is there once, and those that were written again once more."""
    expected = sorted([*range(count), *(number for one in again for number in one)])
    assert [number for (number,) in query(url, 'SELECT id FROM "all" ORDER BY id')] == expected
    assert query(url, "SELECT key, total, rows FROM totals ORDER BY key") == totals(count)
    assert query(url, "SELECT id, key FROM firsts ORDER BY id") == [(key, key) for key in range(min(KEYS, count))]


def test_rows_written_since_a_savepoint_demand_a_choice(store_url: str) -> None:
    go(store_url, Declared(25).job())
    assert save(store_url, "early") == 3
    go(store_url, Declared(47).job())
    with pytest.raises(ConfigurationError) as refused:
        run(store_url, Declared(60).job(), "early")
    assert str(refused.value) == (
        '3 checkpoint(s) were completed after checkpoint 3, with 22 row(s) of sink "all" (table public.all: they will'
        ' be there twice); 16 row(s) of sink "by_key" (table public.totals: the same rows will replace them). From'
        " there on everything is read and written again: delete those rows first where that matters, or let them be,"
        " and say so with --keep-written"
    )
    assert query(store_url, "SELECT incarnation, checkpoint_id, owner_pid FROM etl.head") == [(1, 6, None)]
    check(store_url, 47)


def test_job_goes_back_to_a_savepoint_and_state_with_it(store_url: str) -> None:
    go(store_url, Declared(25).job())
    save(store_url, "early")
    go(store_url, Declared(47).job())
    check(store_url, 47)
    told = go(store_url, Declared(60).job(), "early", keep_written=True)
    assert len(told) == 1
    assert told[0].endswith("; they stay")
    check(store_url, 60, range(25, 47))
    assert query(store_url, "SELECT incarnation FROM etl.head") == [(2,)]
    assert go(store_url, Declared(75).job()) == []
    check(store_url, 75, range(25, 47))


def test_last_checkpoint_needs_no_choice_and_changes_nothing(store_url: str) -> None:
    go(store_url, Declared(25).job())
    save(store_url, "last")
    for start in ("last", "3"):
        assert go(store_url, Declared(25).job(), start) == []
    check(store_url, 25)
    assert query(store_url, "SELECT incarnation, checkpoint_id FROM etl.head") == [(1, 3)]
    go(store_url, Declared(40).job(), "last")
    check(store_url, 40)


def test_job_goes_back_to_a_kept_checkpoint_and_forth_again(store_url: str) -> None:
    go(store_url, Declared(40).job())
    go(store_url, Declared(40).job(), "2", keep_written=True)
    check(store_url, 40, range(20, 40))
    # Number 4 belongs to the incarnation that was abandoned, at whose end everything was read.
    go(store_url, Declared(50).job(), "4", keep_written=True)
    check(store_url, 50, range(20, 40))
    assert query(store_url, "SELECT incarnation FROM etl.head") == [(3,)]


def test_unknown_checkpoint_is_refused_and_the_job_given_back(store_url: str) -> None:
    go(store_url, Declared(25).job())
    with pytest.raises(ConfigurationError, match='no savepoint or kept checkpoint "nowhere"; there are: 1, 2, 3'):
        run(store_url, Declared(30).job(), "nowhere")
    assert query(store_url, "SELECT owner_pid FROM etl.head") == [(None,)]
    assert query(store_url, "SELECT count(*) FROM etl.run") == [(1,)]
    go(store_url, Declared(30).job())
    check(store_url, 30)


def test_parallelism_may_change_over_savepoints(store_url: str) -> None:
    for number, parallelism in enumerate((1, 4, 2), start=1):
        go(store_url, Declared(number * 25, parallelism).job())
        save(store_url, f"at-{parallelism}")
    check(store_url, 75)
    for parallelism, start, first in ((3, "at-2", 75), (2, "at-1", 25), (4, "at-4", 50)):
        query(store_url, 'TRUNCATE "all", totals')
        go(store_url, Declared(90, parallelism).job(), start, keep_written=True)
        assert [number for (number,) in query(store_url, 'SELECT id FROM "all" ORDER BY id')] == list(range(first, 90))
        assert query(store_url, "SELECT key, total, rows FROM totals ORDER BY key") == totals(90)


def test_savepoint_outlives_many_checkpoints(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "PRUNE_STATE_EVERY", 1)
    go(store_url, Declared(25, keep=2).job())
    save(store_url, "early")
    for count in range(50, 400, 50):
        go(store_url, Declared(count, keep=2).job())
    assert query(store_url, "SELECT checkpoint_id FROM etl.checkpoint ORDER BY 1") == [(3,), (35,), (36,)]
    go(store_url, Declared(400, keep=2).job(), "early", keep_written=True)
    check(store_url, 400, range(25, 350))


def test_abandoned_incarnation_goes_with_its_savepoints(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "PRUNE_STATE_EVERY", 1)
    go(store_url, Declared(25, keep=2).job())
    save(store_url, "early")
    for count in (50, 100):
        go(store_url, Declared(count, keep=2).job(), "early", keep_written=True)
    left = {
        name: query(store_url, f"SELECT DISTINCT incarnation FROM etl.{name} ORDER BY 1")
        for name in ("checkpoint", "position", "state")
    }
    assert left == {name: [(1,), (2,)] for name in ("checkpoint", "position", "state")}
    with psycopg.connect(store_url, autocommit=True) as connection:
        job_id = query(store_url, "SELECT job_id FROM etl.job")[0][0]
        savepoints.drop(connection, job_id, ["early"])
    go(store_url, Declared(150, keep=2).job())
    for name in ("checkpoint", "position", "state", "committable"):
        assert query(store_url, f"SELECT DISTINCT incarnation FROM etl.{name}") == [(2,)], name


@pytest.mark.parametrize("sink", [TransactionalSink, TwoPhaseCommitSink, WriteAheadSink])
def test_every_kind_of_sink_goes_on_in_the_new_incarnation(
    store_url: str, sink: Callable[[PostgresTable], Sink]
) -> None:
    go(store_url, Declared(40, sink=sink).job())
    go(store_url, Declared(60, sink=sink).job(), "1", keep_written=True)
    go(store_url, Declared(70, sink=sink).job())
    check(store_url, 70, range(10, 40))


def test_files_of_both_incarnations_stay(store_url: str, tmp_path: Path) -> None:
    def job(count: int) -> Job:
        made = Job("files", checkpoint=CheckpointPolicy(interval_s=60.0, rows=10))
        made.read("numbers", Numbers(count, batch_rows=5)).write("out", ParquetFiles(tmp_path / "out"))
        return made

    go(store_url, job(40))
    go(store_url, job(50), "1", keep_written=True)
    go(store_url, job(60))
    found = sorted(
        number for file in (tmp_path / "out").glob("*.parquet") for number in pq.read_table(file)["id"].to_pylist()
    )
    assert found == sorted([*range(60), *range(10, 40)])


def test_mode_that_counts_no_rows_says_so(store_url: str) -> None:
    def job(count: int) -> Job:
        made = Job("most", mode=CheckpointMode.AT_MOST_ONCE, checkpoint=CheckpointPolicy(interval_s=60.0, rows=10))
        made.read("numbers", Numbers(count, batch_rows=5)).write("out", TwoPhaseCommitSink(table("most")))
        return made

    go(store_url, job(30))
    with pytest.raises(ConfigurationError, match=r"2 checkpoint.* with rows that mode at-most-once does not count"):
        run(store_url, job(40), "1")
    go(store_url, job(40), "1", keep_written=True)
    assert [number for (number,) in query(store_url, "SELECT id FROM most ORDER BY id")] == sorted(
        [*range(40), *range(10, 30)]
    )


EDITED = {
    "UPDATE etl.position SET position = '{\"next\": 1}' WHERE checkpoint_id = 1": "etl.position: that of source",
    "DELETE FROM etl.position WHERE checkpoint_id = 1": "etl.position: checkpoint 1 has counted 1 splits, and 0",
    "UPDATE etl.state SET content = 'x' WHERE checkpoint_id = 1 AND uid = 'totals'": "is not the one that was written",
    "DELETE FROM etl.state WHERE checkpoint_id = 1 AND uid = 'totals'": 'has counted 7 chunks of operator "totals"',
}


@pytest.mark.parametrize("edit", EDITED)
def test_savepoint_of_an_abandoned_incarnation_that_was_edited_is_refused(store_url: str, edit: str) -> None:
    go(store_url, Declared(40).job())
    go(store_url, Declared(40).job(), "3", keep_written=True)
    query(store_url, edit)
    before = query(store_url, "SELECT incarnation, checkpoint_id FROM etl.head")
    refused = run(store_url, Declared(50).job(), "1", keep_written=True)
    assert refused.exit_code == 70
    assert EDITED[edit] in str(refused.error)
    assert query(store_url, "SELECT incarnation, checkpoint_id FROM etl.head") == before
    go(store_url, Declared(50).job())


# --- other uids ------------------------------------------------------------------------------------------------------


def renaming(count: int, **renamed: str) -> Declared:
    return Declared(
        count, 2, renamed.get("numbers", "numbers"), renamed.get("totals", "totals"), options={"renamed": renamed}
    )


def test_state_and_positions_are_taken_over_under_new_uids_once(store_url: str) -> None:
    go(store_url, Declared(25).job())
    save(store_url, "former")
    assert go(store_url, renaming(25, numbers="digits", totals="sums").job()) == []
    assert query(store_url, "SELECT incarnation FROM etl.head") == [(2,)]
    for count in (25, 60, 75):
        assert go(store_url, renaming(count, numbers="digits", totals="sums").job()) == []
        check(store_url, count)
    assert query(store_url, "SELECT incarnation FROM etl.head") == [(2,)]
    assert go(store_url, Declared(80, source="digits", totals="sums").job()) == []
    check(store_url, 80)
    # A savepoint from before the change is taken over in the same way.
    go(store_url, renaming(80, numbers="digits", totals="sums").job(), "former", keep_written=True)
    check(store_url, 80, range(25, 80))


def test_uid_that_has_something_stored_is_not_overwritten(store_url: str) -> None:
    go(store_url, Declared(25, more=True).job())
    job = Declared(25, source="more", options={"renamed": {"numbers": "more"}}).job()
    refused = run(store_url, job)
    assert (refused.exit_code, refused.error) == (
        70,
        'Job(…, renamed=…): "numbers" is to be "more" now, and under "more" something is stored already; give one of'
        ' them up with forget=["numbers"], or choose another uid',
    )


def test_state_of_an_operator_is_no_position_of_a_source(store_url: str) -> None:
    go(store_url, Declared(25).job())
    job = Declared(25, source="digits", options={"renamed": {"totals": "digits"}}, totals="sums").job()
    refused = run(store_url, job)
    assert (refused.exit_code, refused.error) == (
        70,
        'Job(…, renamed=…): what is stored of "totals" belongs to an operator, and "digits" is none',
    )
