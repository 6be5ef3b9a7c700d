"""Savepoints in the store: names of checkpoints, that no pruning takes away anything of."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from etl.clock import SystemClock
from etl.codec import encode_rows
from etl.errors import ConfigurationError, StateError, TransientError
from etl.source import Position
from etl.state import Fragment, StateChunk
from etl.store import checkpoints, pruning, runs, savepoints, state
from etl.store import lease as leases
from etl.store.checkpoints import CompletedCheckpoint
from etl.store.database import Database, StoreConnection
from etl.store.lease import Lease
from etl.store.state import OperatorState
from etl.store.tables import Trigger
from etl.transaction import transaction
from tests.support.waiting import wait_until

GROUPS = 4
Contents = dict[str, list[tuple[int, int, int]]]
"""By operator: key group, place in the chain, what the chunk holds."""


@dataclass
class Job:
    """A job whose checkpoints are made up, with what each of them must give back."""

    session: StoreConnection
    lease: Lease
    run_id: int
    positions: dict[str, dict[str, Position]] = field(default_factory=lambda: {"a": {}, "b": {}})
    chains: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    since: dict[str, int] = field(default_factory=dict)
    number: int = 0

    def complete(self, trigger: Trigger = Trigger.ROWS, keep: int = 10, *, ending: bool = False, **parts: Any) -> None:
        self.number += 1
        chunks = {uid: sum(map(len, chains.values())) for uid, chains in self.chains.items()}
        states = {uid: OperatorState(count, self.since[uid], uid) for uid, count in chunks.items()}
        completed = CompletedCheckpoint(
            self.number,
            trigger,
            parts.get("positions", {}),
            (),
            5,
            {"out": 5},
            1,
            parts.get("state", ()),
            {},
            states,
            {"out": 5 * self.number},
            ending,
        )
        with transaction(self.session.driver):
            checkpoints.advance_head(self.session, self.lease, self.number)
            checkpoints.record(self.session, self.lease, self.run_id, completed)
            if trigger is Trigger.SAVEPOINT:
                savepoints.grant(self.session, self.lease, self.number, ending=ending)
            pruning.prune(self.session, self.lease, self.number, keep)

    def advance(self, random_: random.Random, keep: int) -> None:
        """A checkpoint in which some splits and key groups have changed, and perhaps an operator came or went."""
        moved: dict[str, dict[str, Position]] = {}
        for uid, splits in self.positions.items():
            for split in random_.sample(range(3), random_.randint(0, 2)):
                splits[f"s{split}"] = moved.setdefault(uid, {})[f"s{split}"] = {"next": random_.randint(0, 99)}
        number, written = self.number + 1, []
        if random_.random() < 0.15 and "late" in self.chains:
            del self.chains["late"], self.since["late"]
        elif random_.random() < 0.2 or number == 1:
            for uid in ("early", "late"):
                if uid not in self.chains:
                    self.chains[uid], self.since[uid] = {}, number
        for uid, chains in self.chains.items():
            for group in random_.sample(range(GROUPS), random_.randint(0, 2)):
                chain = chains.setdefault(group, [])
                if random_.random() < 0.3:
                    chain.clear()
                chain.append(random_.randint(0, 10**6))
                written.append(chunk(uid, group, len(chain) - 1, chain[-1]))
        self.complete(keep=keep, positions=moved, state=written)

    def expected(self) -> tuple[dict[str, dict[str, Position]], Contents]:
        """What the last checkpoint must give back."""
        contents = {
            uid: [(group, place, value) for group in sorted(chains) for place, value in enumerate(chains[group])]
            for uid, chains in self.chains.items()
        }
        return {uid: dict(splits) for uid, splits in self.positions.items() if splits}, contents

    def found(self, cut: savepoints.Cut) -> tuple[Mapping[str, Mapping[str, Position]], Contents]:
        """What a checkpoint gives back."""
        lease = replace(self.lease, incarnation=cut.incarnation, checkpoint_id=cut.checkpoint_id)
        fragments = state.restore(self.session.driver, cut, cut.states)
        contents = {uid: [content(one) for one in of_uid] for uid, of_uid in fragments.items()}
        return checkpoints.restore(self.session, lease).positions, contents

    def find(self, name: str) -> savepoints.Cut:
        return savepoints.find(self.session.driver, self.lease.job_id, name)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        return self.session.driver.execute(statement.encode()).fetchall()


def chunk(uid: str, group: int, sequence: int, value: int) -> StateChunk:
    encoded = encode_rows(pa.record_batch({"value": [value]}))
    return StateChunk(uid, group, sequence, 1, encoded, hashlib.sha256(encoded).digest())


def content(fragment: Fragment) -> tuple[int, int, int]:
    return fragment.key_group, fragment.sequence, fragment.rows["value"][0].as_py()


@pytest.fixture
def job(store_url: str) -> Iterator[Job]:
    with Database(store_url, "store").session("test") as session:
        job_id = leases.register_job(session, "job")
        lease = leases.claim(session, job_id, "job", 1.0, SystemClock(), Event())
        yield Job(session, lease, runs.start(session, lease, "test"))


@pytest.fixture
def other(store_url: str) -> Iterator[StoreConnection]:
    with Database(store_url, "store").session("test") as session:
        yield session


def take(session: StoreConnection, job: Job, name: str, *, stop: bool = False, timeout_s: float = 30.0) -> int:
    return savepoints.take(
        session, job.lease.job_id, name, stop=stop, timeout_s=timeout_s, clock=SystemClock(), cancelled=Event()
    )


@pytest.mark.parametrize("seed", range(6))
def test_pruning_takes_nothing_that_a_kept_checkpoint_reads(
    job: Job, other: StoreConnection, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "PRUNE_STATE_EVERY", 1)
    leases.release(job.session.driver, job.lease)
    random_ = random.Random(seed)
    expected: dict[str, tuple[Any, Contents]] = {}
    for number in range(1, 60):
        job.advance(random_, keep=3)
        expected[str(number)] = job.expected()
        if random_.random() < 0.15:
            take(other, job, f"s{number}")
            expected[f"s{number}"] = expected[str(number)]
        named = [name for name in expected if name.startswith("s")]
        if named and random_.random() < 0.05:
            dropped = random_.choice(named)
            savepoints.drop(other.driver, job.lease.job_id, [dropped])
            del expected[dropped]
        kept = {str(number) for (number,) in job.query("SELECT checkpoint_id FROM etl.checkpoint")}
        expected = {name: one for name, one in expected.items() if name in kept or name.startswith("s")}
        assert {str(last) for last in range(max(1, number - 2), number + 1)} <= kept
        for name, cut in expected.items():
            assert job.found(job.find(name)) == cut, name


def test_dropped_savepoint_leaves_nothing_behind(
    job: Job, other: StoreConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "PRUNE_STATE_EVERY", 1)
    leases.release(job.session.driver, job.lease)
    job.since["o"], job.chains["o"] = 1, {0: []}

    def replace_all() -> None:
        job.chains["o"][0] = [7]
        job.complete(keep=2, positions={"a": {"s": {"next": job.number}}}, state=[chunk("o", 0, 0, 7)])

    replace_all()
    take(other, job, "first")
    for _ in range(20):
        replace_all()
    read = "SELECT checkpoint_id FROM etl.{} ORDER BY 1"
    for table in ("checkpoint", "position", "state"):
        assert job.query(read.format(table)) == [(1,), (20,), (21,)]
    savepoints.drop(other.driver, job.lease.job_id, ["first"])
    replace_all()
    for table in ("checkpoint", "position", "state"):
        assert job.query(read.format(table)) == [(21,), (22,)]


def test_savepoint_of_an_idle_job_is_its_last_checkpoint(job: Job, other: StoreConnection) -> None:
    leases.release(job.session.driver, job.lease)
    with pytest.raises(ConfigurationError, match="the job has completed no checkpoint yet; run it first"):
        take(other, job, "early")
    job.complete()
    job.complete()
    assert take(other, job, "now") == 2
    assert (job.find("now").checkpoint_id, job.find("now").rows_written_total) == (2, {"out": 10})
    with pytest.raises(ConfigurationError, match='savepoint "now" exists already, of checkpoint 2'):
        take(other, job, "now")
    assert job.query("SELECT * FROM etl.savepoint_request") == []


@pytest.mark.parametrize("name", ["", "7", "7a", "-a", "a b", "a" * 101, "ä", "a\n"])
def test_what_is_no_name_is_refused(job: Job, other: StoreConnection, name: str) -> None:
    with pytest.raises(ConfigurationError, match="is no name of a savepoint"):
        take(other, job, name)


def test_running_job_is_asked_and_grants_with_its_checkpoint(job: Job, other: StoreConnection) -> None:
    job.complete()
    assert leases.beat(job.session.driver, job.lease) is None
    with taking(other, job, "asked") as taken:
        wait_until(lambda: leases.beat(job.session.driver, job.lease) is False, "the request")
        job.complete()
        assert taken == []
        job.complete(Trigger.SAVEPOINT)
    assert taken == [3]
    assert job.query("SELECT * FROM etl.savepoint_request") == []


def test_request_for_the_end_is_granted_by_the_last_checkpoint_only(job: Job, other: StoreConnection) -> None:
    with taking(other, job, "end", stop=True) as taken:
        wait_until(lambda: leases.beat(job.session.driver, job.lease) is True, "the request")
        job.complete(Trigger.SAVEPOINT)
        assert job.query("SELECT name FROM etl.savepoint") == []
        job.complete(Trigger.SAVEPOINT, ending=True)
        assert job.query("SELECT name, checkpoint_id FROM etl.savepoint") == [("end", 2)]
        assert taken == []
        leases.release(job.session.driver, job.lease)
    assert taken == [2]


def test_savepoint_of_a_run_that_ends_without_one_is_its_last_checkpoint(job: Job, other: StoreConnection) -> None:
    job.complete()
    with taking(other, job, "asked") as taken:
        wait_until(lambda: leases.beat(job.session.driver, job.lease) is False, "the request")
        job.complete()
        leases.release(job.session.driver, job.lease)
    assert taken == [2]
    assert job.query("SELECT * FROM etl.savepoint_request") == []


def test_savepoint_that_does_not_come_in_time_will_not_come(job: Job, other: StoreConnection) -> None:
    with pytest.raises(TransientError, match='has not taken savepoint "late" within'):
        take(other, job, "late", timeout_s=0.2)
    assert leases.beat(job.session.driver, job.lease) is None
    job.complete(Trigger.SAVEPOINT)
    assert job.query("SELECT * FROM etl.savepoint") == []


def test_savepoint_that_is_being_made_when_the_time_is_up_is_waited_for(
    job: Job, other: StoreConnection, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = (
        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        " AND query LIKE 'DELETE FROM etl.savepoint_request%'"
    )

    def await_the_end_of_patience(*_: object) -> None:
        with psycopg.connect(store_url, autocommit=True) as watching:
            wait_until(lambda: watching.execute(blocked).fetchone() is not None, "the withdrawal")

    monkeypatch.setattr(pruning, "prune", await_the_end_of_patience)
    with taking(other, job, "just", timeout_s=0.5) as taken:
        wait_until(lambda: leases.beat(job.session.driver, job.lease) is False, "the request")
        job.complete(Trigger.SAVEPOINT)
    assert taken == [1]


def test_unknown_savepoint_is_refused_with_those_that_are_there(job: Job, other: StoreConnection) -> None:
    leases.release(job.session.driver, job.lease)
    job.complete()
    take(other, job, "there")
    for name in ("nowhere", "2", "9" * 30):
        with pytest.raises(ConfigurationError, match=f'no savepoint or kept checkpoint "{name}"; there are: there, 1'):
            job.find(name)
    with pytest.raises(ConfigurationError, match='no savepoint "nowhere"; nothing was dropped; there are: there, 1'):
        savepoints.drop(other.driver, job.lease.job_id, ["there", "nowhere"])
    assert job.find("there").checkpoint_id == job.find("1").checkpoint_id == 1


@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE etl.savepoint SET checkpoint_id = 1",
        "UPDATE etl.savepoint SET name = 'there'",
        "UPDATE etl.checkpoint SET chunks = 7 WHERE checkpoint_id = 2",
    ],
)
def test_edited_savepoint_is_refused(job: Job, other: StoreConnection, edit: str) -> None:
    leases.release(job.session.driver, job.lease)
    job.complete()
    job.complete()
    take(other, job, "here")
    other.driver.execute(edit.encode())
    with pytest.raises(StateError, match="is not the one that was written"):
        job.find("there" if "there" in edit else "here")


def test_checkpoint_with_a_name_cannot_be_deleted_by_hand(job: Job, other: StoreConnection) -> None:
    leases.release(job.session.driver, job.lease)
    job.complete()
    take(other, job, "here")
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        other.driver.execute("DELETE FROM etl.checkpoint")


class taking(ExitStack):  # noqa: N801 - a block
    """A savepoint that is asked for during the block; the list has its number after the block."""

    def __init__(
        self, session: StoreConnection, job: Job, name: str, *, stop: bool = False, timeout_s: float = 30.0
    ) -> None:
        super().__init__()
        self._taken: list[int] = []
        self._thread = threading.Thread(
            target=lambda: self._taken.append(take(session, job, name, stop=stop, timeout_s=timeout_s))
        )

    def __enter__(self) -> list[int]:  # type: ignore[override]
        self._thread.start()
        self.callback(self._thread.join)
        return self._taken
