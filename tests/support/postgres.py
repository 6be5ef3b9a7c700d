"""Pytest plugin: a PostgreSQL server for the session, a fresh database for each test."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.support.databases import create_database, drop_database, fresh_database, with_database
from tests.support.servers import SessionDirectory, resolved_server, sweep_dead_sessions

_SESSION = pytest.StashKey[SessionDirectory]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the session's directory, once, in the main process; the workers of pytest-xdist inherit its name."""
    if not hasattr(config, "workerinput"):
        sweep_dead_sessions()
        config.stash[_SESSION] = SessionDirectory()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the session's directory when all workers have ended."""
    if _SESSION in config.stash:
        config.stash[_SESSION].remove()


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """URL of a database of the session's server, for a role that may create databases. Shared: never restart it."""
    with resolved_server() as url:
        yield url


@pytest.fixture
def database_url(server_url: str) -> Iterator[str]:
    """URL of a fresh, empty database; dropped after the test with its prepared transactions and slots."""
    with fresh_database(server_url) as url:
        yield url


@pytest.fixture(scope="session")
def store_template(server_url: str) -> Iterator[str]:
    """Name of a database with the newest schema ``etl``, to make others from."""
    from etl.store.migrations import upgrade

    name = f"etl_template_{secrets.token_hex(8)}"
    create_database(server_url, name)
    upgrade(with_database(server_url, name))
    yield name
    drop_database(server_url, name)


@pytest.fixture
def store_url(server_url: str, store_template: str) -> Iterator[str]:
    """URL of a fresh database with the schema ``etl`` migrated and nothing in it."""
    with fresh_database(server_url, store_template) as url:
        yield url


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """An autocommit connection to ``database_url``."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection
