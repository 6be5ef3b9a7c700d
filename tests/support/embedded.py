"""Helpers for tests of the embedded server itself: each test has a server of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from etl.store.embedded import EmbeddedServer
from tests.support.servers import SESSION_DIR_VARIABLE

REPOSITORY = Path(__file__).parents[2]

_CLIENT = """
import sys
from pathlib import Path
from etl.store.embedded import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]), {"fsync": "off"})
print(server.acquire(), flush=True)
sys.stdin.read()
server.release()
"""


@contextmanager
def state_directory(name: str = "state") -> Iterator[Path]:
    """A state directory that the server's account can reach; its server is stopped after the block."""
    # In the session's directory, so that the next session ends the server of one that was killed. Not below pytest's
    # tmp_path: its parents are closed to other accounts, which matters when root runs the tests.
    top = Path(tempfile.mkdtemp(prefix="s-", dir=os.environ[SESSION_DIR_VARIABLE]))
    top.chmod(0o711)
    state_dir = top / name
    try:
        yield state_dir
    finally:
        EmbeddedServer(state_dir).stop(force=True)
        shutil.rmtree(top)


class Client:
    """A process that uses the embedded server from its start until it is told to leave."""

    def __init__(self, state_dir: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, str(state_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._process:
            self._process.kill()

    def url(self) -> str:
        """Wait until the process has the server; empty when it failed."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def leave(self) -> int:
        """Tell the process to leave and wait for its end; its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait()

    def kill(self) -> None:
        """Kill the process without warning and wait for its end."""
        self._process.kill()
        self._process.wait()


def postmaster_pid(server: EmbeddedServer) -> int:
    """Process id of the running server."""
    pid = server.status().pid
    assert pid is not None
    return pid


def kill_postmaster(server: EmbeddedServer) -> int:
    """Kill the server's first process only; its backends find out by themselves, or not. Returns its id."""
    pid = postmaster_pid(server)
    os.kill(pid, signal.SIGKILL)
    return pid
