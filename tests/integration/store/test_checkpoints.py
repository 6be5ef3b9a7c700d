"""Completed checkpoints: compare-and-set, one consistent cut, pruning that never loses a position."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import psycopg
import pytest
from psycopg import sql

from etl.clock import SystemClock
from etl.errors import FencedError
from etl.sink import Committable
from etl.store import checkpoints, pruning, runs
from etl.store import lease as leases
from etl.store.checkpoints import CompletedCheckpoint
from etl.store.database import Database, StoreConnection
from etl.store.lease import Lease
from etl.store.runs import RunTotals
from etl.store.tables import RunStatus, Trigger
from etl.transaction import transaction


@dataclass
class Owner:
    session: StoreConnection
    lease: Lease
    run_id: int

    def complete(self, number: int, positions: dict[str, dict[str, dict[str, int]]], keep: int = 10) -> None:
        handles = [Committable("sink", 0, number, self.lease.epoch, 5, {"gid": f"g{number}"})]
        completed = CompletedCheckpoint(number, Trigger.ROWS, positions, handles, 5, {"sink": 5}, 12)
        with transaction(self.session.driver):
            checkpoints.advance_head(self.session, self.lease, number)
            checkpoints.record(self.session, self.lease, self.run_id, completed)
            pruning.prune(self.session, self.lease, number, keep)

    def restore(self, number: int) -> checkpoints.Restored:
        return checkpoints.restore(self.session, replace(self.lease, checkpoint_id=number))


@pytest.fixture
def owner(store_url: str) -> Iterator[Owner]:
    with Database(store_url, "store").session("test") as session:
        job_id = leases.register_job(session, "job")
        lease = leases.claim(session, job_id, "job", 1.0, SystemClock(), Event())
        yield Owner(session, lease, runs.start(session, lease, "test"))


def test_restore_is_empty_before_the_first_checkpoint(owner: Owner) -> None:
    assert owner.restore(0) == checkpoints.Restored(0, {}, [])


def test_restore_gives_the_newest_position_of_each_split(owner: Owner) -> None:
    owner.complete(1, {"src": {"a": {"next": 1}, "b": {"next": 1}}})
    owner.complete(2, {"src": {"a": {"next": 2}}, "other": {"a": {"next": 7}}})
    restored = owner.restore(2)
    assert restored.positions == {"src": {"a": {"next": 2}, "b": {"next": 1}}, "other": {"a": {"next": 7}}}
    assert restored.committables == [Committable("sink", 0, 2, 1, 5, {"gid": "g2"})]


def test_restore_sees_nothing_newer_than_its_checkpoint(owner: Owner) -> None:
    owner.complete(1, {"src": {"a": {"next": 1}}})
    owner.complete(2, {"src": {"a": {"next": 2}}})
    assert owner.restore(1).positions == {"src": {"a": {"next": 1}}}


def test_head_is_refused_when_the_checkpoint_is_not_the_next_one(owner: Owner) -> None:
    owner.complete(1, {})
    for number in (1, 3):
        with pytest.raises(FencedError, match=f"checkpoint {number} of epoch 1 was refused"):
            owner.complete(number, {})
    assert owner.session.driver.execute("SELECT checkpoint_id FROM etl.head").fetchall() == [(1,)]


def test_head_is_refused_when_a_newer_run_owns_the_job(owner: Owner) -> None:
    owner.session.driver.execute("UPDATE etl.head SET epoch = epoch + 1")
    with pytest.raises(FencedError):
        owner.complete(1, {})


def test_prune_keeps_the_last_position_of_a_split_that_stands_still(owner: Owner) -> None:
    owner.complete(1, {"src": {"still": {"next": 9}}})
    for number in range(2, 9):
        owner.complete(number, {"src": {"moving": {"next": number}}}, keep=3)
    assert owner.restore(8).positions == {"src": {"still": {"next": 9}, "moving": {"next": 8}}}
    assert owner.restore(6).positions == {"src": {"still": {"next": 9}, "moving": {"next": 6}}}
    rows = owner.session.driver.execute("SELECT split_id, checkpoint_id FROM etl.position ORDER BY 1, 2").fetchall()
    assert rows == [("moving", 6), ("moving", 7), ("moving", 8), ("still", 1)]
    kept = owner.session.driver.execute("SELECT checkpoint_id FROM etl.checkpoint ORDER BY 1").fetchall()
    assert kept == [(6,), (7,), (8,)]


def test_completing_sets_the_failures_back(owner: Owner) -> None:
    owner.lease = leases.reclaim(owner.session, owner.lease)
    assert owner.lease.failures == 1
    owner.complete(1, {})
    assert owner.session.driver.execute("SELECT failures FROM etl.head").fetchall() == [(0,)]


def test_run_that_never_ended_is_marked_crashed_by_the_next_one(owner: Owner) -> None:
    runs.start(owner.session, owner.lease, "test")
    rows = owner.session.driver.execute("SELECT status FROM etl.run ORDER BY run_id").fetchall()
    assert rows == [(RunStatus.CRASHED,), (RunStatus.RUNNING,)]


def test_run_totals_survive_in_the_store(owner: Owner) -> None:
    totals = RunTotals().plus(5, {"a": 3}).plus(2, {"a": 1, "b": 2})
    runs.save_totals(owner.session, owner.run_id, totals, 2)
    assert runs.load_totals(owner.session, owner.run_id) == (RunTotals(7, {"a": 4, "b": 2}), 2)


def test_views_show_the_job_to_a_person(owner: Owner) -> None:
    owner.complete(1, {"src": {"a": {"next": 1}}})
    rows = owner.session.driver.execute("SELECT job, checkpoint, running, last_status FROM etl.jobs").fetchall()
    assert rows == [("job", 1, True, "running")]
    positions = owner.session.driver.execute("SELECT job, uid, split, position FROM etl.positions").fetchall()
    assert positions == [("job", "src", "a", {"next": 1})]
    seen = owner.session.driver.execute("SELECT checkpoint, trigger, current FROM etl.checkpoints").fetchall()
    assert seen == [(1, "rows", True)]


def test_views_show_another_role_that_the_job_is_running(owner: Owner, store_url: str) -> None:
    name = f"etl_test_{secrets.token_hex(6)}"
    role = sql.Identifier(name)
    admin = owner.session.driver
    admin.execute(sql.SQL("CREATE ROLE {0}; GRANT USAGE ON SCHEMA etl TO {0}").format(role))
    admin.execute(sql.SQL("GRANT SELECT ON etl.jobs TO {}").format(role))
    try:
        with psycopg.connect(store_url, options=f"-c role={name}") as other:
            hidden = other.execute("SELECT backend_start FROM pg_stat_activity WHERE pid = %s", [owner_pid(admin)])
            assert hidden.fetchall() == [(None,)]
            assert other.execute("SELECT job, running FROM etl.jobs").fetchall() == [("job", True)]
    finally:
        admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(role))


def owner_pid(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("SELECT owner_pid FROM etl.head").fetchone()
    assert row is not None
    return int(row[0])


def test_checkpoint_counts_what_belongs_to_it(owner: Owner) -> None:
    owner.complete(1, {"src": {"a": {"next": 1}, "b": {"next": 1}}})
    owner.complete(2, {"src": {"b": {"next": 2}, "c": {"next": 1}}, "other": {"a": {"next": 1}}})
    owner.complete(3, {})
    counts = "SELECT checkpoint_id, units, positions, splits FROM etl.checkpoint ORDER BY 1"
    assert owner.session.driver.execute(counts).fetchall() == [(1, 1, 2, 2), (2, 1, 3, 4), (3, 1, 0, 4)]


def test_split_whose_old_rows_were_pruned_is_not_counted_again(owner: Owner) -> None:
    for number in range(1, 6):
        owner.complete(number, {"src": {"a": {"next": number}}}, keep=1)
    counts = "SELECT checkpoint_id, positions, splits FROM etl.checkpoint"
    assert owner.session.driver.execute(counts).fetchall() == [(5, 1, 1)]
