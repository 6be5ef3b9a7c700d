"""From settings to databases: the embedded server on demand, the configured ones checked before they are used."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etl import settings as settings_module
from etl.settings import FILE_NAME, Settings
from etl.store import migrations
from etl.store.database import Database

STORE = "store"


def load_settings(start: Path | None = None) -> Settings:
    """The settings that hold in a directory, by default the current one.

    Raises:
        ConfigurationError: ``etl.toml`` cannot be read or says something unknown.
    """
    return settings_module.load(start or Path.cwd(), os.environ)


def load_settings_for(references: Sequence[str]) -> Settings:
    """The settings of the current project; outside of any, of the project that the first job file lies in."""
    here = load_settings()
    if (here.project_dir / FILE_NAME).is_file():
        return here
    for reference in references:
        file = Path(reference.partition(":")[0]).resolve()
        if file.suffix == ".py" and any((parent / FILE_NAME).is_file() for parent in file.parents):
            return load_settings(file.parent)
    return here


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """Where the store is, for as long as it is held open.

    Attributes:
        url: May hold a password.
        repair: Has the embedded server running again when it has died; does nothing for a configured database.
    """

    url: str
    repair: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Store:
    """The store database with a fitting schema, where it is (with its password), and how to bring its server back."""

    database: Database
    url: str
    repair: Callable[[], None]


@contextmanager
def store_url(settings: Settings) -> Iterator[StoreUrl]:
    """The URL of the store; without a configured one, the embedded server runs as long as the block does."""
    if settings.store_url is not None:
        yield StoreUrl(settings.store_url)
        return
    # Imported here: nobody with a configured database pays for it.
    from etl.store.embedded import EmbeddedServer

    server = EmbeddedServer(settings.state_dir)
    lock = threading.Lock()

    def repair() -> None:
        with lock:
            server.acquire()

    url = server.acquire()
    try:
        yield StoreUrl(url, repair)
    finally:
        server.release()


@contextmanager
def open_store(settings: Settings) -> Iterator[Store]:
    """The store database with the schema this version needs.

    The embedded server's schema is upgraded without asking. A configured database is somebody's property: there the
    upgrade is a command of its own.

    Raises:
        ConfigurationError: The schema is absent, behind or ahead; names the command.
        DatabaseUnreachableError: The database does not answer.
    """
    with store_url(settings) as where:
        database = Database(where.url, STORE)
        if settings.store_url is None:
            migrations.upgrade(where.url)
        else:
            with database.connect("etl:check") as connection:
                migrations.require_current(connection, STORE)
        yield Store(database, where.url, where.repair)


def target_databases(settings: Settings, names: Sequence[str]) -> Mapping[str, Database]:
    """The configured databases that sinks name.

    Raises:
        ConfigurationError: A name is not configured.
    """
    return {name: Database(settings.database_url(name), name) for name in dict.fromkeys(names)}


def query(settings: Settings, statement: str, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of a fixed read-only statement on the store, as dictionaries."""
    from psycopg.rows import dict_row

    with ExitStack() as stack:
        store = stack.enter_context(open_store(settings))
        connection = stack.enter_context(store.database.connect("etl:cli"))
        cursor = stack.enter_context(connection.cursor(row_factory=dict_row))
        return cursor.execute(statement.encode(), parameters).fetchall()
