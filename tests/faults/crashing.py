"""A server of a test's own, to be stopped or killed with everything below it, and started again at the same place."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import psycopg

from etl.errors import ConfigurationError
from etl.store.embedded import EmbeddedServer
from etl.store.embedded.binaries import find_bindir
from etl.store.migrations import upgrade
from tests.support.databases import create_database, with_database
from tests.support.servers import SESSION_DIR_VARIABLE, SETTINGS, give_up

TEMPLATE = "etl_template"
"""A database with the schema ``etl``, to make others from."""

END_TIMEOUT_S = 60

_NUMBERS = itertools.count()
"""Of the servers of this process: pytest may make a fixture of a module anew when its tests are not in one row."""


class Stop(StrEnum):
    """How the server comes to its end; by the last one it starts again by itself."""

    FAST = "fast shutdown"
    IMMEDIATE = "immediate shutdown"
    KILL = "kill -9 of all its processes"
    BACKEND = "kill -9 of one session's process"


_SIGNALS = {Stop.FAST: signal.SIGINT, Stop.IMMEDIATE: signal.SIGQUIT}


def require_programs() -> Path:
    """The directory of the server's programs; without any, the test is skipped, in CI it fails."""
    try:
        return find_bindir(os.environ)
    except ConfigurationError as error:
        give_up(str(error))


class CrashingServer:
    """A server of this worker's own, to be killed.

    Args:
        name: Tells it from others of this worker.
        settings: Of the server, besides those that all tests need.

    Attributes:
        url: Of its database.
        data: Directory of its files.
    """

    def __init__(self, name: str = "crash", settings: Mapping[str, str] | None = None) -> None:
        directory = Path(os.environ[SESSION_DIR_VARIABLE]) / f"{name}-{os.getpid()}-{next(_NUMBERS)}"
        self._server = EmbeddedServer(directory, {**SETTINGS, "shared_buffers": "16MB", **(settings or {})})
        self.url = self._server.acquire()
        self.data = self._server.status().directory / "cluster" / "data"
        create_database(self.url, TEMPLATE)
        upgrade(with_database(self.url, TEMPLATE))

    def kill(self) -> None:
        """kill -9 of the postmaster and of every process below it."""
        _signal_all(self._processes(), signal.SIGKILL)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Nothing of it moves for the block."""
        processes = self._processes()
        _signal_all(processes, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal_all(processes, signal.SIGCONT)

    def _processes(self) -> list[int]:
        postmaster = self._postmaster()
        return [postmaster, *children_of(postmaster)]

    def stop(self, how: Stop, victim: int, witness: psycopg.Connection[Any]) -> None:
        """Have the server come to its end; returns when it has begun to end its sessions.

        Args:
            how: In which way.
            victim: The session to be killed, where it is one.
            witness: A session of the test's own.
        """
        match how:
            case Stop.FAST | Stop.IMMEDIATE:
                os.kill(self._postmaster(), _SIGNALS[how])
            case Stop.KILL:
                self.kill()
            case Stop.BACKEND:
                os.kill(victim, signal.SIGKILL)
        try:
            witness.execute("SELECT pg_sleep(%s)", [END_TIMEOUT_S])
        except psycopg.OperationalError:
            return
        raise AssertionError(f"the server goes on after {how}")

    def restart(self) -> None:
        """Bring it back at the same place, or wait until it has come back by itself."""
        assert self._server.acquire() == self.url

    def close(self) -> None:
        """End it."""
        self._server.release()

    def _postmaster(self) -> int:
        pid = self._server.status().pid
        assert pid is not None
        return pid


def _signal_all(processes: Iterable[int], signum: signal.Signals) -> None:
    for pid in processes:
        # Some end by themselves.
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def kill_all_of(data: Path) -> None:
    """kill -9 of every process of the server whose files these are, in whatever state it is."""
    for directory in Path("/proc").glob("[0-9]*/cwd"):
        # Every process of a server works in its directory; others end while we look, or are closed to us.
        with suppress(OSError):
            if directory.readlink() == data:
                os.kill(int(directory.parent.name), signal.SIGKILL)


def children_of(parent: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if stat.read_text(errors="replace").rpartition(")")[2].split()[1] == str(parent):
                found.append(int(stat.parent.name))
    return found
