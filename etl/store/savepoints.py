"""Savepoints: checkpoints that somebody has given a name, and that are kept as long as they have it.

Of a job that is not running, the last completed checkpoint gets the name. A running one is asked by a row in
``etl.savepoint_request``: its heartbeat notices, it takes a checkpoint, and in the transaction that completes it the
request goes and the name comes. So there is never half of a savepoint, whoever dies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Event
from typing import LiteralString

from etl.clock import Clock
from etl.errors import ConfigurationError, StateError, TransientError
from etl.store import tables
from etl.store.database import Connection, StoreConnection
from etl.store.lease import Lease, observe
from etl.store.state import CURE, OperatorState, operator_states
from etl.transaction import transaction

POLL_S = 0.1

_IS_NAME = re.compile("[A-Za-z][A-Za-z0-9_.-]{0,99}")
"""So that no name looks like the number of a checkpoint."""

_KEY: LiteralString = (
    " FROM (SELECT %(job)s::text AS job_id, %(incarnation)s::int8 AS incarnation,"
    "              %(checkpoint)s::int8 AS checkpoint_id) AS key,"
    " unnest(%(names)s::text[]) AS name ON CONFLICT (job_id, name) DO NOTHING"
)
_NAME: LiteralString = (
    "INSERT INTO etl.savepoint (job_id, name, incarnation, checkpoint_id, digest)"
    " SELECT job_id, name, incarnation, checkpoint_id, " + tables.SAVEPOINT_DIGEST + _KEY
)
_OF_NAME: LiteralString = " FROM etl.savepoint WHERE job_id = %s AND name = %s"
_NAMED: LiteralString = "SELECT incarnation, checkpoint_id, digest = " + tables.SAVEPOINT_DIGEST + _OF_NAME
_OF_NUMBER: LiteralString = " FROM etl.checkpoint WHERE job_id = %s AND incarnation = %s AND checkpoint_id = %s"
_CHECKPOINT: LiteralString = (
    "SELECT splits, states, rows_written_total, states_digest = " + tables.STATES_DIGEST + _OF_NUMBER
)


@dataclass(frozen=True, slots=True)
class Cut:
    """A checkpoint that one can go back to or look at.

    Attributes:
        job_id: The job.
        incarnation: Its line of checkpoints.
        checkpoint_id: Its number.
        splits: How many splits have a position with it.
        states: By uid of an operator, what it says of its state.
        rows_written_total: Rows that the job had written up to it, by sink uid.
    """

    job_id: str
    incarnation: int
    checkpoint_id: int
    splits: int
    states: Mapping[str, OperatorState]
    rows_written_total: Mapping[str, int]


def find(connection: Connection, job_id: str, name: str) -> Cut:
    """The savepoint of a name, or the kept checkpoint of a number.

    Raises:
        ConfigurationError: There is none; lists those that are there.
        StateError: Its row was deleted or edited by hand.
    """
    if name.isascii() and name.isdecimal():
        query = "SELECT max(incarnation), %s::int8, true FROM etl.checkpoint WHERE job_id = %s AND checkpoint_id = %s"
        row = connection.execute(query, [name, job_id, name]).fetchone() if len(name) < 19 else None
    else:
        row = connection.execute(_NAMED, [job_id, name]).fetchone()
    if row is None or row[0] is None:
        raise ConfigurationError(
            f'there is no savepoint or kept checkpoint "{name}"; there are: {_known(connection, job_id)}'
        )
    incarnation, checkpoint_id, is_unchanged = row
    found = connection.execute(_CHECKPOINT, [job_id, incarnation, checkpoint_id]).fetchone()
    if not is_unchanged or found is None or not found[-1]:
        raise StateError(f'etl.savepoint or etl.checkpoint: "{name}" is not the one that was written: {CURE}')
    splits, states, rows_written_total, _ = found
    return Cut(job_id, incarnation, checkpoint_id, splits, operator_states(states), rows_written_total)


def _known(connection: Connection, job_id: str) -> str:
    named = connection.execute("SELECT name FROM etl.savepoint WHERE job_id = %s ORDER BY name", [job_id]).fetchall()
    kept = connection.execute(
        "SELECT checkpoint_id FROM etl.checkpoint WHERE job_id = %s ORDER BY checkpoint_id", [job_id]
    ).fetchall()
    return ", ".join(str(one) for (one,) in (*named, *kept)) or "none"


def take(
    connection: StoreConnection, job_id: str, name: str, *, stop: bool, timeout_s: float, clock: Clock, cancelled: Event
) -> int:
    """Make a savepoint: of the last checkpoint of a job that is not running, else of one that the run takes for it.

    Args:
        connection: To the store, not of a run.
        job_id: The job.
        name: Of the savepoint; no other of the job has it.
        stop: Have the run end with it, and wait for its end.
        timeout_s: How long the run is waited for.
        clock: Time.
        cancelled: Set to give up.

    Returns:
        The number of the checkpoint.

    Raises:
        ConfigurationError: The name is taken or no name, or the job has no checkpoint.
        TransientError: The run did not take it in time, or somebody gave up; it will not be taken.
    """
    if not _IS_NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} is no name of a savepoint: a letter, then letters, digits, dots, hyphens and underscores, 100 at"
            " most"
        )
    deadline_s = clock.monotonic_s() + timeout_s
    try:
        made = _make_or_ask(connection, job_id, name, stop=stop, is_asked=False)
        while made is None:
            given_up = clock.monotonic_s() >= deadline_s or clock.wait(cancelled, POLL_S)
            if given_up:
                # Waits for a transaction that makes it right now.
                _withdraw(connection, job_id, name)
            made = _made(connection, job_id, name)
            if made is None and given_up:
                raise TransientError(f'the run has not taken savepoint "{name}" within {timeout_s:g} s: given up')
            if made is None and not observe(connection, job_id).alive:
                # The run has ended in between: what it completed last is what there is.
                made = _make_or_ask(connection, job_id, name, stop=stop, is_asked=True)
    except BaseException:
        _withdraw(connection, job_id, name)
        raise
    while stop and observe(connection, job_id).alive:
        if clock.monotonic_s() >= deadline_s or clock.wait(cancelled, POLL_S):
            raise TransientError(f'savepoint "{name}" is made, but the run has not ended within {timeout_s:g} s')
    return made


def _make_or_ask(connection: StoreConnection, job_id: str, name: str, *, stop: bool, is_asked: bool) -> int | None:
    """Under the lock of the head row, which every claim and every completing transaction changes."""
    with transaction(connection.driver):
        row = connection.driver.execute(
            "SELECT incarnation, checkpoint_id FROM etl.head WHERE job_id = %s FOR UPDATE", [job_id]
        ).fetchone()
        assert row is not None
        incarnation, checkpoint_id = row
        made = _made(connection, job_id, name)
        if made is not None:
            if is_asked:
                return made
            raise ConfigurationError(f'savepoint "{name}" exists already, of checkpoint {made}; choose another name')
        if observe(connection, job_id).alive:
            if not is_asked:
                _ask(connection, job_id, name, stop=stop)
            return None
        if checkpoint_id == 0:
            raise ConfigurationError("the job has completed no checkpoint yet; run it first")
        connection.driver.execute(
            _NAME, {"job": job_id, "incarnation": incarnation, "checkpoint": checkpoint_id, "names": [name]}
        )
        connection.driver.execute("DELETE FROM etl.savepoint_request WHERE job_id = %s AND name = %s", [job_id, name])
        return int(checkpoint_id)


def _ask(connection: StoreConnection, job_id: str, name: str, *, stop: bool) -> None:
    # One that was left by a command that is gone is taken over.
    connection.driver.execute(
        "INSERT INTO etl.savepoint_request (job_id, name, stop) VALUES (%s, %s, %s)"
        " ON CONFLICT (job_id, name) DO UPDATE SET stop = excluded.stop",
        [job_id, name, stop],
    )


def _made(connection: StoreConnection, job_id: str, name: str) -> int | None:
    row = connection.driver.execute(_NAMED, [job_id, name]).fetchone()
    return None if row is None else int(row[1])


def _withdraw(connection: StoreConnection, job_id: str, name: str) -> None:
    if not connection.closed:
        connection.driver.execute("DELETE FROM etl.savepoint_request WHERE job_id = %s AND name = %s", [job_id, name])


def grant(connection: StoreConnection, lease: Lease, checkpoint_id: int, *, ending: bool) -> None:
    """Give the checkpoint that is being completed the names that were asked for; the caller commits.

    Args:
        connection: In the transaction that completes the checkpoint, which is recorded already.
        lease: Of the run.
        checkpoint_id: The checkpoint.
        ending: Whether the run ends with it; requests that ask for the end have to wait for that one.
    """
    asked = connection.driver.execute(
        "DELETE FROM etl.savepoint_request WHERE job_id = %s AND (NOT stop OR %s) RETURNING name",
        [lease.job_id, ending],
    )
    key = {"job": lease.job_id, "incarnation": lease.incarnation, "checkpoint": checkpoint_id}
    connection.driver.execute(_NAME, {**key, "names": [name for (name,) in asked]})


def drop(connection: Connection, job_id: str, names: Iterable[str]) -> None:
    """Take names away from checkpoints; the next pruning removes what nothing else needs.

    Raises:
        ConfigurationError: One of them is not there; none is dropped then.
    """
    with transaction(connection):
        known = _known(connection, job_id)
        for name in names:
            gone = connection.execute("DELETE FROM etl.savepoint WHERE job_id = %s AND name = %s", [job_id, name])
            if gone.rowcount != 1:
                raise ConfigurationError(f'there is no savepoint "{name}"; nothing was dropped; there are: {known}')
