"""The main process's side of its workers: starts them, passes on what they say, notices their end, ends them."""

from __future__ import annotations

import errno
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from threading import Thread
from typing import TypeVar

from etl.errors import ConfigurationError, TransientError
from etl.runtime.environment import RunEnvironment
from etl.runtime.message import Failed
from etl.runtime.plan import MAIN, Plan
from etl.runtime.subtask import Report, failure_of
from etl.runtime.wiring import StateElsewhere
from etl.runtime.workers.control import (
    ANSWERS,
    Answer,
    Assignment,
    Connection,
    EventEmitted,
    EventHandled,
    Failure,
    Order,
    Reported,
    RestoreState,
    Resume,
    ShutDown,
    Start,
    StateRestored,
    StoredFragment,
    SubtasksStarted,
    Wired,
    raised,
)
from etl.runtime.workers.frames import channel_sockets
from etl.runtime.workers.outline import outline_of
from etl.sink import Emit
from etl.state import ranks

ANSWER_TIMEOUT_S = 120
"""How long a worker may take to import the job, or to restore a part of its state, before it counts as hung."""

SHUTDOWN_TIMEOUT_S = 2.0
"""How long the workers of an attempt may take to end before they are killed."""

_KEPT_FROM_WORKERS = (signal.SIGINT, signal.SIGTERM)
"""Whoever sends them to all processes of a run means the run: its main process decides."""

A = TypeVar("A", Wired, StateRestored, SubtasksStarted)


class ChannelEnds:
    """Makes the channels between processes, and keeps their ends until they are given away."""

    def __init__(self) -> None:
        self._ends: dict[int, dict[int, socket.socket]] = {}

    def end(self, number: int, sender: int, receiver: int) -> socket.socket | None:
        """See :class:`etl.runtime.wiring.Links`."""
        try:
            ends = channel_sockets()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise ConfigurationError(
                f"channel {number + 1} between processes needs more open files than are allowed; raise the limit"
                " (ulimit -n), or lower the parallelism"
            ) from error
        for place, end in zip((sender, receiver), ends, strict=True):
            self._ends.setdefault(place, {})[number] = end
        return self._ends.get(MAIN, {}).get(number)

    def of(self, place: int) -> Mapping[int, socket.socket]:
        """The ends of a process by number of the channel."""
        return self._ends.get(place, {})

    def close(self, places: Iterable[int]) -> None:
        """Close the ends of these processes, as far as this process has them."""
        for place in places:
            for end in self._ends.pop(place, {}).values():
                end.close()


