"""The only way this project ends a transaction: run the command, then look at the command tag.

In a failed transaction the server answers ``COMMIT`` and ``PREPARE TRANSACTION`` with the tag ``ROLLBACK`` and *no*
error, and no driver raises either. So each of these functions checks the tag; anything else than the expected one
means that nothing was committed or prepared.

All connections are in autocommit mode and transactions are explicit SQL: a driver's own two-phase interface hides
exactly these answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import sql

from etl.errors import TransientError

Connection = psycopg.Connection[Any]
GID_BYTES_MAX = 199


def begin(connection: Connection) -> None:
    """Open a transaction (READ COMMITTED, whatever the database's default)."""
    connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")


def commit(connection: Connection) -> None:
    """Commit the open transaction.

    Raises:
        TransientError: The server had already given the transaction up and rolled it back.
        psycopg.OperationalError: The connection is gone; whether the commit took place must be read from a row that
            was written in the same transaction.
    """
    _finish(connection, sql.SQL("COMMIT"), "COMMIT")


def prepare(connection: Connection, gid: str) -> None:
    """Prepare the open transaction under ``gid`` (at most 199 bytes).

    Raises:
        TransientError: The server rolled the transaction back instead.
    """
    size_bytes = len(gid.encode())
    if size_bytes > GID_BYTES_MAX:
        raise ValueError(f"gid has {size_bytes} bytes, the server allows {GID_BYTES_MAX}: {gid}")
    _finish(connection, sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(gid)), "PREPARE TRANSACTION")


def commit_prepared(connection: Connection, gid: str) -> None:
    """Commit a prepared transaction; 42704 when it does not exist (any more), 55000 while it is busy."""
    _finish(connection, sql.SQL("COMMIT PREPARED {}").format(sql.Literal(gid)), "COMMIT PREPARED")


def rollback_prepared(connection: Connection, gid: str) -> None:
    """Roll a prepared transaction back; errors as for :func:`commit_prepared`."""
    _finish(connection, sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)), "ROLLBACK PREPARED")


def rollback(connection: Connection) -> None:
    """Give the open transaction up; a dead connection has done so already."""
    with suppress(psycopg.OperationalError):
        if not connection.closed:
            connection.execute("ROLLBACK")


@contextmanager
def transaction(connection: Connection) -> Iterator[None]:
    """A transaction around a block: committed (tag checked) at its end, rolled back when it raises."""
    begin(connection)
    try:
        yield
    except BaseException:
        rollback(connection)
        raise
    commit(connection)


def _finish(connection: Connection, statement: sql.SQL | sql.Composed, expected: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)
        tag = cursor.statusmessage
    if tag != expected:
        raise TransientError(f"the server answered {tag!r} to {expected}: the transaction was rolled back")
