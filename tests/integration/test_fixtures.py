from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from etl.transaction import begin, prepare
from tests.support.databases import create_database, drop_database, with_database
from tests.support.embedded import state_directory
from tests.support.servers import SessionDirectory, resolved_server, sweep_dead_sessions


@pytest.fixture
def no_other_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither the embedded server nor Docker can be had."""
    monkeypatch.delenv("ETL_TEST_DSN", raising=False)
    monkeypatch.setenv("ETL_PG_BINDIR", "/nonexistent")
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    # The session's own server is up already: look in another place.
    with state_directory("session") as session_dir:
        monkeypatch.setenv("ETL_TEST_SESSION_DIR", str(session_dir))
        yield


@pytest.fixture
def limited_role(server_url: str) -> Iterator[str]:
    """URL with a role that may not create databases."""
    name, password = f"etl_test_{secrets.token_hex(8)}", secrets.token_hex(8)
    role = sql.Identifier(name)
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, sql.Literal(password)))
        yield psycopg.conninfo.make_conninfo(server_url, user=name, password=password)
        connection.execute(sql.SQL("DROP ROLE {}").format(role))


@pytest.mark.parametrize("ci", [True, False])
@pytest.mark.usefixtures("no_other_server")
def test_server_that_cannot_be_had_fails_in_ci_and_skips_elsewhere(monkeypatch: pytest.MonkeyPatch, ci: bool) -> None:
    monkeypatch.setenv("CI", "true" if ci else "")
    outcome = pytest.fail.Exception if ci else pytest.skip.Exception
    with pytest.raises(outcome, match=r"(?s)set ETL_TEST_DSN.*embedded server: .*ETL_PG_BINDIR.*container: "):
        resolved_server().__enter__()


def test_unfit_explicit_server_is_refused(monkeypatch: pytest.MonkeyPatch, limited_role: str) -> None:
    monkeypatch.setenv("ETL_TEST_DSN", limited_role)
    with pytest.raises(pytest.fail.Exception, match=r"ETL_TEST_DSN is unfit:\n  the role may not create databases"):
        resolved_server().__enter__()


def test_unreachable_explicit_server_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETL_TEST_DSN", "postgresql://u:s3cret@127.0.0.1:1/d")
    with pytest.raises(pytest.fail.Exception, match="ETL_TEST_DSN is unfit:") as caught:
        resolved_server().__enter__()
    assert "s3cret" not in str(caught.value)


def test_databases_are_empty_and_apart(server_url: str, database_url: str, connection: psycopg.Connection[Any]) -> None:
    assert database_url != server_url
    tables = connection.execute("SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace").fetchone()
    assert tables == (0,)


def test_store_database_has_the_newest_schema(store_url: str) -> None:
    from etl.store import migrations

    assert migrations.current(store_url) == migrations.HEAD


def test_database_is_dropped_with_all_that_keeps_it_alive(server_url: str) -> None:
    name = f"etl_test_{secrets.token_hex(8)}"
    create_database(server_url, name)
    gid = f"{name}-gid"
    with closing(psycopg.connect(with_database(server_url, name), autocommit=True)) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [f"{name}_slot"])
        connection.execute("CREATE TABLE t (a int)")
        begin(connection)
        connection.execute("INSERT INTO t VALUES (1)")
        prepare(connection, gid)
        connection.execute("BEGIN")
        drop_database(server_url, name)
    with psycopg.connect(server_url, autocommit=True) as connection:
        left = connection.execute(
            "SELECT (SELECT count(*) FROM pg_database WHERE datname = %s), "
            "(SELECT count(*) FROM pg_prepared_xacts WHERE gid = %s), "
            "(SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s)",
            [name, gid, f"{name}_slot"],
        ).fetchone()
    assert left == (0, 0, 0)


def test_directories_of_dead_sessions_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    # Restored afterwards: a session directory announces itself there.
    monkeypatch.setenv("ETL_TEST_SESSION_DIR", "unset")
    dead = Path(tempfile.mkdtemp(prefix="etl-test-", dir="/var/tmp"))
    alive = SessionDirectory()
    sweep_dead_sessions()
    assert (dead.exists(), alive.path.exists()) == (False, True)
    alive.remove()
    assert not alive.path.exists()
