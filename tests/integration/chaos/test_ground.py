"""Scratch places: made, removed, and told apart from those of others."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from etl.errors import ConfigurationError
from etl.store.database import Database
from etl.testing.chaos.ground import Ground, Place

Connection = psycopg.Connection[Any]


@pytest.fixture
def store(store_url: str) -> Database:
    return Database(store_url, "store")


@pytest.fixture
def admin(store_url: str) -> Iterator[Connection]:
    with psycopg.connect(store_url, autocommit=True) as connection:
        yield connection


def schemas(admin: Connection) -> list[str]:
    rows = admin.execute("SELECT nspname FROM pg_namespace WHERE starts_with(nspname, 'etl_chaos_') ORDER BY 1")
    return [name for (name,) in rows]


def job_id_of(admin: Connection, place: Place) -> str:
    row = admin.execute("SELECT job_id FROM etl.job WHERE name = %s", [place.job_name]).fetchone()
    assert row is not None
    return str(row[0])


def told_nothing(line: str) -> None:
    raise AssertionError(f"unexpectedly told: {line}")


def test_place_is_removed_with_everything_that_a_run_may_leave(
    store: Database, store_url: str, admin: Connection
) -> None:
    with Ground(store, {}, told_nothing) as ground:
        with ground.place() as place:
            directory = place.scratch.directory
            (directory / "file").touch()
            job_id = job_id_of(admin, place)
            admin.execute(f"CREATE TABLE {place.scratch.schema}.rows (id int)")
            admin.execute(f"CREATE TABLE {place.scratch.schema}.locked ()")
            admin.execute("INSERT INTO etl.fence VALUES (%s, 1)", [job_id])
            prepare(store_url, f"etl:{job_id}:1:1:1:0", f"INSERT INTO {place.scratch.schema}.rows VALUES (1)")
            session = psycopg.connect(store_url, application_name=f"etl:{job_id}:1:writer")
            session.execute(f"LOCK TABLE {place.scratch.schema}.locked")

        assert schemas(admin) == []
        assert not directory.exists()
        with pytest.raises(psycopg.errors.AdminShutdown):
            session.execute("SELECT 1")
    session.close()
    for table in ("job", "head", "fence"):
        assert admin.execute(f"SELECT count(*) FROM etl.{table}").fetchone() == (0,)
    assert admin.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()").fetchall() == []


def prepare(url: str, gid: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"BEGIN; {statement}; PREPARE TRANSACTION '{gid}'")


def test_other_jobs_and_schemas_are_left_alone(store: Database, store_url: str, admin: Connection) -> None:
    admin.execute("INSERT INTO etl.job (job_id, name) VALUES ('00000000000000aa', 'etl chaos of mine')")
    admin.execute("CREATE SCHEMA etl_chaos_0123456789ab_1")  # a name like ours, and no comment of ours
    admin.execute("CREATE TABLE kept (id int)")
    prepare(store_url, "etl:00000000000000aa:1:1:1:0", "INSERT INTO kept VALUES (1)")

    with Ground(store, {}, told_nothing) as ground, ground.place():
        assert len(schemas(admin)) == 2

    assert schemas(admin) == ["etl_chaos_0123456789ab_1"]
    assert admin.execute("SELECT name FROM etl.job").fetchall() == [("etl chaos of mine",)]
    prepared = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
    assert admin.execute(prepared).fetchall() == [("etl:00000000000000aa:1:1:1:0",)]


def test_places_of_a_test_that_is_alive_are_left_alone(store: Database, admin: Connection) -> None:
    with Ground(store, {}, told_nothing) as first, first.place() as place:
        with Ground(store, {}, told_nothing):
            assert schemas(admin) == [place.scratch.schema]

        assert schemas(admin) == [place.scratch.schema]
        assert place.scratch.directory.is_dir()


def test_places_of_a_test_that_is_dead_are_removed_and_told(store: Database, store_url: str, admin: Connection) -> None:
    code = (
        "import os, sys; from etl.store.database import Database; from etl.testing.chaos.ground import Ground\n"
        "ground = Ground(Database(sys.argv[1], 'store'), {}, print).__enter__()\n"
        "place = ground.place().__enter__(); print(place.scratch.directory, flush=True); os.kill(os.getpid(), 9)"
    )
    died = subprocess.run([sys.executable, "-c", code, store_url], capture_output=True, text=True, check=False)
    assert died.returncode == -9, died.stderr
    directory = Path(died.stdout.strip())
    assert directory.is_dir()
    await_end_of_sessions(admin)
    (schema,) = schemas(admin)
    told: list[str] = []

    with Ground(store, {}, told.append):
        assert schemas(admin) == []

    assert told == [f"removed {schema}, left by a crash test that was killed, from database store"]
    assert not directory.parent.exists()
    assert admin.execute("SELECT count(*) FROM etl.job").fetchone() == (0,)


@pytest.mark.parametrize("when", ["before", "after"])
def test_kill_while_a_place_is_made_leaves_nothing_that_is_not_found(
    store: Database, store_url: str, admin: Connection, when: str
) -> None:
    # Dies right before the job is registered, or right after that.
    code = (
        "import os, sys; from etl.store import lease; from etl.store.database import Database\n"
        "from etl.testing.chaos import ground as grounds\n"
        "ground = grounds.Ground(Database(sys.argv[1], 'store'), {}, print).__enter__()\n"
        "register = lease.register_job\n"
        "def register_and_die(*arguments):\n"
        "    if sys.argv[2] == 'after': register(*arguments)\n"
        "    os.kill(os.getpid(), 9)\n"
        "lease.register_job = register_and_die\n"
        "ground.place().__enter__()\n"
    )
    died = subprocess.run([sys.executable, "-c", code, store_url, when], capture_output=True, text=True, check=False)
    assert died.returncode == -9, died.stderr
    await_end_of_sessions(admin)
    assert len(schemas(admin)) == 1

    with Ground(store, {}, lambda _line: None):
        assert schemas(admin) == []

    assert admin.execute("SELECT count(*) FROM etl.job").fetchone() == (0,)


def await_end_of_sessions(admin: Connection) -> None:
    """The server notices the end of a client a moment later; the lock is free then."""
    admin.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND starts_with(application_name, 'etl-chaos:')"
    )


class _InjectedError(Exception):
    pass


def test_place_is_removed_after_an_error_in_it(store: Database, admin: Connection) -> None:
    with pytest.raises(_InjectedError), Ground(store, {}, told_nothing) as ground, ground.place() as place:
        directory = place.scratch.directory
        raise _InjectedError

    assert schemas(admin) == []
    assert admin.execute("SELECT count(*) FROM etl.job").fetchone() == (0,)
    assert not directory.parent.exists()


def test_two_names_of_one_database_are_no_trouble(store: Database, store_url: str, admin: Connection) -> None:
    with Ground(store, {"again": Database(store_url, "again")}, told_nothing) as ground, ground.place():
        assert len(schemas(admin)) == 1

    assert schemas(admin) == []


def test_directory_of_somebody_else_is_left_alone(
    store: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, link, file = (tmp_path / f"etl-chaos-{name}" for name in ("left", "link", "file"))
    left.mkdir()
    kept = tmp_path / "kept"
    kept.mkdir()
    link.symlink_to(kept)
    file.touch()

    with Ground(store, {}, told_nothing):
        assert not left.exists()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["etl-chaos-file", "etl-chaos-link", "kept"]


def test_privilege_is_asked_for_with_its_grant(store: Database, store_url: str, admin: Connection) -> None:
    role = f"etl_test_{os.urandom(6).hex()}"
    admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'")
    try:
        url = psycopg.conninfo.make_conninfo(store_url, user=role, password=role)
        with pytest.raises(ConfigurationError, match=f'GRANT CREATE ON DATABASE .* TO "{role}";'):
            Ground(Database(url, "store"), {}, told_nothing).__enter__()
    finally:
        admin.execute(f"DROP ROLE {role}")
