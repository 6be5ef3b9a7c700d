"""State of operators over runs: it goes on exactly, at any parallelism, and is refused when it was tampered with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import psycopg
import pytest

from etl import CheckpointPolicy, Job, MapState
from etl.errors import ConfigurationError, RecordError
from etl.runtime.run import RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.summary import RunSummary
from etl.runtime.telemetry import Event, Telemetry
from etl.store import pruning, state
from etl.store.database import Database
from sinks import PostgresTable, TransactionalSink, TwoPhaseCommitSink, UpsertSink
from tests.support.scripted import Numbers
from tests.support.waiting import wait_until

KEYS = 7
CURE = "rows were deleted or changed by hand; nothing was read: put them back, from a backup of the store"

TOTALS: Mapping[str, Any] = {"total": pl.col("id").sum(), "rows": pl.len()}


@dataclass(frozen=True, slots=True)
class Totals:
    """A job that totals ids by their remainder and keeps the first id of each."""

    count: int
    parallelism: int = 1
    uid: str = "totals"
    expressions: Mapping[str, Any] = field(default_factory=lambda: TOTALS)
    keep: int = 10
    forget: tuple[str, ...] = ()

    def job(self) -> Job:
        policy = CheckpointPolicy(interval_s=60.0, rows=10, keep=self.keep)
        job = Job("totals", checkpoint=policy, parallelism=self.parallelism, forget=self.forget)
        numbers = job.read("numbers", Numbers(self.count, batch_rows=3))
        keyed = numbers.with_columns(key=pl.col("id") % KEYS)
        totals = keyed.key_by("key").aggregate(self.uid, **self.expressions)
        totals.write("out", UpsertSink(PostgresTable("totals", key=["key"], create=True)))
        keyed.deduplicate("firsts", "key").write("first", TwoPhaseCommitSink(PostgresTable("firsts", create=True)))
        return job


def run(url: str, job: Job, *, stop_at: str | None = None, warn: Callable[[str], None] = print) -> RunSummary:
    def listen(event: Event) -> None:
        if event.name == stop_at:
            raise RecordError("stopped")

    telemetry = Telemetry()
    telemetry.subscribe(listen)
    return run_job(job, Database(url, "store"), {}, RunOptions(warn=warn), telemetry, StopSignal())


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def check(url: str, count: int) -> None:
    expected = [(key, sum(range(key, count, KEYS)), len(range(key, count, KEYS))) for key in range(min(KEYS, count))]
    assert query(url, "SELECT key, total, rows FROM totals ORDER BY key") == expected
    assert query(url, "SELECT id, key FROM firsts ORDER BY id") == [(key, key) for key in range(min(KEYS, count))]


def test_state_goes_on_from_run_to_run(store_url: str) -> None:
    for count in (3, 25, 26, 60):
        assert run(store_url, Totals(count).job()).exit_code == 0
        check(store_url, count)


def test_run_with_nothing_new_writes_no_state(store_url: str) -> None:
    assert run(store_url, Totals(25).job()).exit_code == 0
    before = query(store_url, "SELECT * FROM etl.state ORDER BY uid, key_group, checkpoint_id")
    summary = run(store_url, Totals(25).job())
    assert (summary.exit_code, summary.rows_read) == (0, 0)
    assert query(store_url, "SELECT * FROM etl.state ORDER BY uid, key_group, checkpoint_id") == before


def test_parallelism_may_change_from_run_to_run(store_url: str) -> None:
    for number, parallelism in enumerate((1, 4, 2, 128, 3), start=1):
        assert run(store_url, Totals(number * 21, parallelism).job()).exit_code == 0
        check(store_url, number * 21)


def test_failed_run_leaves_no_state_of_its_checkpoint(store_url: str) -> None:
    assert run(store_url, Totals(25).job()).exit_code == 0
    before = query(store_url, "SELECT * FROM etl.state ORDER BY uid, key_group, checkpoint_id")
    assert run(store_url, Totals(40).job(), stop_at="checkpoint.recorded").exit_code == 65
    assert query(store_url, "SELECT * FROM etl.state ORDER BY uid, key_group, checkpoint_id") == before
    assert run(store_url, Totals(40).job()).exit_code == 0
    check(store_url, 40)


@pytest.mark.parametrize("keep", [1, 2])
def test_chunks_that_no_checkpoint_needs_are_pruned(store_url: str, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "PRUNE_STATE_EVERY", 1)
    for count in range(10, 300, 30):
        assert run(store_url, Totals(count, keep=keep).job()).exit_code == 0
        check(store_url, count)
    # Of a chain that is not needed any more nothing is left: each key group has one, and perhaps its successor.
    chains = query(store_url, "SELECT max(chains) FROM (SELECT count(*) AS chains FROM etl.state"
                              " WHERE sequence = 0 GROUP BY uid, key_group) AS counted")  # fmt: skip
    assert chains[0][0] <= keep
    assert query(store_url, "SELECT count(*) FROM etl.checkpoint") == [(keep,)]


def test_renamed_operator_is_refused_and_named(store_url: str) -> None:
    assert run(store_url, Totals(10).job()).exit_code == 0
    refused = run(store_url, Totals(20, uid="sums").job())
    assert (refused.exit_code, refused.restarts) == (70, 0)
    assert refused.error == (
        "stored state of operator(s) totals has no operator in the job; declare a new uid with"
        ' Job(…, renamed={"totals": "…"}), or Job(…, forget=[\'totals\']) to give this state up'
    )
    check(store_url, 10)


def test_state_that_is_given_up_goes_with_the_checkpoints_that_need_it(store_url: str) -> None:
    told: list[str] = []
    assert run(store_url, Totals(10, keep=2).job()).exit_code == 0
    for count in (20, 30, 40):
        job = Totals(count, keep=2, uid="sums", forget=("totals",)).job()
        assert run(store_url, job, warn=told.append).exit_code == 0
    assert told == ["new operator(s) sums: they know what is read from now on, not what was read before"]
    assert query(store_url, "SELECT key, total FROM totals ORDER BY key") == [
        (key, sum(number for number in range(10, 40) if number % KEYS == key)) for key in range(KEYS)
    ]
    assert query(store_url, "SELECT DISTINCT uid FROM etl.state ORDER BY uid") == [("firsts",), ("sums",)]


def test_operator_that_was_removed_and_comes_back_begins_anew(store_url: str) -> None:
    """What it had stored in its earlier life is neither read nor in the way."""
    assert run(store_url, Totals(30).job()).exit_code == 0
    assert run(store_url, Totals(40, uid="sums", forget=("totals",)).job()).exit_code == 0
    told: list[str] = []
    assert run(store_url, Totals(43, forget=("sums",)).job(), warn=told.append).exit_code == 0
    assert told == ["new operator(s) totals: they know what is read from now on, not what was read before"]
    for count in (44, 80):
        assert run(store_url, Totals(count).job()).exit_code == 0
        assert query(store_url, "SELECT key, total FROM totals ORDER BY key") == [
            (key, sum(number for number in range(40, count) if number % KEYS == key))
            if any(number % KEYS == key for number in range(40, count))
            else (key, sum(number for number in range(30, 40) if number % KEYS == key))
            for key in range(KEYS)
        ]


def test_changed_expression_is_told(store_url: str) -> None:
    told: list[str] = []
    assert run(store_url, Totals(10).job(), warn=told.append).exit_code == 0
    changed = Totals(20, expressions={"total": (pl.col("id") * 2).sum(), "rows": pl.len()})
    assert run(store_url, changed.job(), warn=told.append).exit_code == 0
    assert told == [
        'operator "totals" was "aggregate by key: total=col("id").sum(), rows=len()" and is "aggregate by key:'
        ' total=[(col("id")) * (dyn int: 2)].sum(), rows=len()" now: it goes on from what it remembers; to begin anew,'
        " give it a new uid"
    ]


def test_operator_that_is_still_there_is_not_forgotten(store_url: str) -> None:
    with pytest.raises(ConfigurationError, match='it names "totals", which the job has'):
        Totals(10, forget=("totals",)).job().graph()


def test_changed_aggregation_is_refused_by_name(store_url: str) -> None:
    assert run(store_url, Totals(10).job()).exit_code == 0
    changed = Totals(20, expressions={"total": pl.col("id").max(), "rows": pl.len()})
    refused = run(store_url, changed.job())
    assert refused.exit_code == 70
    assert refused.error is not None
    assert refused.error.startswith(
        'state of operator "totals" has columns key (int64), total.sum (decimal128(38, 0)), rows.len (int64), and the'
        " job's operator keeps key (int64), total.max (int64), rows.len (int64)"
    )
    check(store_url, 10)


TAMPERED = {
    "newest chunk": (
        "DELETE FROM etl.state WHERE uid = 'totals' AND checkpoint_id = (SELECT max(checkpoint_id) FROM etl.state)",
        "etl.state: checkpoint 3 has counted ",
    ),
    "chunk in between": (
        "DELETE FROM etl.state s WHERE uid = 'totals' AND sequence = 0"
        " AND (key_group, checkpoint_id + 1) IN (SELECT key_group, checkpoint_id FROM etl.state WHERE sequence = 1)",
        "etl.state: checkpoint 1 has counted ",
    ),
    "all": ("DELETE FROM etl.state", "etl.state: checkpoint 1 has counted "),
    "content": (
        "UPDATE etl.state SET content = set_byte(content, 20, 255 - get_byte(content, 20)) WHERE uid = 'firsts'",
        'etl.state: that of operator "firsts", key group ',
    ),
    "another key group": (
        "UPDATE etl.state SET key_group = 127 - key_group WHERE uid = 'totals'",
        'etl.state: that of operator "totals", key group ',
    ),
    "states without an operator": (
        "UPDATE etl.checkpoint SET states = states - 'totals'",
        "etl.checkpoint: states of checkpoint ",
    ),
    "states of null": ("UPDATE etl.checkpoint SET states = 'null'", "etl.checkpoint: states of checkpoint "),
    "another operator": (
        "UPDATE etl.state SET uid = 'other' WHERE uid = 'totals'",
        "etl.state: checkpoint 3 has counted ",
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_tampered_state_is_refused_and_nothing_is_touched(store_url: str, what: str) -> None:
    statement, problem = TAMPERED[what]
    assert run(store_url, Totals(35).job()).exit_code == 0
    assert query(store_url, "SELECT checkpoint_id FROM etl.head") == [(3,)]
    query(store_url, statement)
    refused = run(store_url, Totals(60).job())
    assert (refused.exit_code, refused.restarts) == (70, 0)
    assert refused.error is not None
    assert refused.error.startswith(problem)
    assert CURE in refused.error
    check(store_url, 35)


def test_state_is_shown_in_a_view(store_url: str) -> None:
    assert run(store_url, Totals(35).job()).exit_code == 0
    shown = query(store_url, "SELECT job, operator, key_groups, last_changed FROM etl.operator_states ORDER BY 2")
    assert [(job, uid, last) for job, uid, _, last in shown] == [("totals", "firsts", 1), ("totals", "totals", 3)]
    assert all(1 <= groups <= KEYS for _, _, groups, _ in shown)


def test_operator_behind_an_operator_gets_what_belongs_to_the_checkpoint(store_url: str) -> None:
    """What the first emits at a barrier is part of that checkpoint for the second as well, at any parallelism."""
    for count, parallelism in ((10, 2), (45, 3), (61, 1)):
        job = Job("chained", checkpoint=CheckpointPolicy(interval_s=60.0, rows=10), parallelism=parallelism)
        numbers = job.read("numbers", Numbers(count, batch_rows=3)).with_columns(key=pl.col("id") % KEYS)
        per_key = numbers.key_by("key").aggregate("per_key", rows=pl.len())
        by_parity = per_key.with_columns(odd=pl.col("key") % 2 == 1).key_by("odd")
        newest = by_parity.process("newest", keep_newest, state={"rows": MapState("int8", "int8")}, schema=NEWEST)
        newest.write("out", TransactionalSink(PostgresTable("parity", key=["odd"], create=True)))
        assert run(store_url, job).exit_code == 0
        sizes = {key: len(range(key, count, KEYS)) for key in range(KEYS)}
        assert query(store_url, "SELECT odd, rows, keys FROM parity ORDER BY odd") == [
            (odd, sum(size for key, size in sizes.items() if key % 2 == odd), 3 if odd else 4) for odd in (False, True)
        ]


NEWEST = {"odd": "bool", "rows": "int8", "keys": "int8"}


def keep_newest(result: dict[str, Any], state: Any) -> Iterator[dict[str, Any]]:
    state.rows[result["key"]] = result["rows"]
    yield {"odd": result["odd"], "rows": sum(state.rows.values()), "keys": len(state.rows)}


def test_owner_gives_signs_of_life_while_state_is_read(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading may take longer than a heartbeat may stand still."""
    assert run(store_url, Totals(10).job()).exit_code == 0
    restore, beats = state.restore, "SELECT heartbeat FROM etl.head"

    def slow(*arguments: Any) -> Any:
        before = query(store_url, beats)
        wait_until(lambda: query(store_url, beats) > before, "a heartbeat")
        return restore(*arguments)

    monkeypatch.setattr(state, "restore", slow)
    job = Totals(20).job()
    job.owner_timeout_s = 1.0
    assert run(store_url, job).exit_code == 0
    check(store_url, 20)
