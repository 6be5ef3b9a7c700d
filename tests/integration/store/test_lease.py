"""Claims: one owner at a time, dead and hung ones replaced, outdated ones refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from threading import Event

import psycopg
import pytest

from etl.clock import SystemClock
from etl.errors import AlreadyRunningError, FencedError
from etl.store import lease as leases
from etl.store.database import Database, StoreConnection
from etl.store.lease import Lease


@pytest.fixture
def store(store_url: str) -> Database:
    return Database(store_url, "store")


@pytest.fixture
def session(store: Database) -> Iterator[StoreConnection]:
    with store.session("test") as session:
        yield session


@pytest.fixture
def rival(store: Database) -> Iterator[StoreConnection]:
    with store.session("test") as session:
        yield session


@pytest.fixture
def job_id(session: StoreConnection) -> str:
    return leases.register_job(session, "job")


def claim(session: StoreConnection, job_id: str, owner_timeout_s: float = 0.3) -> Lease:
    lease = leases.claim(session, job_id, "job", owner_timeout_s, SystemClock(), Event())
    session.rename(leases.application_name(job_id, lease.epoch, "owner"))
    return lease


def test_job_keeps_its_id(session: StoreConnection, rival: StoreConnection) -> None:
    assert leases.register_job(session, "a_b") == leases.register_job(rival, "a_b")
    assert leases.register_job(session, "a_b") != leases.register_job(session, "axb")


def test_sinks_keep_their_numbers(session: StoreConnection, job_id: str) -> None:
    assert leases.register_sinks(session, job_id, {"b": "x", "a": "y"}) == {"b": 1, "a": 2}
    assert leases.register_sinks(session, job_id, {"c": "z", "a": "new"}) == {"b": 1, "a": 2, "c": 3}
    assert leases.known_targets(session, job_id) == {"b": "x", "a": "new", "c": "z"}


def test_first_claim_has_epoch_one_and_no_checkpoint(session: StoreConnection, job_id: str) -> None:
    assert claim(session, job_id) == Lease(job_id, epoch=1, incarnation=1, checkpoint_id=0, failures=0)


def test_claim_is_refused_when_the_owner_beats(store: Database, session: StoreConnection, job_id: str) -> None:
    lease = claim(session, job_id)
    beaten = Event()

    class BeatingClock(SystemClock):
        """Every wait of the observer is a beat of the owner."""

        def wait(self, event: Event, timeout_s: float) -> bool:
            leases.beat(session.driver, lease)
            beaten.set()
            return super().wait(event, 0)

    with store.session("test") as other, pytest.raises(AlreadyRunningError, match='job "job" is already running'):
        leases.claim(other, job_id, "job", 60.0, BeatingClock(), Event())
    assert beaten.is_set()


def test_claim_takes_over_at_once_when_the_owner_is_gone(store: Database, rival: StoreConnection) -> None:
    with store.session("test") as session:
        job_id = leases.register_job(session, "job")
        claim(session, job_id)
        pid = session.driver.info.backend_pid
    rival.driver.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
    assert claim(rival, job_id, owner_timeout_s=3600).epoch == 2


def test_claim_takes_over_when_the_heartbeat_stands_still(
    session: StoreConnection, rival: StoreConnection, job_id: str
) -> None:
    lease = claim(session, job_id)
    assert claim(rival, job_id, owner_timeout_s=0.3).epoch == 2
    with pytest.raises(FencedError):
        leases.beat(session.driver, lease)


def test_claim_ends_the_session_that_holds_the_head_row(
    session: StoreConnection, rival: StoreConnection, job_id: str
) -> None:
    claim(session, job_id)
    session.driver.execute("BEGIN")
    session.driver.execute("UPDATE etl.head SET heartbeat = heartbeat WHERE job_id = %s", [job_id])
    assert claim(rival, job_id, owner_timeout_s=0.3).epoch == 2
    with pytest.raises(psycopg.OperationalError):
        session.driver.execute("COMMIT")


def test_released_job_is_claimed_at_once(session: StoreConnection, rival: StoreConnection, job_id: str) -> None:
    leases.release(session.driver, claim(session, job_id))
    assert claim(rival, job_id, owner_timeout_s=3600).epoch == 2


def test_reclaim_raises_the_epoch(session: StoreConnection, job_id: str) -> None:
    assert leases.reclaim(session, claim(session, job_id)).epoch == 2


def test_reclaim_ends_the_session_that_holds_the_head_row(
    session: StoreConnection, rival: StoreConnection, job_id: str
) -> None:
    former = claim(session, job_id)
    session.driver.execute("BEGIN")
    session.driver.execute("UPDATE etl.head SET heartbeat = heartbeat WHERE job_id = %s", [job_id])
    lease = leases.reclaim(rival, former)
    assert (lease.epoch, lease.failures) == (2, 1)
    with pytest.raises(psycopg.OperationalError):
        session.driver.execute("COMMIT")


def test_reclaim_is_refused_when_a_newer_run_owns_the_job(
    session: StoreConnection, rival: StoreConnection, job_id: str
) -> None:
    former = claim(session, job_id)
    claim(rival, job_id, owner_timeout_s=0.1)
    with pytest.raises(FencedError, match="epoch 1 was overtaken"):
        leases.reclaim(rival, former)


def test_terminate_ends_only_older_sessions_of_the_same_job(store: Database, rival: StoreConnection) -> None:
    names = ["etl:aa:1:x", "etl:aa:2:x", "etl:ab:1:x", "etl:aa:claim"]
    sessions = [store.connect(name) for name in names]
    assert leases.terminate_sessions(rival.driver, "aa", below_epoch=2) == []
    left = rival.driver.execute(
        "SELECT application_name FROM pg_stat_activity"
        " WHERE application_name LIKE 'etl:a%%' AND datname = current_database()"
        " ORDER BY 1"
    ).fetchall()
    assert [name for (name,) in left] == sorted(names[1:])
    for one in sessions:
        one.close()


def test_terminate_names_sessions_that_do_not_end(store: Database, rival: StoreConnection) -> None:
    frozen = store.connect("etl:aa:1:x")
    pid = frozen.pgconn.backend_pid
    try:
        os.kill(pid, signal.SIGSTOP)
    except (ProcessLookupError, PermissionError) as error:
        pytest.skip(f"the server's processes cannot be stopped from here: {error}")
    try:
        assert leases.terminate_sessions(rival.driver, "aa", below_epoch=2, timeout_ms=100) == [pid]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert leases.terminate_sessions(rival.driver, "aa", below_epoch=2) == []
    frozen.close()
