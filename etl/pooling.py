"""Recognises a transaction pooler: behind one, a session's identity and its settings mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

from etl.transaction import begin, rollback

Connection = psycopg.Connection[Any]
_LOOKS = 3


def is_transaction_pooled(connection: Connection, connect: Callable[[], Connection]) -> bool:
    """Whether the statements of one connection may reach different sessions of the server.

    Without a pooler the client knows its session's process id. A pooler says another in every mode; then it is tried
    whether another client is given the same session while this one is connected. That is how poolers use idle sessions
    in transaction mode, the one last used first or all in turn; in session mode it never happens.

    Args:
        connection: Outside of a transaction.
        connect: Opens another connection in the same way.
    """
    seen = {_session(connection) for _ in range(_LOOKS)}
    if seen == {connection.pgconn.backend_pid}:
        return False
    other = connect()
    try:
        begin(other)
        # In this order: where there is no other session, ours would have to wait for the other's transaction.
        shared = _session(other) in seen or len(seen | {_session(connection)}) > 1
        rollback(other)
    finally:
        other.close()
    return shared


def _session(connection: Connection) -> int:
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None
    return int(row[0])
