"""A warm process that forks runs: importing polars and pyarrow costs more than a whole run.

It starts no thread of its own and runs nothing but this loop, so that its children begin in a sane state. Both sides
live in this module: :func:`serve` in the zygote, :class:`Zygote` in the test.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from tests.faults.fault import RunRequest, RunResult

_MESSAGE_BYTES_MAX = 1 << 20
TIMEOUT_S = 60.0
_ENVIRONMENT = {
    # One thread is enough for a dozen rows, and cheap to start.
    "POLARS_MAX_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # Threads that allocators start at import would not survive a fork.
    "_RJEM_MALLOC_CONF": "background_thread:false",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


@dataclass(frozen=True, slots=True)
class Spawn:
    """Fork a run; the end of its channel comes with the message."""

    request: RunRequest


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until a run has ended or stands still."""

    pid: int


@dataclass(frozen=True, slots=True)
class _Order:
    spawn: Spawn | None = None
    wait: Await | None = None


# --- in the zygote ----------------------------------------------------------------------------------------------------


def serve(control: socket.socket) -> None:
    """Obey orders until the test is gone."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES_MAX, 1)
        if not message:
            return
        order = msgspec.json.decode(message, type=_Order)
        if order.spawn is not None:
            answer = _fork(order.spawn.request, control, descriptors[0])
        else:
            assert order.wait is not None
            _, answer = os.waitpid(order.wait.pid, os.WUNTRACED)
        control.send(str(answer).encode())


def _fork(request: RunRequest, control: socket.socket, descriptor: int) -> int:
    with warnings.catch_warnings():
        # Python warns of forking beside other threads; polars keeps one that sleeps and holds no lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        from tests.faults.child import live

        control.close()
        live(request, socket.socket(fileno=descriptor))
    os.close(descriptor)
    return pid


def main() -> None:
    """Import everything that a run needs, then serve."""
    import pyarrow

    import tests.faults.child  # noqa: F401

    # With its first array pyarrow imports pandas, where there is one: as dear as a run.
    pyarrow.array([])
    # What was imported is never looked at by the children's collector, and so stays shared with them.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])))


# --- in the test ------------------------------------------------------------------------------------------------------


class StuckError(AssertionError):
    """A run did not end in time."""


class ChildRun:
    """A run in a process of its own.

    Attributes:
        pid: Its process.
        request: What it was told.
    """

    def __init__(self, zygote: Zygote, pid: int, request: RunRequest, channel: socket.socket) -> None:
        self.pid = pid
        self.request = request
        self._zygote = zygote
        self._channel = channel

    def wait(self) -> RunResult | None:
        """Wait for the end; the result, or None when it was killed."""
        return self.ended(self._zygote.status_of(self))

    def end(self, exit_code: int = 0, restarts: int | None = None) -> RunResult:
        """Wait for the end, which must be of its own making and with this exit code, after so many restarts."""
        result = self.wait()
        assert result is not None, f"{self.request} was killed"
        assert result.exit_code == exit_code, result.trace
        assert restarts in (None, result.restarts), result.trace
        return result

    def ended(self, status: int) -> RunResult | None:
        """Take the result of a run whose end was waited for; None when it was killed."""
        assert not os.WIFSTOPPED(status), f"{self.request} stands still"
        self.close()
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL, f"{self.request} was ended by signal {os.WTERMSIG(status)}"
            return None
        return self._result(os.WEXITSTATUS(status))

    def _result(self, exit_code: int) -> RunResult:
        assert self._told is not None, f"{self.request} exited with {exit_code} and said nothing; see stderr"
        result = msgspec.json.decode(self._told, type=RunResult)
        assert result.exit_code == exit_code
        return result

    def wait_stopped(self) -> bool:
        """Wait until it stands still; False when it ended instead."""
        status = self._zygote.status_of(self)
        return os.WIFSTOPPED(status)

    def go_on(self) -> None:
        """Have a run that stands still go on."""
        os.kill(self.pid, signal.SIGCONT)

    def asked(self) -> str | None:
        """Wait until it asks; the step, None when it ended without asking."""
        message = self._channel.recv(_MESSAGE_BYTES_MAX)
        if message.startswith(b"{") or not message:
            self._told = message
            return None
        return message.decode()

    def answer(self) -> None:
        """Have a run that has asked go on."""
        self._channel.send(b"go on")

    def close(self) -> None:
        """Take what it said last."""
        if self._channel.fileno() >= 0:
            self._told = self._told or self._channel.recv(_MESSAGE_BYTES_MAX)
            self._channel.close()

    _told: bytes | None = None


class Zygote:
    """The test's handle on its zygote.

    Args:
        environ: What its processes have in their environment besides that of the test.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(TIMEOUT_S)
        self._running: dict[int, ChildRun] = {}
        command = [sys.executable, "-m", "tests.faults.zygote", str(theirs.fileno())]
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            command,
            cwd=root,
            env={**os.environ, **_ENVIRONMENT, **(environ or {})},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill_all()
        self._control.close()
        self._process.wait(TIMEOUT_S)

    def spawn(self, request: RunRequest) -> ChildRun:
        """Start a run."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(TIMEOUT_S)
        with theirs:
            socket.send_fds(self._control, [msgspec.json.encode(_Order(spawn=Spawn(request)))], [theirs.fileno()])
        child = ChildRun(self, self._answer(), request, ours)
        self._running[child.pid] = child
        return child

    def run(self, request: RunRequest) -> RunResult | None:
        """Start a run and wait for its end; None when it was killed."""
        return self.spawn(request).wait()

    def status_of(self, child: ChildRun) -> int:
        """Wait for a run's end or stop; the status as of ``waitpid``."""
        self._control.send(msgspec.json.encode(_Order(wait=Await(child.pid))))
        try:
            status = self._answer()
        except TimeoutError:
            os.kill(child.pid, signal.SIGKILL)
            self._answer()
            del self._running[child.pid]
            raise StuckError(f"not ended within {TIMEOUT_S:g} s: {child.request}") from None
        if not os.WIFSTOPPED(status):
            del self._running[child.pid]
        return status

    def kill_all(self) -> None:
        """End every run that a failed test has left."""
        for child in list(self._running.values()):
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            while os.WIFSTOPPED(self.status_of(child)):
                pass
            child.close()

    def _answer(self) -> int:
        return int(self._control.recv(64))


if __name__ == "__main__":
    main()
