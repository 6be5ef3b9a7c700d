"""Places subtasks on threads of this process. Knows how to start them and how to end them, nothing else."""

from __future__ import annotations

import time
from threading import Thread

from etl.runtime.message import Finish
from etl.runtime.source_subtask import SourceSubtask
from etl.runtime.wiring import Wiring

SHUTDOWN_TIMEOUT_S = 10.0
"""How long the threads of a failed attempt may take to end before the next attempt begins without them."""

STOPPING_TIMEOUT_S = 1.0
"""The same when the user waits for the process to end."""


class ThreadExecutor:
    """One thread a subtask. Parsing, transforming and COPY run outside the interpreter lock and overlap.

    Args:
        wiring: The subtasks of an attempt that run in this process.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        # Daemons: a thread stuck in a dead network must not keep the process alive. Its session is fenced anyway.
        bodies = [(one.run, one.uid) for one in wiring.subtasks] + [(one.run, one.uid) for one in wiring.receivers]
        self._threads = [Thread(target=run, name=uid, daemon=True) for run, uid in bodies]

    def start(self) -> None:
        """Start every subtask."""
        for thread in self._threads:
            thread.start()

    def shut_down(self, timeout_s: float) -> list[str]:
        """Wake and join all threads; returns the names of those that did not end in time."""
        for channel in self._wiring.channels:
            channel.close()
        for subtask in self._wiring.subtasks:
            if isinstance(subtask, SourceSubtask):
                subtask.command(Finish())
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline_s - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]
