"""A warm process that forks runs: importing polars and pyarrow takes longer than a small run.

It holds what the engine needs and none of the user's code, starts no thread, and runs nothing but :func:`serve`; so its
children begin in a sane state, and each imports the job anew. Neither outlives the crash test: the zygote ends when its
connection does, and kills its child first.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import msgspec
import pyarrow as pa

import etl
from etl.errors import InternalError
from etl.testing.chaos.process import RunOutcome, RunRequest

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
POLL_S = 0.2
_ENVIRONMENT = {
    # Threads that allocators and numpy start at import would not survive a fork.
    "_RJEM_MALLOC_CONF": "background_thread:false",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OPENBLAS_NUM_THREADS": "1",
}
_CODE = "import sys; sys.path.append(sys.argv[1]); from etl.testing.chaos.zygote import main; main(*sys.argv[2:])"
_READY = b"ready"
_GIVE_UP = b"give up"
_KILLED = b"killed"


class StuckError(Exception):
    """A run did not end in time; it was killed."""


class ChaosStoppedError(Exception):
    """Somebody asked the crash test to stop; the run under way was killed."""


class StopRequest(threading.Event):
    """Set to stop a crash test."""


# --- in the zygote ----------------------------------------------------------------------------------------------------


def main(descriptor: str, preload: str) -> None:
    """Import everything that a run needs, then serve."""
    for module in ("etl.runtime.run", "polars", "pyarrow", "etl.operators", "etl.sources", "sinks", preload):
        import_module(module)
    # At its first array, pyarrow imports pandas where that is installed: better here once than in every run.
    pa.array([0])
    # What was imported is never looked at by the children's collector, and so stays shared with them.
    gc.freeze()
    control: Connection = Connection(int(descriptor))
    control.send_bytes(_READY)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(control)


def serve(control: Connection) -> None:
    """One run after another, until the crash test is gone.

    Raises:
        EOFError: It is.
    """
    while True:
        message = control.recv_bytes()
        if message == _GIVE_UP:
            continue  # the run has ended a moment before, and its outcome was sent
        request = msgspec.json.decode(message, type=RunRequest)
        words, theirs = Pipe(duplex=False)
        pid = _fork(request, control, words, theirs)
        try:
            said = _listen(control, words)
        finally:
            words.close()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        control.send_bytes(said or msgspec.json.encode(_silent(status)))


def _fork(request: RunRequest, control: Connection, words: Connection, theirs: Connection) -> int:
    with warnings.catch_warnings():
        # Python warns of forking beside other threads; polars keeps one that sleeps and holds no lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        control.close()
        words.close()
        live(request, theirs)
    theirs.close()
    return pid


def _listen(control: Connection, words: Connection) -> bytes:
    """What the child says at last; empty when it says nothing, or when the crash test has no more patience."""
    while control not in (ready := wait([control, words])):
        assert words in ready
        try:
            said = words.recv_bytes()
        except EOFError:
            return b""
        return msgspec.json.encode(RunOutcome(killed=True)) if said == _KILLED else said
    assert control.recv_bytes() == _GIVE_UP
    return b""


def _silent(status: int) -> RunOutcome:
    how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
    return RunOutcome(exit_code=70, error_class="InternalError", error=f"the run ended without a word, by {how}")


def live(request: RunRequest, words: Connection) -> NoReturn:
    """The whole life of a forked process: run and say what came of it, or be killed."""
    from etl.testing.chaos import process

    try:
        outcome = process.run(request, lambda: words.send_bytes(_KILLED))
        words.send_bytes(msgspec.json.encode(outcome))
    except BaseException:  # noqa: BLE001 - told on stderr; the crash test sees that nothing was said
        traceback.print_exc()
    finally:
        # Never back into the zygote's loop, and no clean-up of what was inherited from it.
        os._exit(0)


# --- in the crash test ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Started:
    process: subprocess.Popen[bytes]
    control: Connection


class Zygote:
    """The crash test's handle on its zygote.

    Args:
        preload: A module that the loading of the job needs.
        stop: The user's request to stop.
    """

    def __init__(self, preload: str, stop: StopRequest) -> None:
        self._stop = stop
        control, theirs = Pipe()
        command = [sys.executable, "-P", "-c", _CODE, str(Path(etl.__file__).parents[1]), str(theirs.fileno()), preload]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **_ENVIRONMENT},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # Whatever a user's function prints must not come between the results.
            stdout=subprocess.DEVNULL,
            # Ctrl-C is for the crash test alone: it ends the runs in an orderly way.
            start_new_session=True,
        )
        theirs.close()
        self._control: Connection = control
        self._is_ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run(self, request: RunRequest, timeout_s: float) -> RunOutcome:
        """Have a run and wait for its end.

        Raises:
            StuckError: It did not end in time.
            ChaosStoppedError: The user does not want to wait for it.
            InternalError: The zygote is gone.
        """
        try:
            if not self._is_ready:
                if not self._poll(START_TIMEOUT_S):
                    raise InternalError(f"no run could be started within {START_TIMEOUT_S:.0f} s")
                assert self._control.recv_bytes() == _READY
                self._is_ready = True
            self._control.send_bytes(msgspec.json.encode(request))
            if not self._poll(timeout_s):
                self._control.send_bytes(_GIVE_UP)
                self._control.recv_bytes()
                raise StuckError(f"not ended within {timeout_s:.0f} s")
            return msgspec.json.decode(self._control.recv_bytes(), type=RunOutcome)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise InternalError("the process that starts the runs of the crash test has ended") from error

    def _poll(self, timeout_s: float) -> bool:
        """Whether there is something to receive before the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while not self._control.poll(max(0.0, min(POLL_S, deadline_s - time.monotonic()))):
            if self._stop.is_set():
                raise ChaosStoppedError
            if time.monotonic() >= deadline_s:
                return False
        return True
