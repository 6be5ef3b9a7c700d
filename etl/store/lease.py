"""Who may run a job: one owner at a time, fenced by the epoch in the job's ``head`` row.

An owner is *dead* when its session is gone from ``pg_stat_activity`` (taken over at once), *hung* when its heartbeat
counter has not moved for ``owner_timeout_s`` by the observer's own monotonic clock (its sessions are ended, then it is
taken over), and otherwise alive: the observer gives way. No wall clock decides anything, and none of this is what
keeps rows exact: that is the epoch, checked in every transaction.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Event
from typing import LiteralString

import psycopg
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from etl.clock import Clock
from etl.errors import AlreadyRunningError, ConfigurationError, FencedError, TransientError
from etl.pooling import is_transaction_pooled
from etl.store import tables
from etl.store.database import Connection, Database, StoreConnection
from etl.transaction import transaction

CLAIM_LOCK_TIMEOUT_MS = 500
TERMINATE_TIMEOUT_MS = 5_000
_CLAIM_TRIES_MAX = 200
_POLL_S = 0.1
_OUTDATED: LiteralString = (
    " FROM pg_catalog.pg_stat_activity"
    " WHERE starts_with(application_name, %s) AND usename = current_user AND pid <> pg_backend_pid()"
    " AND split_part(application_name, ':', 3) ~ '^[0-9]{1,18}$'"
    " AND split_part(application_name, ':', 3)::bigint < %s"
)


def application_name(job_id: str, epoch: int, role: str) -> str:
    """Name of a session: says whose it is, so that a successor can end what an outdated run left open."""
    return f"etl:{job_id}:{epoch}:{role}"[:63]


@dataclass(frozen=True, slots=True)
class Observation:
    """What the head row says about the current owner."""

    epoch: int
    heartbeat: int
    alive: bool
    host: str | None
    pid: int | None


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to run a job at one epoch.

    Attributes:
        job_id: The job.
        epoch: Fencing token; every claim raises it.
        incarnation: Which line of checkpoints of the job this is.
        checkpoint_id: Last completed checkpoint at the time of the claim.
        failures: Failed attempts since the last completed checkpoint, this process and former ones.
    """

    job_id: str
    epoch: int
    incarnation: int
    checkpoint_id: int
    failures: int


def random_job_id() -> str:
    """An id that no other job has."""
    return secrets.token_hex(8)


def register_job(connection: StoreConnection, name: str, new_id: str | None = None) -> str:
    """The id of a job, made on its first run; parallel first runs agree on one.

    Args:
        connection: To the store.
        name: The job's name.
        new_id: The id of a job that is not known yet, for those who have to know it before; by default a random one.
    """
    find = sa.select(tables.job.c.job_id).where(tables.job.c.name == name)
    found = connection.core.execute(find).scalar_one_or_none()
    if found is not None:
        return str(found)
    with transaction(connection.driver):
        connection.driver.execute(
            "INSERT INTO etl.job (job_id, name) VALUES (%s, %s) ON CONFLICT (name) DO NOTHING",
            [new_id or random_job_id(), name],
        )
        job_id = str(connection.core.execute(find).scalar_one())
        connection.driver.execute("INSERT INTO etl.head (job_id) VALUES (%s) ON CONFLICT DO NOTHING", [job_id])
    return job_id


def known_targets(connection: StoreConnection, job_id: str) -> dict[str, str | None]:
    """What each sink that the job has ever had wrote to last, by uid; None when that was not recorded yet."""
    query = sa.select(tables.sink.c.uid, tables.sink.c.target).where(tables.sink.c.job_id == job_id)
    return {str(uid): target for uid, target in connection.core.execute(query)}


