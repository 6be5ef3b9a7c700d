"""One PostgreSQL database: how the framework connects to it, and what it sets on every connection."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from threading import Timer
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sqlalchemy.pool import NullPool

from etl.errors import ConfigurationError, DatabaseUnreachableError
from etl.settings import redact
from etl.sqlstate import translate
from etl.store.session import Session
from etl.store.watchdog import Watchdog

CONNECT_TIMEOUT_S = 10
LOCK_TIMEOUT_S = 60
ASK_TIMEOUT_S = 10
SEND_BUFFER_BYTES = 1 << 20
_DEAD_PEER: Mapping[str, int] = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""libpq's parameters (seconds, but for the last: milliseconds) that notice within half a minute that nobody answers."""

Connection = psycopg.Connection[Any]


class Database:
    """A database of the run: the store, or a target.

    Args:
        url: libpq URL or conninfo string; may hold a password and is never shown.
        name: What the user calls it, for messages.
        unit_time_s: How long a transaction of a sink may stay open; the server's own timeouts for idle and long
            transactions are raised to twice that on each connection, so that they end only abandoned work.
        watchdog: Looks after the sessions; None where somebody sits in front of it who can interrupt.
    """

    def __init__(self, url: str, name: str, unit_time_s: float = 3600.0, watchdog: Watchdog | None = None) -> None:
        self.name = name
        self._url = url
        self._unit_time_s = unit_time_s
        self._watchdog = watchdog
        try:
            self._parts = conninfo_to_dict(url)
        except psycopg.ProgrammingError as error:
            raise ConfigurationError(f"the URL of database {name} cannot be read: {redact(str(error))}") from None
        self._dead_peer = {key: str(self._parts.get(key) or value) for key, value in _DEAD_PEER.items()}

    @property
    def safe_url(self) -> str:
        """Host, port, database and user, never a secret."""
        shown = [f"{key}={self._parts[key]}" for key in ("host", "port", "dbname", "user") if self._parts.get(key)]
        return " ".join(shown) or "the default of libpq"

    def for_run(self, unit_time_s: float, watchdog: Watchdog) -> Database:
        """The same database with another bound for open transactions, and sessions that are looked after."""
        return Database(self._url, self.name, unit_time_s, watchdog)

    def connect(self, application_name: str) -> Connection:
        """Open an autocommit connection with durable commits, keepalives and bounded waits.

        What the URL says about keepalives and timeouts of the network holds on both sides of the connection.

        Args:
            application_name: Shown in ``pg_stat_activity``; at most 63 bytes count.

        Raises:
            DatabaseUnreachableError: No connection; the message never holds the password.
        """
        session = self._connect(application_name)
        if self._watchdog is not None:
            self._watchdog.watch(session, application_name, self._at_work)
        try:
            _enlarge_send_buffer(session)
            self._configure(session)
        except psycopg.Error as error:
            session.close()
            raise translate(error, f"setting up a connection to database {self.name}") from error
        return session

    def _connect(self, application_name: str) -> Session:
        try:
            return self._start_session(application_name)
        except psycopg.OperationalError as error:
            reason = redact(str(error)).strip().replace("\n", " ")
            raise DatabaseUnreachableError(
                f"database {self.name} ({self.safe_url}) is not reachable: {reason}"
            ) from None

    def _start_session(self, application_name: str) -> Session:
        conninfo = make_conninfo(
            self._url,
            application_name=application_name,
            connect_timeout=self._parts.get("connect_timeout") or CONNECT_TIMEOUT_S,
            **self._dead_peer,
        )
        return Session.connect(conninfo, autocommit=True, prepare_threshold=None)

    def _at_work(self, sessions: Collection[Session]) -> set[Session]:
        """Those that do not wait for their client, as the server sees it, over a connection of its own.

        Raises:
            psycopg.OperationalError: Nobody answers.
        """
        try:
            asking = self._start_session("etl:watchdog")
        except psycopg.errors.ConnectionTimeout:
            raise
        except psycopg.OperationalError:
            # That is an answer, if only that there are too many connections: nothing is known of the sessions.
            return set(sessions)
        with closing(asking):
            limit = Timer(ASK_TIMEOUT_S, asking.cut, [f"no answer for {ASK_TIMEOUT_S} s"])
            limit.daemon = True
            limit.start()
            try:
                # Nothing is shown of a session of another role: that one gets the benefit of the doubt.
                found = asking.execute(
                    "SELECT pid FROM pg_catalog.pg_stat_activity"
                    " WHERE pid = ANY (%s) AND wait_event_type IS DISTINCT FROM 'Client'",
                    [[session.server_pid for session in sessions]],
                )
                pids = {pid for (pid,) in found}
            finally:
                limit.cancel()
        return {session for session in sessions if session.server_pid in pids}

    def _configure(self, session: Session) -> None:
        unit_ms = int(self._unit_time_s * 2000)
        settings: dict[str, str] = {
            "synchronous_commit": "on",
            "lock_timeout": f"{LOCK_TIMEOUT_S}s",
            "statement_timeout": "0",
            "idle_in_transaction_session_timeout": f"{unit_ms}ms",
            "tcp_keepalives_idle": self._dead_peer["keepalives_idle"],
            "tcp_keepalives_interval": self._dead_peer["keepalives_interval"],
            "tcp_keepalives_count": self._dead_peer["keepalives_count"],
            "tcp_user_timeout": self._dead_peer["tcp_user_timeout"],
            "client_encoding": "UTF8",
            "DateStyle": "ISO, YMD",
            "IntervalStyle": "postgres",
            "TimeZone": "UTC",
        }
        if session.info.server_version >= 140000:
            settings["client_connection_check_interval"] = "2s"
        if session.info.server_version >= 170000:
            settings["transaction_timeout"] = "0"
        commands = [sql.SQL("SET {} = {}").format(sql.Identifier(k), sql.Literal(v)) for k, v in settings.items()]
        # Asked in the same breath: behind a pooler, the process that the connection's start named is an invention.
        cursor = session.execute(sql.SQL("; ").join([*commands, sql.SQL("SELECT pg_backend_pid()")]))
        cursor.set_result(-1)
        (session.server_pid,) = cursor.fetchone() or (None,)

    def open(self, application_name: str) -> StoreConnection:
        """Open a connection for Core statements and, on the same session, for COPY and explicit transactions."""
        return StoreConnection(self, application_name)

    @contextmanager
    def session(self, application_name: str) -> Iterator[StoreConnection]:
        """A connection that is closed at the end of the block."""
        connection = self.open(application_name)
        try:
            yield connection
        finally:
            connection.close()


