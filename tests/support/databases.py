"""Making and removing databases on the test session's server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql
from psycopg.rows import scalar_row

Connection = psycopg.Connection[Any]


def with_database(url: str, name: str) -> str:
    """The same server and role, another database."""
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


@contextmanager
def fresh_database(server_url: str, template: str = "template0") -> Iterator[str]:
    """A database of its own for the block, made from ``template``; yields its URL."""
    name = f"etl_test_{secrets.token_hex(8)}"
    create_database(server_url, name, template)
    try:
        yield with_database(server_url, name)
    finally:
        drop_database(server_url, name)


@contextmanager
def one_snapshot(connection: Connection) -> Iterator[None]:
    """What is read in the block is of one moment."""
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        yield
    finally:
        connection.execute("COMMIT")


def create_database(server_url: str, name: str, template: str = "template0") -> None:
    """Create a database; ``template`` must have no connections."""
    statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(statement)


def drop_database(server_url: str, name: str) -> None:
    """Remove a database with all that would keep it alive: sessions, prepared transactions, replication slots."""
    with psycopg.connect(with_database(server_url, name), autocommit=True) as connection:
        _end_sessions(connection)
        _rollback_prepared(connection)
        _drop_slots(connection)
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _end_sessions(connection: Connection) -> None:
    # The second argument makes the server wait until the session is really gone: only then is what it held free.
    connection.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


def _rollback_prepared(connection: Connection) -> None:
    for gid in _scalars(connection, "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"):
        connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))


def _drop_slots(connection: Connection) -> None:
    connection.execute(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()"
    )


def _scalars(connection: Connection, query: str) -> list[str]:
    with connection.cursor(row_factory=scalar_row) as cursor:
        cursor.execute(query)
        return cursor.fetchall()