def register_sinks(connection: StoreConnection, job_id: str, targets: Mapping[str, str]) -> dict[str, int]:
    """Record what each sink writes to, by uid. Called by the owner of the job only.

    Returns:
        Small lasting numbers of the sinks, for identifiers; also those of sinks that the job no longer has.
    """
    sink = tables.sink
    query = sa.select(sink.c.uid, sink.c.sink_id).where(sink.c.job_id == job_id)
    numbers = {str(uid): int(number) for uid, number in connection.core.execute(query)}
    for uid, target in targets.items():
        if uid not in numbers:
            numbers[uid] = max(numbers.values(), default=0) + 1
        row = insert(sink).values(job_id=job_id, uid=uid, sink_id=numbers[uid], target=target)
        update = row.on_conflict_do_update(index_elements=["job_id", "uid"], set_={"target": row.excluded.target})
        connection.core.execute(update)
    return numbers


def observe(connection: StoreConnection, job_id: str) -> Observation:
    """Read who owns the job and whether that owner's session exists."""
    row = connection.driver.execute(
        "SELECT h.epoch, h.heartbeat, a.pid IS NOT NULL, h.owner_host, h.owner_pid FROM etl.head h"
        " LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = h.owner_pid"
        "  AND coalesce(a.backend_start = h.owner_backend_start, true)"
        " WHERE h.job_id = %s",
        [job_id],
    ).fetchone()
    if row is None:
        raise TransientError(f"the head row of job {job_id} has vanished")
    return Observation(*row)


def claim(
    connection: StoreConnection, job_id: str, job_name: str, owner_timeout_s: float, clock: Clock, stop: Event
) -> Lease:
    """Become the owner of a job, or find out that somebody else is.

    Args:
        connection: The session that will be the owner's: it must stay open, and carries the heartbeat.
        job_id: The job.
        job_name: For messages.
        owner_timeout_s: How long a heartbeat may stand still before its owner counts as hung.
        clock: Monotonic time of the observer.
        stop: Set to give up waiting.

    Raises:
        AlreadyRunningError: The owner is alive, or somebody else was quicker.
    """
    seen = observe(connection, job_id)
    started_s = clock.monotonic_s()
    for _ in range(_CLAIM_TRIES_MAX + int(owner_timeout_s / _POLL_S)):
        hung = clock.monotonic_s() - started_s >= owner_timeout_s
        if not seen.alive or hung:
            lease = _try_claim(connection, job_id, seen.epoch)
            if lease is not None:
                return lease
        elif clock.wait(stop, _POLL_S):
            break
        now = observe(connection, job_id)
        if now.epoch != seen.epoch and not now.alive:
            seen, started_s = now, clock.monotonic_s()
        elif now.alive and (now.epoch, now.heartbeat) != (seen.epoch, seen.heartbeat):
            raise AlreadyRunningError(f'job "{job_name}" is already running: {_whom(now)}')
        else:
            seen = now
    raise AlreadyRunningError(f'job "{job_name}" could not be claimed: {_whom(seen)}')


def _whom(seen: Observation) -> str:
    return f"epoch {seen.epoch}, host {seen.host}, database session {seen.pid}"


def reclaim(connection: StoreConnection, former: Lease, *, failed: bool = True) -> Lease:
    """Claim again for a new attempt of the same run.

    Args:
        connection: A session that will be the owner's.
        former: The claim of the attempt before.
        failed: Whether that one counts as failed; completing a checkpoint sets the count back.

    Raises:
        FencedError: Another run has claimed the job since.
    """
    for _ in range(_CLAIM_TRIES_MAX):
        if observe(connection, former.job_id).epoch != former.epoch:
            raise FencedError(f"epoch {former.epoch} was overtaken by a newer run of the job")
        lease = _try_claim(connection, former.job_id, former.epoch, failed=int(failed))
        if lease is not None:
            return lease
    raise TransientError("the job could not be claimed again: a session that does not end when told to holds it")


