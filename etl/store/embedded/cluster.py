"""A database cluster on disk and its server process; who may do what when is the business of ``server``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
from psycopg import pq

from etl.errors import ConfigurationError, DatabaseUnreachableError
from etl.settings import redact
from etl.store.embedded import locks
from etl.store.embedded.account import Account
from etl.store.embedded.binaries import Programs
from etl.store.embedded.configuration import write_configuration
from etl.store.embedded.creation import ROLE, create_data, create_password
from etl.store.embedded.place import Port, socket_directory
from etl.store.embedded.processes import is_alive, kill_orphans

_STOP_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.02
_CONNECT_TIMEOUT_S = 10
_LOG_BYTES_MAX = 10_000_000
_LOG_TAIL_BYTES = 2_000
# Variables such as PGCHANNELBINDING=require are meant for other servers: what this one offers is said in full.
_PLAIN = {"sslmode": "disable", "gssencmode": "disable", "channel_binding": "disable"}


class Answer(StrEnum):
    """What comes back from the place where the server should be."""

    NONE = "none"
    NOT_YET = "starting or stopping"
    READY = "ready"


_ANSWERS = {pq.Ping.OK: Answer.READY, pq.Ping.REJECT: Answer.NOT_YET, pq.Ping.NO_RESPONSE: Answer.NONE}


@dataclass(frozen=True, slots=True)
class Postmaster:
    """What the server wrote about itself into ``postmaster.pid``; it may be long dead."""

    pid: int
    port: int
    socket_dir: str


class Cluster:
    """One data directory with its sockets, log and configuration below ``home``."""

    def __init__(self, home: Path, account: Account, environ: Mapping[str, str]) -> None:
        self.data = home / "cluster" / "data"
        self.log = home / "cluster" / "server.log"
        self._account = account
        self._programs = Programs(account, home, environ)
        self._configuration = home / "server.conf"
        self._password = home / "password"
        self._port = Port(home / "port")
        self._lock = home / "server.lock"

    def version(self) -> int | None:
        """Major version the data directory was made by; None while there is none."""
        file = self.data / "PG_VERSION"
        return int(file.read_text(encoding="ascii")) if file.exists() else None

    def has_processes(self) -> bool:
        """Whether any process of the server is left, be it the server itself or what a killed one left behind."""
        return locks.is_held(self._lock)

    def postmaster(self) -> Postmaster | None:
        """The server that holds the data directory, or held it last; None while there is none or it is not up yet."""
        try:
            lines = (self.data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return None
        if len(lines) < 6 or not lines[3].strip().isdigit():
            return None
        return Postmaster(int(lines[0]), int(lines[3]), lines[4].strip())

    def url(self, database: str) -> str:
        """URL through the private socket."""
        return self._url(self._present(), database)

    def _url(self, postmaster: Postmaster, database: str) -> str:
        # From what the server wrote, never from its configuration: a failed start may have rewritten that.
        place = {"host": postmaster.socket_dir, "port": str(postmaster.port)}
        return f"postgresql://{self._login()}@/{database}?{urlencode(place | _PLAIN, quote_via=quote, safe='')}"

    def tcp_url(self, database: str) -> str:
        """URL through TCP on the loopback interface, for programs that know no sockets."""
        place = f"127.0.0.1:{self._present().port}"
        return f"postgresql://{self._login()}@{place}/{database}?{urlencode(_PLAIN)}"

    def answer(self) -> Answer:
        """Ask whether the server takes connections, without waiting until it does.

        Raises:
            ConfigurationError: The environment keeps libpq from asking.
        """
        # Looked up once: a server that stops removes its file at any moment.
        postmaster = self.postmaster()
        if postmaster is None:
            return Answer.NONE
        # Not a connection attempt: its errors could be told apart by their texts only.
        ping = pq.PGconn.ping(f"{self._url(postmaster, 'postgres')}&connect_timeout={_CONNECT_TIMEOUT_S}".encode())
        if ping == pq.Ping.NO_ATTEMPT:
            raise ConfigurationError("libpq makes no attempt to connect; look at the PG… environment variables")
        return _ANSWERS[pq.Ping(ping)]

    def connect(self) -> psycopg.Connection[Any]:
        """An autocommit connection to the maintenance database of this very cluster.

        Raises:
            ConfigurationError: The answering server serves another directory.
            DatabaseUnreachableError: No server answers, or it refuses.
        """
        url = self.url("postgres")
        try:
            connection = psycopg.connect(
                url, autocommit=True, connect_timeout=_CONNECT_TIMEOUT_S, options="", client_encoding="utf8"
            )
        except psycopg.OperationalError as error:
            raise DatabaseUnreachableError(f"embedded server: {redact(str(error))}") from error
        row = connection.execute("SHOW data_directory").fetchone()
        if row != (str(self.data),):
            connection.close()
            # The state directory is a copy of a running server's: its pid file points at the original.
            raise ConfigurationError(
                f"{self.data} points at the server of {row[0] if row else '?'}: stop that one first"
            )
        return connection

    def start(self, settings: Mapping[str, str], deadline: float) -> None:
        """Bring the server up, from whatever state a crash has left; returns when it takes connections.

        Args:
            settings: Lines of the configuration.
            deadline: When to give up, by ``time.monotonic``.

        Raises:
            ConfigurationError: It cannot be started as things are.
            DatabaseUnreachableError: It did not come up in time (a long recovery goes on and may be waited for again).
        """
        while self.answer() is not Answer.READY:
            if time.monotonic() > deadline:
                raise DatabaseUnreachableError(
                    f"the embedded server is not ready yet; try again later or see {self.log}"
                )
            lock = locks.try_exclusive(self._lock)
            if lock is None:
                self._wait_for_processes()
                continue
            try:
                self._launch(settings, lock, deadline)
            finally:
                # The server's processes have inherited it and hold it as long as one of them lives.
                os.close(lock)

    def stop(self) -> None:
        """End the server and its sessions, prepared transactions stay; nothing happens when it is not running."""
        if not self.has_processes():
            return
        failure = None
        if self._postmaster_lives():
            failure = self._programs.run("pg_ctl", "-D", self.data, "-m", "fast", "-W", "stop")
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while self.has_processes():
            if time.monotonic() > deadline:
                raise DatabaseUnreachableError(f"the embedded server does not stop: {failure or f'see {self.log}'}")
            self._wait_for_processes()

    def _wait_for_processes(self) -> None:
        """Wait a moment for processes that hold the data directory: a server that starts or stops, or orphans."""
        if self.answer() is Answer.NONE and not self._postmaster_lives():
            kill_orphans(self.data, self._account)
        # Neither the end of recovery nor that of a process which is not our child can be waited for in another way.
        time.sleep(_POLL_INTERVAL_S)

    def _launch(self, settings: Mapping[str, str], lock: int, deadline: float) -> None:
        """Start while no process of an earlier server is left, which is what holding the lock means."""
        if self.version() is None:
            create_password(self._password)
            password = self._password.read_text(encoding="ascii")
            create_data(self.data, password, self._account, self._programs, settings)
        self._check_version()
        sockets = self._forget_former_server()
        self._rotate_log()
        write_configuration(self._configuration, {**settings, **_listening(sockets, self._port.choose())})
        wait_s = max(1, int(deadline - time.monotonic()))
        command = ("-D", self.data, "-l", self.log, "-w", "-t", str(wait_s), "start")
        failure = self._programs.run("pg_ctl", *command, pass_fds=(lock,))
        # Where another program took the port since it was chosen, the caller's loop tries the next.
        if failure is not None and self.answer() is Answer.NONE and self._port.is_free():
            raise ConfigurationError(f"the embedded server does not start: {failure}\n{self._log_tail()}")

    def _check_version(self) -> None:
        data, programs = self.version(), self._programs.major
        if data != programs:
            raise ConfigurationError(
                f"{self.data} was made by PostgreSQL {data}, the programs are PostgreSQL {programs}: with "
                f"ETL_PG_BINDIR at programs of version {data}, dump it by pg_dumpall; move it away; restore the dump"
            )

    def _forget_former_server(self) -> Path:
        """Remove the marks of a server that is gone: its process id may be a zombie's, or somebody else's by now."""
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        sockets = socket_directory(self.data.parent, self._account)
        for file in sockets.glob(".s.PGSQL.*"):
            file.unlink()
        return sockets

    def _rotate_log(self) -> None:
        if self.log.exists() and self.log.stat().st_size > _LOG_BYTES_MAX:
            self.log.replace(self.log.with_suffix(".log.1"))

    def _log_tail(self) -> str:
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")

    def _postmaster_lives(self) -> bool:
        postmaster = self.postmaster()
        return is_alive(postmaster.pid if postmaster else None, self.data, self._account)

    def _present(self) -> Postmaster:
        postmaster = self.postmaster()
        if postmaster is None:
            raise DatabaseUnreachableError('the embedded server is not running; "etl server start" starts it')
        return postmaster

    def _login(self) -> str:
        return f"{ROLE}:{quote(self._password.read_text(encoding='ascii'), safe='')}"


def _listening(sockets: Path, port: int) -> dict[str, str]:
    return {
        "listen_addresses": "127.0.0.1",
        "port": str(port),
        # The list of directories is split at commas and blanks unless they are in double quotes.
        "unix_socket_directories": f'"{sockets}"',
        "unix_socket_permissions": "0700",
    }
