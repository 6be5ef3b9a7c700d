"""The embedded server as its users see it: acquire, use, release."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from psycopg import sql

from etl.errors import ConfigurationError
from etl.store.embedded import locks
from etl.store.embedded.account import Account, server_account
from etl.store.embedded.cluster import Answer, Cluster
from etl.store.embedded.configuration import DEFAULTS

DATABASE = "etl"
START_TIMEOUT_S = 60.0
# pg_ctl hands the path to a shell, inside double quotes; surrogates stand for bytes that are not UTF-8.
_FORBIDDEN = re.compile('["$`\\\\\x00-\x1f\x7f\ud800-\udfff]')


class ServerState(StrEnum):
    """What the server is doing."""

    ABSENT = "not created yet"
    STOPPED = "stopped"
    CHANGING = "starting or stopping"
    RUNNING = "running"


class StopOutcome(StrEnum):
    """What :meth:`EmbeddedServer.stop` found and did."""

    NOT_RUNNING = "not running"
    STOPPED = "stopped"
    IN_USE = "in use: the last command that uses it stops it"


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The server at one moment.

    Attributes:
        state: What it is doing.
        directory: Where all of it lies.
        version: Major version of the data directory; None before it exists.
        pid: Process id of the running server.
        port: TCP port on 127.0.0.1 and number of the socket.
        in_use: Whether commands use it; None while another command is starting or stopping it.
        kept: Whether it goes on running without users, until it is stopped explicitly.
    """

    state: ServerState
    directory: Path
    version: int | None
    pid: int | None
    port: int | None
    in_use: bool | None
    kept: bool