def _try_claim(connection: StoreConnection, job_id: str, expected_epoch: int, failed: int = 0) -> Lease | None:
    """One compare-and-set of the epoch; None when it did not take place and the head must be looked at again."""
    driver = connection.driver
    driver.execute(f"SET lock_timeout = {CLAIM_LOCK_TIMEOUT_MS}")
    try:
        # Relies on READ COMMITTED: after waiting for the row lock the condition is checked against the newest row.
        row = driver.execute(
            "UPDATE etl.head SET epoch = epoch + 1, heartbeat = heartbeat + 1, failures = failures + %s,"
            " owner_host = %s, owner_pid = pg_backend_pid(), owner_backend_start ="
            "   (SELECT backend_start FROM pg_catalog.pg_stat_activity WHERE pid = pg_backend_pid())"
            " WHERE job_id = %s AND epoch = %s RETURNING epoch, incarnation, checkpoint_id, failures",
            [failed, socket.gethostname(), job_id, expected_epoch],
        ).fetchone()
    except psycopg.errors.LockNotAvailable:
        # The outdated owner sits in a transaction that holds the head row.
        terminate_sessions(driver, job_id, below_epoch=expected_epoch + 1)
        return None
    finally:
        driver.execute("SET lock_timeout = '60s'")
    return None if row is None else Lease(job_id, *row)


def terminate_sessions(
    connection: Connection, job_id: str, below_epoch: int, timeout_ms: int = TERMINATE_TIMEOUT_MS
) -> list[int]:
    """End the sessions of outdated runs in this server and wait until they are gone.

    A statement whose client is dead may still commit until its session has ended, so nothing is concluded from what
    is absent before this. Only sessions of the same role are ended; others cannot be, and the fence stops them.

    Returns:
        Process ids of sessions that are still there: the server did not get them to end in time.
    """
    outdated = [f"etl:{job_id}:", below_epoch]
    told = connection.execute("SELECT pg_terminate_backend(pid, %s)" + _OUTDATED, [timeout_ms, *outdated]).fetchall()
    if all(ended for (ended,) in told):
        return []
    # False is also said of a process that was gone already.
    return [pid for (pid,) in connection.execute("SELECT pid" + _OUTDATED, outdated)]


def beat(connection: Connection, lease: Lease) -> bool | None:
    """Move the heartbeat, from the owner's session.

    Returns:
        Whether a savepoint is asked for, and the end of the run with it; None when there is no such request.

    Raises:
        FencedError: A newer run owns the job.
    """
    try:
        cursor = connection.execute(
            "UPDATE etl.head h SET heartbeat = heartbeat + 1 WHERE job_id = %s AND epoch = %s"
            " RETURNING (SELECT bool_or(stop) FROM etl.savepoint_request r WHERE r.job_id = h.job_id)",
            [lease.job_id, lease.epoch],
        )
    except psycopg.errors.LockNotAvailable:
        return None  # our own completing transaction holds the row, or a claim: the next beat will tell
    row = cursor.fetchone()
    if row is None:
        raise FencedError(f"epoch {lease.epoch} was overtaken by a newer run of the job")
    stop: bool | None = row[0]
    return stop


def release(connection: Connection, lease: Lease) -> None:
    """Give the job up, so that the next run need not look whether this one is alive."""
    connection.execute(
        "UPDATE etl.head SET owner_pid = NULL, owner_backend_start = NULL, owner_host = NULL"
        " WHERE job_id = %s AND epoch = %s",
        [lease.job_id, lease.epoch],
    )


def open_owner_session(database: Database, job_id: str) -> StoreConnection:
    """A session to claim with; it is named after its epoch once that is known."""
    connection = database.open(f"etl:{job_id}:claim")
    try:
        require_session(connection, database)
    except BaseException:
        connection.close()
        raise
    return connection


def require_session(connection: StoreConnection, database: Database) -> None:
    """Refuse a transaction pooler: behind one, a session's identity and its settings mean nothing.

    Raises:
        ConfigurationError: Statements may reach different sessions of the server.
    """
    if is_transaction_pooled(connection.driver, lambda: database.connect("etl:probe")):
        raise ConfigurationError(
            f"database {database.name} is behind a transaction pooler; use a direct connection or a pooler in session"
            " mode"
        )
