"""Scratch places in the job's databases, and the removal of everything that was left in them.

A trial has a job of its own in the store and, in every database, a schema whose comment names that job. So each
database tells by itself what there is to remove: sessions, prepared transactions and rows in the schema ``etl`` of that
job, and the schema. A crash test holds an advisory lock in every database as long as it lives; what belongs to a test
whose lock is free was left by one that was killed, and is removed by the next one.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
from psycopg import sql

from etl.errors import ConfigurationError, EtlError, Finding
from etl.sink import Connection, Scratch
from etl.sqlstate import translate
from etl.store import lease, tables
from etl.store.database import Database
from etl.store.embedded.locks import try_lock
from etl.transaction import rollback_prepared, transaction

SCHEMA_PREFIX = "etl_chaos_"
DIRECTORY_PREFIX = "etl-chaos-"
_SCHEMA = re.compile(rf"{SCHEMA_PREFIX}([0-9a-f]{{12}})_[0-9]+")
_COMMENT = "scratch of etl chaos, job "
_TERMINATE_MS = 10_000


@dataclass(frozen=True, slots=True)
class Place:
    """Where one trial takes place.

    Attributes:
        job_name: The job's name in the store.
        scratch: Where its sinks write to.
    """

    job_name: str
    scratch: Scratch


class Ground:
    """All scratch places of one crash test; whatever happens, nothing of them is left at its end.

    Args:
        store: The store.
        databases: The databases that sinks name.
        tell: Tells the user something, one line.
    """

    def __init__(self, store: Database, databases: Mapping[str, Database], tell: Callable[[str], None]) -> None:
        self._store = store
        self._databases = [store, *databases.values()]
        self._tell = tell
        self._token = secrets.token_hex(6)
        self._count = 0
        self._stack = ExitStack()
        self._connections: list[Connection] = []
        self._directory = Path()

    def __enter__(self) -> Self:
        try:
            self._enter()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _enter(self) -> None:
        for database in self._databases:
            connection = database.connect(f"etl-chaos:{self._token}")
            self._stack.callback(connection.close)
            self._connections.append(connection)
        _require_privilege(self._databases, self._connections)
        for connection in self._connections:
            # Shared, since two names may lead to one database.
            connection.execute("SELECT pg_advisory_lock_shared(hashtextextended(%s, 0))", [_lock_name(self._token)])
        for database, connection in zip(self._databases, self._connections, strict=True):
            for schema in _sweep(connection):
                self._tell(f"removed {schema}, left by a crash test that was killed, from database {database.name}")
        _sweep_directories()
        self._directory = self._stack.enter_context(_locked_directory())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # Anew: what was interrupted may have left the sessions in the middle of something.
            for database in self._databases:
                connection = database.connect(f"etl-chaos:{self._token}:end")
                try:
                    for schema, job_id in _places(connection, self._token):
                        _remove(connection, schema, job_id)
                finally:
                    connection.close()
        except (EtlError, psycopg.Error) as failure:
            if error is None:
                raise
            self._tell(f"what the crash test made could not be removed, the next one will do it: {failure}")
        finally:
            self._stack.close()

    @contextmanager
    def place(self) -> Iterator[Place]:
        """A place for one trial, removed after the block."""
        self._count += 1
        schema = f"{SCHEMA_PREFIX}{self._token}_{self._count}"
        job_name = f"etl chaos {self._token} {self._count}"
        job_id = lease.random_job_id()
        for connection in self._connections:
            with transaction(connection):
                name = sql.Identifier(schema)
                connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))
                comment = sql.Literal(_COMMENT + job_id)
                connection.execute(sql.SQL("COMMENT ON SCHEMA {} IS {}").format(name, comment))
        # Last: a job that no schema names would never be removed after a kill in between.
        with self._store.session(f"etl-chaos:{self._token}:register") as session:
            lease.register_job(session, job_name, job_id)
        directory = self._directory / str(self._count)
        directory.mkdir()
        yield Place(job_name, Scratch(schema, directory))
        # Not in a finally clause: what an error leaves behind is removed at the end, by sessions that are in order.
        for connection in self._connections:
            _remove(connection, schema, job_id)
        shutil.rmtree(directory)


def _require_privilege(databases: list[Database], connections: list[Connection]) -> None:
    findings = []
    for database, connection in zip(databases, connections, strict=True):
        row = connection.execute(
            "SELECT has_database_privilege(current_database(), 'CREATE'), current_database(), current_user"
        ).fetchone()
        assert row is not None
        allowed, name, role = row
        if not allowed:
            grant = sql.SQL("GRANT CREATE ON DATABASE {} TO {};").format(sql.Identifier(name), sql.Identifier(role))
            problem = "the role may not create schemas, and the copies of the targets need one"
            findings.append(Finding(f"database {database.name}", problem, grant.as_string(None)))
    if findings:
        raise ConfigurationError.from_findings("crash test", findings)


# --- removal ----------------------------------------------------------------------------------------------------------


def _lock_name(token: str) -> str:
    return f"etl chaos {token}"


def _places(connection: Connection, token: str | None = None) -> list[tuple[str, str]]:
    """Schemas and job ids of scratch places in this database that this role may remove."""
    rows = connection.execute(
        "SELECT nspname, obj_description(oid, 'pg_namespace') FROM pg_namespace"
        " WHERE starts_with(nspname, %s) AND starts_with(obj_description(oid, 'pg_namespace'), %s)"
        " AND pg_has_role(nspowner, 'USAGE') ORDER BY nspname",
        [f"{SCHEMA_PREFIX}{token}_" if token else SCHEMA_PREFIX, _COMMENT],
    ).fetchall()
    return [(schema, comment.removeprefix(_COMMENT)) for schema, comment in rows if _SCHEMA.fullmatch(schema)]


def _sweep(connection: Connection) -> list[str]:
    """Remove what belongs to crash tests that are dead; the schemas."""
    removed = []
    for schema, job_id in _places(connection):
        match = _SCHEMA.fullmatch(schema)
        assert match is not None
        lock = [_lock_name(match[1])]
        free = connection.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", lock).fetchone()
        if free == (True,):
            _remove(connection, schema, job_id)
            connection.execute("SELECT pg_advisory_unlock(hashtextextended(%s, 0))", lock)
            removed.append(schema)
    return removed


def _remove(connection: Connection, schema: str, job_id: str) -> None:
    """Remove a trial from one database: first what could still change something, last what it is found by."""
    try:
        connection.execute(
            "SELECT pg_terminate_backend(pid, %s) FROM pg_stat_activity"
            " WHERE starts_with(application_name, %s) AND usename = current_user AND pid <> pg_backend_pid()",
            [_TERMINATE_MS, f"etl:{job_id}:"],
        )
        prepared = connection.execute(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, %s)",
            [f"etl:{job_id}:"],
        ).fetchall()
        for (gid,) in prepared:
            with suppress(psycopg.errors.UndefinedObject):
                rollback_prepared(connection, gid)
        with transaction(connection):
            for table in reversed(tables.metadata.sorted_tables):
                name = sql.Identifier(tables.SCHEMA, table.name)
                connection.execute(sql.SQL("DELETE FROM {} WHERE job_id = %s").format(name), [job_id])
            # Two names may lead to one database.
            connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))
    except psycopg.Error as error:
        raise translate(error, f"removing the scratch schema {schema}") from error


# --- directories ------------------------------------------------------------------------------------------------------


@contextmanager
def _locked_directory() -> Iterator[Path]:
    """A directory that counts as alive as long as this process does."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
        lock = _try_lock(path)
        # Another test that sweeps right now may have taken it for one that was left.
        if lock is not None and path.exists():
            break
    try:
        yield path
    finally:
        shutil.rmtree(path)
        os.close(lock)


def _sweep_directories() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*"):
        lock = _try_lock(path) if _is_own(path) else None
        if lock is not None:
            shutil.rmtree(path)
            os.close(lock)


def _is_own(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _try_lock(directory: Path) -> int | None:
    """A locked descriptor of a directory; None when somebody else has locked or removed it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    return try_lock(descriptor)
