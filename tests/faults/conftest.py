"""Fixtures of the fault tests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from tests.faults.arena import Arena, open_arena
from tests.faults.cases import Undisturbed
from tests.faults.crashing import TEMPLATE, CrashingServer, require_programs
from tests.faults.wire import Wire, wired


@pytest.fixture(scope="session")
def worker_arena(server_url: str, store_template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """Databases and zygote of this worker."""
    with open_arena(server_url, store_template, tmp_path_factory.mktemp("input")) as made:
        yield made


@pytest.fixture(scope="session")
def undisturbed(worker_arena: Arena) -> Undisturbed:
    """Undisturbed runs, made when they are first asked for."""
    return Undisturbed(worker_arena)


@pytest.fixture
def arena(worker_arena: Arena) -> Iterator[Arena]:
    """The worker's arena; whatever a failed test leaves is removed."""
    yield worker_arena
    worker_arena.clean()


@pytest.fixture
def wire(arena: Arena) -> Iterator[Wire]:
    """A network to the server that the test disturbs."""
    with wired(arena.store_url, arena.store) as made:
        yield made


@pytest.fixture
def stranger(arena: Arena) -> Iterator[str]:
    """A role under which a run may do everything but end the sessions of the role that the other runs use."""
    name = f"etl_stranger_{secrets.token_hex(6)}"
    role = sql.Identifier(name)
    # Only a superuser may finish what another role has prepared; the engine ends sessions of its own role alone.
    create = sql.SQL("CREATE ROLE {} SUPERUSER LOGIN PASSWORD {}").format(role, sql.Literal(name))
    try:
        arena.store.execute(create)
    except psycopg.errors.InsufficientPrivilege as error:
        pytest.skip(f"no second superuser: {error}")
    yield name
    for connection in (arena.store, arena.other):
        connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
    arena.store.execute(sql.SQL("DROP ROLE {}").format(role))


@pytest.fixture
def ordinary(arena: Arena) -> Iterator[str]:
    """A role that may do what a run needs, and no more; its password is its name."""
    name = f"etl_ordinary_{secrets.token_hex(6)}"
    role = sql.Identifier(name)
    arena.store.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, sql.Literal(name)))
    for connection in (arena.store, arena.other):
        connection.execute(sql.SQL("GRANT USAGE ON SCHEMA etl, public TO {}").format(role))
        connection.execute(sql.SQL("GRANT ALL ON ALL TABLES IN SCHEMA etl, public TO {}").format(role))
    yield name
    arena.clean()
    for connection in (arena.store, arena.other):
        connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
    arena.store.execute(sql.SQL("DROP ROLE {}").format(role))


@pytest.fixture(scope="session")
def crashing_server() -> Iterator[CrashingServer]:
    """A server of this worker's own, to be killed."""
    require_programs()
    server = CrashingServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def worker_crash_arena(crashing_server: CrashingServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """Databases and zygote of this worker on that server."""
    with open_arena(crashing_server.url, TEMPLATE, tmp_path_factory.mktemp("input")) as made:
        yield made


@pytest.fixture
def crash_arena(worker_crash_arena: Arena) -> Iterator[Arena]:
    """That arena; whatever a failed test leaves is removed."""
    yield worker_crash_arena
    worker_crash_arena.clean()
