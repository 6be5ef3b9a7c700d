"""The migrations yield exactly the tables that the store's code believes in."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from etl.errors import ConfigurationError
from etl.store import migrations, tables
from etl.store.database import Database


def test_migrations_yield_the_declared_tables(store_url: str) -> None:
    with Database(store_url, "store").session("test") as connection:
        context = MigrationContext.configure(
            connection.core,
            opts={
                "include_schemas": True,
                "compare_type": True,
                "include_name": lambda name, kind, _: kind != "schema" or name == "etl",
                "include_object": lambda item, name, kind, reflected, other: name != "alembic_version",
            },
        )
        differences = compare_metadata(context, tables.metadata)
        assert [one for one in differences if "comment" not in str(one)[:40]] == []


def test_migrations_and_tables_have_the_same_checks(store_url: str) -> None:
    declared = {
        constraint.name
        for table in tables.metadata.tables.values()
        for constraint in table.constraints
        if isinstance(constraint, sa.CheckConstraint)
    }
    with psycopg.connect(store_url) as connection:
        rows = connection.execute(
            "SELECT conname FROM pg_constraint WHERE contype = 'c' AND connamespace = 'etl'::regnamespace"
        ).fetchall()
    assert {name for (name,) in rows} == declared


def test_declared_head_is_the_head_of_the_scripts() -> None:
    assert ScriptDirectory(str(migrations.script_location())).get_current_head() == migrations.HEAD


def test_upgrade_is_safe_when_many_processes_start_at_once(database_url: str) -> None:
    with ProcessPoolExecutor(6, mp_context=get_context("spawn")) as pool:
        list(pool.map(migrations.upgrade, [database_url] * 6))
    assert migrations.current(database_url) == migrations.HEAD


def test_current_is_none_when_there_is_no_schema(database_url: str) -> None:
    assert migrations.current(database_url) is None


def test_run_is_refused_with_the_command_when_the_schema_is_missing(connection: psycopg.Connection[object]) -> None:
    with pytest.raises(ConfigurationError, match="schema etl of database store does not exist; run: etl db upgrade"):
        migrations.require_current(connection, "store")


def test_run_is_refused_when_the_schema_is_newer(store_url: str) -> None:
    with psycopg.connect(store_url, autocommit=True) as connection:
        connection.execute("UPDATE etl.alembic_version SET version_num = '9999'")
        with pytest.raises(ConfigurationError, match="revision 9999, newer than this version knows"):
            migrations.require_current(connection, "store")
    with pytest.raises(ConfigurationError, match="install the newer version"):
        migrations.upgrade(store_url)


def test_upgrade_counts_what_former_checkpoints_hold(store_url: str) -> None:
    with psycopg.connect(store_url, autocommit=True) as connection:
        connection.execute("DROP TABLE etl.state, etl.savepoint, etl.savepoint_request CASCADE")
        connection.execute("ALTER TABLE etl.checkpoint DROP COLUMN rows_written_total")
        connection.execute(
            "ALTER TABLE etl.checkpoint DROP COLUMN chunks, DROP COLUMN states, DROP COLUMN states_digest"
        )
        connection.execute("ALTER TABLE etl.checkpoint DROP COLUMN units, DROP COLUMN positions, DROP COLUMN splits")
        connection.execute("ALTER TABLE etl.sink DROP COLUMN target")
        connection.execute("ALTER TABLE etl.position DROP COLUMN digest")
        connection.execute("ALTER TABLE etl.committable DROP COLUMN digest")
        connection.execute("UPDATE etl.alembic_version SET version_num = '0001'")
        connection.execute("INSERT INTO etl.job VALUES ('0123456789abcdef', 'old')")
        connection.execute(
            "INSERT INTO etl.run (job_id, status, epoch, host, pid, version)"
            " VALUES ('0123456789abcdef', 'succeeded', 1, 'h', 1, 'v')"
        )
        connection.execute(
            "INSERT INTO etl.checkpoint SELECT '0123456789abcdef', 1, number, 1, run_id, 'rows', now(), 1, 1,"
            " '{\"out\": 5}' FROM etl.run, generate_series(1, 2) number"
        )
        connection.execute(
            "INSERT INTO etl.position VALUES ('0123456789abcdef', 1, 's', 'a', 1, '{}'),"
            " ('0123456789abcdef', 1, 's', 'b', 1, '{}'), ('0123456789abcdef', 1, 's', 'b', 2, '{}'),"
            " ('0123456789abcdef', 1, 's', 'c', 2, '{}')"
        )
        connection.execute("INSERT INTO etl.committable VALUES ('0123456789abcdef', 1, 2, 'out', 0, 1, 5, '{}')")
        migrations.upgrade(store_url)
        counts = connection.execute(
            "SELECT checkpoint_id, units, positions, splits, rows_written_total FROM etl.checkpoint ORDER BY 1"
        ).fetchall()
    assert counts == [(1, 0, 2, 2, {"out": 5}), (2, 1, 2, 3, {"out": 10})]
