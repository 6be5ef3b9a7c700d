"""A server of a test's own, to be killed with everything below it and started again at the same place."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from etl.store.embedded import EmbeddedServer
from etl.store.migrations import upgrade
from tests.support.databases import create_database, with_database
from tests.support.servers import SESSION_DIR_VARIABLE, SETTINGS

TEMPLATE = "etl_template"
"""A database with the schema ``etl``, to make others from."""


class CrashingServer:
    """A server of this worker's own, to be killed."""

    def __init__(self) -> None:
        directory = Path(os.environ[SESSION_DIR_VARIABLE]) / f"crash-{os.getpid()}"
        self._server = EmbeddedServer(directory, {**SETTINGS, "shared_buffers": "16MB"})
        self.url = self._server.acquire()
        create_database(self.url, TEMPLATE)
        upgrade(with_database(self.url, TEMPLATE))

    def kill(self) -> None:
        """kill -9 of the postmaster and of every process below it."""
        postmaster = self._server.status().pid
        assert postmaster is not None
        # Looked up before: they are nobody's children once the postmaster is dead.
        doomed = [postmaster, *_children_of(postmaster)]
        for pid in doomed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def restart(self) -> None:
        """Bring it back at the same place."""
        assert self._server.acquire() == self.url

    def close(self) -> None:
        """End it."""
        self._server.release()


def _children_of(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if stat.read_text(errors="replace").rpartition(")")[2].split()[1] == str(parent):
                found.append(int(stat.parent.name))
    return found
