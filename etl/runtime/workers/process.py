"""A worker process: makes the job anew, wires what the plan places here, and does what the main process says.

It has no database session and no position: whatever it does after the attempt is over reaches nobody. It ends with the
main process, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import sys
from threading import Lock, Thread
from typing import Any

from etl.clock import SystemClock
from etl.runtime.channel import ChannelClosedError
from etl.runtime.classification import classify
from etl.runtime.executor import ThreadExecutor
from etl.runtime.message import Failed, Message
from etl.runtime.plan import MAIN, plan_of
from etl.runtime.subtask import failure_of
from etl.runtime.wiring import Wiring, wire_chains
from etl.runtime.workers.control import (
    ORDERS,
    Answer,
    Assignment,
    Connection,
    EventEmitted,
    EventHandled,
    Order,
    Reported,
    RestoreState,
    Resume,
    ShutDown,
    Start,
    StateRestored,
    SubtasksStarted,
    Wired,
    told,
)
from etl.runtime.workers.outline import outline_of, require_same, require_unchanged

EXIT_ORPHANED = 70
"""Seen by nobody but the system: the main process has ended."""

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """The process's body; its only argument is the descriptor of the connection to the main process."""
    _end_with_parent()
    Worker(Connection(socket.socket(fileno=int(sys.argv[1])))).run()


def _end_with_parent() -> None:
    """Where the system offers it: also when a function holds the interpreter's lock and no end would be noticed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class InheritedEnds:
    """This process's ends of channels.

    Args:
        descriptors: By number of the channel.
    """

    def __init__(self, descriptors: dict[int, int]) -> None:
        self._descriptors = descriptors

    def end(self, number: int, _sender: int, _receiver: int) -> socket.socket | None:
        """See :class:`etl.runtime.wiring.Links`."""
        descriptor = self._descriptors.get(number)
        return None if descriptor is None else socket.socket(fileno=descriptor)


class Worker:
    """Obeys the main process.

    Args:
        connection: To it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._handled: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._emitting = Lock()
        self._wiring = Wiring(self._report, self._emit, SystemClock())
        self._executor: ThreadExecutor | None = None

    def run(self) -> None:
        """Until the main process says so, or has ended."""
        Thread(target=self._listen, name="orders", daemon=True).start()
        while not isinstance(order := self._orders.get(), ShutDown):
            try:
                self._obey(order)
            except BaseException as error:  # noqa: BLE001 - everything is handed to the main process
                self._report(failure_of(error))
        if self._executor is None:
            self._wiring.close()
        elif self._executor.shut_down(order.timeout_s):
            # What does not end is left behind, and would keep the process.
            os._exit(0)

    def _listen(self) -> None:
        while (content := self._connection.receive()) is not None:
            order = ORDERS.decode(content)
            if isinstance(order, EventHandled):
                self._handled.put(order.accepted)
            else:
                self._orders.put(order)
        os._exit(EXIT_ORPHANED)

    def _obey(self, order: Order) -> None:
        match order:
            case Assignment():
                self._wire(order)
                self._send(Wired([one.uid for one in self._wiring.subtasks], list(self._wiring.stateful)))
            case RestoreState():
                self._wiring.stateful[order.subtask].restore([one.fragment() for one in order.fragments])
                self._send(StateRestored())
            case Resume():
                self._wiring.stateful[order.subtask].resume(order.watermark, order.forgotten)
                self._send(StateRestored())
            case Start():
                for subtask in self._wiring.stateful.values():
                    subtask.announce_due()
                self._executor = ThreadExecutor(self._wiring)
                self._executor.start()
                self._send(SubtasksStarted())

    def _wire(self, assignment: Assignment) -> None:
        sys.path[:] = assignment.search_path
        job = assignment.loader.load()
        graph = job.graph()
        require_unchanged(assignment.files)
        require_same(assignment.outline, outline_of(job, graph))
        plan = plan_of(graph, job.parallelism, assignment.workers)
        wiring = self._wiring
        wiring.here, wiring.links = assignment.worker, InheritedEnds(dict(assignment.channels))
        for source in graph.sources:
            wiring.produce(source.id, (MAIN,) * source.parallelism)
        wire_chains(wiring, job, graph, {}, plan)
        for sink in graph.sinks:
            wiring.gate([sink.input])

    def _report(self, message: Message) -> None:
        self._send(told(classify(message.error)) if isinstance(message, Failed) else Reported.of(message))

    def _emit(self, name: str, **fields: Any) -> None:
        """Announce a step; returns when all listeners have seen it.

        Raises:
            ChannelClosedError: One of them has failed the attempt.
        """
        with self._emitting:
            self._send(EventEmitted(name, fields))
            if not self._handled.get():
                raise ChannelClosedError

    def _send(self, answer: Answer) -> None:
        try:
            self._connection.send(answer)
        except OSError:
            os._exit(EXIT_ORPHANED)
