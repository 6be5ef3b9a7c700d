"""Owns the schema ``etl``: upgrades it, and tells a run whether it fits.

A run compares one version number and never imports Alembic; only ``etl db upgrade`` does.
"""

from __future__ import annotations

from pathlib import Path

import psycopg

from etl.errors import ConfigurationError
from etl.sqlstate import translate
from etl.store.database import Connection, Database, StoreConnection
from etl.transaction import transaction

HEAD = "0008"
"""The newest revision; a test asserts that it is the head of the migration scripts."""

_LOCK_KEY = 0x65746C5F6D6967  # "etl_mig": serialises upgrades of one database


def script_location() -> Path:
    """Where the migration scripts are: inside the installed package, or beside it in a checkout."""
    packaged = Path(__file__).parent / "_migrations"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "migrations"


def upgrade(url: str, name: str = "store") -> None:
    """Bring the schema ``etl`` of a database to the newest revision, creating it when absent.

    Safe to call from many processes at once: they take turns, and the late ones find nothing to do. Either all
    revisions are applied or none.

    Raises:
        ConfigurationError: The role may not create the schema, or the schema is newer than this version.
    """
    with Database(url, name).session("etl:migrate") as connection:
        if _version(connection.driver) == HEAD:
            return
        try:
            with transaction(connection.driver):
                connection.driver.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK_KEY])
                connection.driver.execute("CREATE SCHEMA IF NOT EXISTS etl")
                _refuse_newer(connection.driver, name)
                _run_alembic(connection)
        except psycopg.Error as error:
            raise translate(error, f"upgrading schema etl of database {name}") from error


def current(url: str, name: str = "store") -> str | None:
    """The revision of the schema ``etl``, None when it does not exist."""
    with Database(url, name).session("etl:migrate") as connection:
        return _version(connection.driver)


def require_current(connection: Connection, name: str) -> None:
    """Refuse a schema that is absent, behind or ahead.

    Raises:
        ConfigurationError: Says what is there, what is needed and the command.
    """
    found = _version(connection)
    if found == HEAD:
        return
    _refuse_newer(connection, name)
    state = "does not exist" if found is None else f"is at revision {found}, this version needs {HEAD}"
    option = "" if name == "store" else f" --database {name}"
    raise ConfigurationError(f"schema etl of database {name} {state}; run: etl db upgrade{option}")


def _version(connection: Connection) -> str | None:
    if connection.execute("SELECT to_regclass('etl.alembic_version')").fetchone() == (None,):
        return None
    row = connection.execute("SELECT version_num FROM etl.alembic_version").fetchone()
    return None if row is None else str(row[0])


def _refuse_newer(connection: Connection, name: str) -> None:
    found = _version(connection)
    if found is not None and found > HEAD:
        raise ConfigurationError(
            f"schema etl of database {name} is at revision {found}, newer than this version knows ({HEAD});"
            " install the newer version of this package"
        )


def _run_alembic(connection: StoreConnection) -> None:
    # Imported here: it costs a run 0.1 s that only upgrades need.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    config.attributes["connection"] = connection.core
    config.attributes["schema"] = "etl"
    command.upgrade(config, "head")