class EmbeddedServer:
    """One process' handle on the private server in a state directory.

    Many processes may do anything here at the same time. A process that dies without :meth:`release` counts as gone
    at once; the server it used is stopped by the next last user.
    """

    def __init__(
        self, state_dir: Path, settings: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        """Touches nothing yet.

        Args:
            state_dir: Where the server's files are to be; made when missing.
            settings: Server settings over the defaults; they hold from the next start of the server.
            environ: Source of ``ETL_PG_BINDIR`` and ``ETL_PG_USER``; the process' environment if not given.
        """
        self._home = state_dir.resolve() / "postgresql"
        if _FORBIDDEN.search(str(self._home)):
            raise ConfigurationError(
                f"state directory {str(state_dir)!r}: a character in it cannot be used; set ETL_STATE_DIR"
            )
        self._settings = {**DEFAULTS, **(settings or {})}
        self._environ = os.environ if environ is None else environ
        self._use: int | None = None

    def __enter__(self) -> str:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()

    def acquire(self) -> str:
        """Have the server running for this process, and say where.

        Creates, starts or recovers it as needed; waits while another process does so. Call it again when the server
        seems to have died: it is repaired, and the answer may have changed.

        Returns:
            URL of the database ``etl``.

        Raises:
            ConfigurationError: There are no PostgreSQL programs, or the server cannot run here; the text says why.
            DatabaseUnreachableError: It did not become ready within a minute.
        """
        self._make_home()
        with locks.exclusive(self._start_lock):
            cluster = self._cluster()
            cluster.start(self._settings, time.monotonic() + START_TIMEOUT_S)
            _make_database(cluster)
            if self._use is None:
                self._use = locks.shared(self._users_lock)
            return cluster.url(DATABASE)

    def release(self) -> None:
        """Stop using the server; the last user stops it, unless it is kept running."""
        if self._use is None:
            return
        with locks.exclusive(self._start_lock):
            os.close(self._use)
            self._use = None
            if not self._keep_marker.exists() and not locks.is_held(self._users_lock):
                self._cluster().stop()

    def keep_running(self) -> None:
        """Have the server stay when its last user leaves, also over restarts of the machine, until :meth:`stop`.

        A kill between acquiring and this leaves a server that the next last user stops.
        """
        self._keep_marker.touch()

    def stop(self, *, force: bool = False) -> StopOutcome:
        """Take the wish of :meth:`keep_running` back, and stop the server now if nobody uses it.

        Args:
            force: Stop it even if commands use it; their connections break.
        """
        if not self._start_lock.exists():
            return StopOutcome.NOT_RUNNING
        with locks.exclusive(self._start_lock):
            self._keep_marker.unlink(missing_ok=True)
            cluster = self._cluster()
            if not cluster.has_processes():
                return StopOutcome.NOT_RUNNING
            if not force and locks.is_held(self._users_lock):
                return StopOutcome.IN_USE
            cluster.stop()
            return StopOutcome.STOPPED

    def url(self) -> str:
        """URL of the database ``etl`` of the running server; holds the password.

        Raises:
            DatabaseUnreachableError: The server is not running.
        """
        return self._running().url(DATABASE)

    def tcp_url(self) -> str:
        """As :meth:`url`, over TCP on the loopback interface: for programs that do not know Unix sockets."""
        return self._running().tcp_url(DATABASE)

    def status(self) -> ServerStatus:
        """Look at the server without waiting for those who are starting or stopping it."""
        if not self._start_lock.exists():
            return ServerStatus(ServerState.ABSENT, self._home, None, None, None, in_use=False, kept=False)
        lock = locks.try_exclusive(self._start_lock)
        try:
            in_use = None if lock is None else locks.is_held(self._users_lock)
            return self._status(in_use)
        finally:
            if lock is not None:
                os.close(lock)

    def _status(self, in_use: bool | None) -> ServerStatus:
        cluster = self._cluster()
        state = _state(cluster, in_use)
        postmaster = cluster.postmaster() if state is ServerState.RUNNING else None
        return ServerStatus(
            state,
            self._home,
            cluster.version(),
            postmaster.pid if postmaster else None,
            postmaster.port if postmaster else None,
            in_use,
            kept=self._keep_marker.exists(),
        )

    def _running(self) -> Cluster:
        cluster = self._cluster()
        cluster.connect().close()
        return cluster

    # ------------------------------------------------------------------------------------------------ files

    @property
    def _start_lock(self) -> Path:
        return self._home / "start.lock"

    @property
    def _users_lock(self) -> Path:
        return self._home / "users.lock"

    @property
    def _keep_marker(self) -> Path:
        return self._home / "keep-running"

    def _account(self) -> Account:
        return server_account(self._home / "cluster", self._environ)

    def _cluster(self) -> Cluster:
        return Cluster(self._home, self._account(), self._environ)

    def _make_home(self) -> None:
        """Make the directory: closed to others, but for the server's account, which has to pass through it."""
        account = self._account()
        mode = 0o711 if account.switched else 0o700
        try:
            if not self._home.parent.exists():
                self._home.parent.mkdir(parents=True, exist_ok=True)
                self._home.parent.chmod(mode)
            self._home.mkdir(exist_ok=True)
            self._home.chmod(mode)
        except OSError as error:
            raise ConfigurationError(f"state directory {self._home}: {error.strerror}; set ETL_STATE_DIR") from error
        if not account.may_reach(self._home):
            raise ConfigurationError(
                f"user id {account.uid}, which the server runs under, may not enter {self._home}; "
                "set ETL_STATE_DIR to a directory whose parents are open to it"
            )


def _state(cluster: Cluster, in_use: bool | None) -> ServerState:
    answer = cluster.answer()
    if answer is Answer.READY:
        return ServerState.RUNNING
    # While another command holds the start lock, its tests of the server's lock must not be disturbed by ours.
    if in_use is None or answer is Answer.NOT_YET or cluster.has_processes():
        return ServerState.CHANGING
    return ServerState.STOPPED


def _make_database(cluster: Cluster) -> None:
    with cluster.connect() as connection:
        if connection.execute("SELECT FROM pg_database WHERE datname = %s", [DATABASE]).fetchone() is None:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
