"""Which PostgreSQL server the tests run on: ``ETL_TEST_DSN``, the embedded server, a container, in this order.

An explicit DSN is never replaced by another server: when it is unfit, the tests fail and say why.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import psycopg
import pytest

from etl.errors import EtlError
from etl.settings import redact, to_url

SETTINGS: Mapping[str, str] = {
    "max_prepared_transactions": "64",
    "wal_level": "logical",
    "max_connections": "200",
    # Tests kill processes, never the machine, and so lose nothing by this.
    "fsync": "off",
}
VERSION_MIN = 150000
PREPARED_MIN = 64
CONNECTIONS_MIN = 50
SESSION_DIR_VARIABLE = "ETL_TEST_SESSION_DIR"
_SESSION_PREFIX = "etl-test-"


@contextmanager
def resolved_server() -> Iterator[str]:
    """The URL of a server that fits, up for the block; without any the tests are skipped, in CI they fail."""
    explicit = os.environ.get("ETL_TEST_DSN")
    if explicit:
        yield _checked(to_url(explicit))
        return
    refusals: list[str] = []
    with ExitStack() as stack:
        for name, candidate in (("embedded server", embedded_server), ("container", container_server)):
            try:
                url = stack.enter_context(candidate())
            except _Unavailable as error:
                refusals.append(f"{name}: {error}")
            else:
                yield url
                return
    give_up("no PostgreSQL for the tests; set ETL_TEST_DSN. Tried:\n  " + "\n  ".join(refusals))


class _Unavailable(Exception):  # noqa: N818 - not an error: the next kind of server is tried
    """This kind of server cannot be had here."""


@contextmanager
def embedded_server() -> Iterator[str]:
    """The embedded server of this test session; the workers of a parallel session share it."""
    from etl.store.embedded import EmbeddedServer

    try:
        server = EmbeddedServer(Path(os.environ[SESSION_DIR_VARIABLE]) / "server", SETTINGS)
        url = server.acquire()
    except EtlError as error:
        raise _Unavailable(str(error)) from error
    try:
        yield url
    finally:
        server.release()


@contextmanager
def container_server() -> Iterator[str]:
    """A PostgreSQL container of this process."""
    # Without a Docker daemon the constructor raises; pulling the image can fail as well. In either case: no server.
    try:
        from testcontainers.community.postgres import PostgresContainer

        container = PostgresContainer("postgres:18-alpine", driver=None)
        container.with_command("postgres " + " ".join(f"-c {name}={value}" for name, value in SETTINGS.items()))
        container.start()
    except Exception as error:
        raise _Unavailable(f"{type(error).__name__}: {error}") from error
    try:
        yield _checked(container.get_connection_url())
    finally:
        container.stop()


def give_up(text: str) -> NoReturn:
    """Skip the test, or fail it in CI, where nothing may be missing unnoticed."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


def _checked(url: str) -> str:
    try:
        problems = _unfit(url)
    except psycopg.Error as error:
        problems = [redact(str(error))]
    if problems:
        pytest.fail("the server of ETL_TEST_DSN is unfit:\n  " + "\n  ".join(problems), pytrace=False)
    return url


def _unfit(url: str) -> list[str]:
    with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
        row = connection.execute(
            "SELECT current_setting('server_version_num')::int, current_setting('max_prepared_transactions')::int, "
            "current_setting('max_connections')::int, current_setting('wal_level'), "
            "(SELECT rolcreatedb OR rolsuper FROM pg_roles WHERE rolname = current_user)"
        ).fetchone()
    assert row is not None
    version, prepared, connections, wal_level, may_create = row
    checks = [
        (version >= VERSION_MIN, f"server_version_num = {version}, needed: {VERSION_MIN} or more"),
        (prepared >= PREPARED_MIN, f"max_prepared_transactions = {prepared}, needed: {PREPARED_MIN} or more"),
        (connections >= CONNECTIONS_MIN, f"max_connections = {connections}, needed: {CONNECTIONS_MIN} or more"),
        (wal_level == "logical", f"wal_level = {wal_level}, needed: logical"),
        (may_create, "the role may not create databases: ALTER ROLE … CREATEDB"),
    ]
    return [text for fits, text in checks if not fits]


class SessionDirectory:
    """The directory of one test session: made by the main process, known to its workers by an environment variable.

    The main process holds a lock in it. A session that was killed leaves the directory, and perhaps a running server,
    but no lock: the next session removes both.
    """

    def __init__(self) -> None:
        # Not pytest's tmp_path: its parents are closed to the account the server runs under when the tests run as root.
        self.path = Path(tempfile.mkdtemp(prefix=_SESSION_PREFIX, dir="/var/tmp"))
        self.path.chmod(0o711)
        self._lock = _try_lock(self.path)
        os.environ[SESSION_DIR_VARIABLE] = str(self.path)

    def remove(self) -> None:
        """End the server that may still run in it, and delete all."""
        os.environ.pop(SESSION_DIR_VARIABLE, None)
        _remove_session(self.path)
        if self._lock is not None:
            os.close(self._lock)


def sweep_dead_sessions() -> None:
    """Remove what killed test sessions of this user have left."""
    for path in Path("/var/tmp").glob(f"{_SESSION_PREFIX}*"):
        # Another session may be sweeping as well: what vanishes meanwhile is gone, as wished.
        with suppress(FileNotFoundError):
            if path.stat().st_uid != os.geteuid():
                continue
            lock = _try_lock(path)
            if lock is not None:
                _remove_session(path)
                os.close(lock)


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path / "session.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_session(path: Path) -> None:
    for lock in path.glob("**/postgresql/start.lock"):
        from etl.store.embedded import EmbeddedServer

        EmbeddedServer(lock.parents[1]).stop(force=True)
    while path.exists():
        # A process of a server that was killed may still be removing files of its own.
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