def _enlarge_send_buffer(connection: Connection) -> None:
    """Let a COPY over a Unix socket run ahead while the next rows are encoded; TCP sizes its buffers by itself.

    The kernel cuts the size to its limit (``net.core.wmem_max``), which is still twice the default.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as view:
        if view.family == socket.AF_UNIX:
            view.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def _unwrap(context: sa.ExceptionContext) -> None:
    """Let the driver's own errors through: they are classified by SQLSTATE in one place."""
    if isinstance(context.original_exception, psycopg.Error):
        raise context.original_exception


class StoreConnection:
    """One server session seen twice: ``core`` for SQLAlchemy Core statements, ``driver`` for psycopg.

    The session is in autocommit mode; transactions are explicit (:mod:`etl.transaction`) and cover statements of both
    views alike.
    """

    def __init__(self, database: Database, application_name: str) -> None:
        self.driver: Connection = database.connect(application_name)
        engine = sa.create_engine(
            "postgresql+psycopg://",
            creator=lambda: self.driver,
            poolclass=NullPool,
            use_native_hstore=False,
            isolation_level="AUTOCOMMIT",
        )
        sa.event.listen(engine, "handle_error", _unwrap)
        try:
            self.core: sa.Connection = engine.connect()
        except BaseException:
            self.driver.close()
            raise

    def rename(self, application_name: str) -> None:
        """Change what ``pg_stat_activity`` shows for this session."""
        self.driver.execute("SELECT set_config('application_name', %s, false)", [application_name])

    @property
    def closed(self) -> bool:
        """Whether the session is known to be gone."""
        return self.driver.closed

    def close(self) -> None:
        """End the session; an open transaction is rolled back by the server."""
        self.driver.close()
        self.core.invalidate()
        self.core.close()