class WorkerProcess:
    """One of them.

    Args:
        number: From 1.
        ends: Its ends of channels.
        report: To the coordinator.
        emit: Announces the steps that it tells of.
    """

    def __init__(self, number: int, ends: Iterable[socket.socket], report: Report, emit: Emit) -> None:
        self._number = number
        self._report = report
        self._emit = emit
        self._answers: queue.SimpleQueue[Answer | BaseException] = queue.SimpleQueue()
        self._leaving = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection = Connection(ours, ANSWER_TIMEOUT_S)
        try:
            with theirs:
                self._process = _start(theirs.fileno(), [end.fileno() for end in ends])
        except BaseException:
            self._connection.close()
            raise
        self._threads = [
            Thread(target=self._listen, name=f"worker-{number}", daemon=True),
            Thread(target=self._await_end, name=f"worker-{number}-end", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def __str__(self) -> str:
        return f"worker {self._number} (process {self.pid})"

    def send(self, order: Order) -> None:
        """Tell it something."""
        # Who has ended or hangs does not answer, and that is noticed.
        with suppress(OSError):
            self._connection.send(order)

    def answer(self, kind: type[A]) -> A:
        """Its answer to what it was told last.

        Raises:
            TransientError: It has ended, or does not answer.
            EtlError: It has failed.
        """
        try:
            answer = self._answers.get(timeout=ANSWER_TIMEOUT_S)
        except queue.Empty:
            raise TransientError(f"{self} did not answer within {ANSWER_TIMEOUT_S} s") from None
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, kind)
        return answer

    def _listen(self) -> None:
        try:
            while (content := self._connection.receive()) is not None:
                self._take(ANSWERS.decode(content))
        except BaseException as error:  # noqa: BLE001 - everything is handed to the coordinator, which raises it
            self._fail(failure_of(error).error)
        if not self._leaving:
            # Without its connection it is of no use; mostly it has ended.
            self._process.kill()

    def _take(self, answer: Answer) -> None:
        match answer:
            case Reported():
                self._report(answer.message())
            case EventEmitted():
                self.send(EventHandled(self._announce(answer)))
            case Failure():
                self._fail(raised(answer))
            case Wired() | StateRestored() | SubtasksStarted():
                self._answers.put(answer)

    def _announce(self, event: EventEmitted) -> bool:
        """Have listeners see a step before it is taken; whether it may be."""
        try:
            self._emit(event.name, **event.fields)
        except BaseException as error:  # noqa: BLE001 - as if it had been raised in a subtask of this process
            self._fail(failure_of(error).error)
            return False
        return True

    def _await_end(self) -> None:
        # Apart from the connection, which a child process of a function may hold open.
        code = self._process.wait()
        if not self._leaving:
            how = f"ended with exit code {code}" if code >= 0 else f"was ended by {_signal_name(-code)}"
            self._fail(TransientError(f"{self} {how}"))

    def _fail(self, error: BaseException) -> None:
        self._answers.put(error)
        self._report(Failed(error))

    def dismiss(self, timeout_s: float) -> None:
        """Tell it that the attempt is over."""
        self._leaving = True
        with suppress(OSError):
            self._connection.send(ShutDown(timeout_s), waiting=False)

    def end(self, deadline_s: float) -> None:
        """Wait for its end until a moment of the monotonic clock, then kill it; afterwards nothing is left of it."""
        try:
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._connection.shut()
        for thread in self._threads:
            thread.join(SHUTDOWN_TIMEOUT_S)
        self._connection.close()


class Fleet:
    """The workers of an attempt.

    Args:
        environment: Of the run.
        plan: Of its job.
        report: To the coordinator.

    Attributes:
        ends: The channels.
        subtasks: Names of all subtasks of workers, once they are started.
        stateful: Names of those that keep state.
    """

    def __init__(self, environment: RunEnvironment, plan: Plan, report: Report) -> None:
        self.ends = ChannelEnds()
        self.subtasks: list[str] = []
        self.stateful: list[str] = []
        self._environment = environment
        self._plan = plan
        self._report = report
        self._workers: list[WorkerProcess] = []

    def start(self, stored: Sequence[StateElsewhere]) -> None:
        """Start the processes and have them take in their state; their subtasks run when it returns.

        Args:
            stored: State of their subtasks.

        Raises:
            ConfigurationError: The job is another one when it is loaded again.
            TransientError: A worker has ended, or hangs.
        """
        if not self._plan.workers:
            return
        emit = self._environment.telemetry.emit
        for number in range(1, self._plan.workers + 1):
            worker = WorkerProcess(number, self.ends.of(number).values(), self._report, emit)
            self._workers.append(worker)
            emit("worker.started", worker=number, pid=worker.pid)
        for number, worker in enumerate(self._workers, start=1):
            worker.send(self._assignment(number))
        for worker in self._workers:
            wired = worker.answer(Wired)
            self.subtasks += wired.subtasks
            self.stateful += wired.stateful
        self.ends.close(range(1, self._plan.workers + 1))
        for one in stored:
            _restore(self._workers[one.place - 1], one)
        for worker in self._workers:
            worker.send(Start())
        for worker in self._workers:
            worker.answer(SubtasksStarted)

    def _assignment(self, number: int) -> Assignment:
        loader = self._environment.loader
        assert loader is not None
        return Assignment(
            worker=number,
            workers=self._environment.workers,
            # Others there may be, paths for instance, which an import passes over.
            search_path=[entry for entry in sys.path if isinstance(entry, str)],
            loader=loader,
            outline=outline_of(self._environment.job, self._environment.graph),
            files=self._environment.files,
            channels={channel: end.fileno() for channel, end in self.ends.of(number).items()},
        )

    def shut_down(self, timeout_s: float) -> None:
        """End all workers. No process and no socket is left."""
        with ExitStack() as ending:
            ending.callback(lambda: self.ends.close(range(self._plan.workers + 1)))
            deadline_s = time.monotonic() + timeout_s
            for worker in self._workers:
                ending.callback(worker.end, deadline_s)
            for worker in self._workers:
                worker.dismiss(timeout_s)


def _restore(worker: WorkerProcess, stored: StateElsewhere) -> None:
    for rank in ranks(stored.state.fragments):
        worker.send(RestoreState(stored.subtask, [StoredFragment.of(fragment) for fragment in rank]))
        worker.answer(StateRestored)
    if stored.state.watermark is not None:
        worker.send(Resume(stored.subtask, stored.state.watermark, stored.state.forgotten))
        worker.answer(StateRestored)


def _start(connection: int, channels: Sequence[int]) -> subprocess.Popen[bytes]:
    """A fresh interpreter: a copy of this process would have its locks without its threads."""
    options = [f"-W{option}" for option in sys.warnoptions]
    command = [sys.executable, "-P", *options, "-m", "etl.runtime.workers", str(connection)]
    # Inherited by the process, and by nothing else: from its first instruction on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT_FROM_WORKERS)
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[connection, *channels], process_group=0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} (kill -9, or the system ran out of memory)" if number == signal.SIGKILL else name
