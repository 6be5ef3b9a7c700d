"""What the main process and a worker tell each other besides rows, as MessagePack on a connection of their own."""

from __future__ import annotations

import socket
import struct
import traceback
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import msgspec

from etl import errors
from etl.codec import decode_rows, encode_rows
from etl.errors import ConfigurationError, EtlError, Finding, RecordError, storable
from etl.runtime.loader import JobLoader
from etl.runtime.message import Message, StateSnapshotted, SubtaskEnded, TimersFired
from etl.runtime.workers.frames import read_exactly, shut
from etl.state import Fragment

_LENGTH = struct.Struct("<Q")
_REPORTS: Mapping[str, type[StateSnapshotted | SubtaskEnded | TimersFired]] = {
    kind.__name__: kind for kind in (StateSnapshotted, SubtaskEnded, TimersFired)
}
"""What subtasks of workers report, besides errors."""


# --- from the main process to a worker ------------------------------------------------------------------------------


class Assignment(msgspec.Struct, frozen=True, tag=True):
    """What a worker is to do; the first thing it is told.

    Attributes:
        worker: Its number, from 1.
        workers: How many there are.
        search_path: Where the main process looks for modules.
        loader: What makes the job anew.
        outline: What the main process knows as the job.
        files: Digests of the files it was made from.
        channels: Descriptors of its ends of channels, by number.
    """

    worker: int
    workers: int
    search_path: Sequence[str]
    loader: JobLoader
    outline: Sequence[tuple[str, str]]
    files: Mapping[str, str]
    channels: Mapping[int, int]


class StoredFragment(msgspec.Struct, frozen=True):
    """A fragment of state, its rows encoded as in :mod:`etl.codec`."""

    key_group: int
    sequence: int
    rows: bytes

    @classmethod
    def of(cls, fragment: Fragment) -> StoredFragment:
        """What is sent of a fragment."""
        return cls(fragment.key_group, fragment.sequence, encode_rows(fragment.rows))

    def fragment(self) -> Fragment:
        """The fragment that was sent."""
        return Fragment(self.key_group, self.sequence, decode_rows(self.rows))


class RestoreState(msgspec.Struct, frozen=True, tag=True):
    """Take in fragments of stored state, at most one a key group. Answered by :class:`StateRestored`."""

    subtask: str
    fragments: Sequence[StoredFragment]


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Begin where event time had come to, after everything is restored. Answered by :class:`StateRestored`."""

    subtask: str
    watermark: int
    forgotten: int | None


class Start(msgspec.Struct, frozen=True, tag=True):
    """Everything is restored: start the subtasks. Answered by :class:`SubtasksStarted`."""


class EventHandled(msgspec.Struct, frozen=True, tag=True):
    """All listeners have seen the event; the step may be taken unless one of them has failed the attempt."""

    accepted: bool


class ShutDown(msgspec.Struct, frozen=True, tag=True):
    """The attempt is over; what does not end in time is left behind."""

    timeout_s: float


Order = Assignment | RestoreState | Resume | Start | EventHandled | ShutDown
ORDERS = msgspec.msgpack.Decoder(Order)

# --- from a worker to the main process ------------------------------------------------------------------------------


class Wired(msgspec.Struct, frozen=True, tag=True):
    """The job is loaded, it is the same, and its subtasks are made.

    Attributes:
        subtasks: Names of those that report their end.
        stateful: Names of those that keep state.
    """

    subtasks: Sequence[str]
    stateful: Sequence[str]


class StateRestored(msgspec.Struct, frozen=True, tag=True):
    """What was to be restored is."""


class SubtasksStarted(msgspec.Struct, frozen=True, tag=True):
    """The subtasks run; what was due by the clock before is reported."""


class EventEmitted(msgspec.Struct, frozen=True, tag=True):
    """A step is about to be taken, by a subtask that waits for :class:`EventHandled`."""

    name: str
    fields: Mapping[str, Any]


class Reported(msgspec.Struct, frozen=True, tag=True):
    """A message of a subtask to the coordinator.

    Attributes:
        kind: Name of its class.
        content: The encoded message.
    """

    kind: str
    content: bytes

    @classmethod
    def of(cls, message: Message) -> Reported:
        """What is sent of a message."""
        return cls(type(message).__name__, msgspec.msgpack.encode(message))

    def message(self) -> Message:
        """The message that was sent."""
        return msgspec.msgpack.decode(self.content, type=_REPORTS[self.kind])


class Failure(msgspec.Struct, frozen=True, tag=True):
    """An error, as far as it can be carried: class, message and what :mod:`etl.errors` knows of it.

    Attributes:
        kind: Name of the nearest class in :mod:`etl.errors`.
        message: Its text.
        uid: Of a :class:`RecordError`.
        split: Of a :class:`RecordError`.
        findings: Of a :class:`ConfigurationError`.
        trace: Traceback with causes, for people.
    """

    kind: str
    message: str
    uid: str | None
    split: str | None
    findings: Sequence[Finding]
    trace: str


Answer = Wired | StateRestored | SubtasksStarted | EventEmitted | Reported | Failure
ANSWERS = msgspec.msgpack.Decoder(Answer)


class Connection:
    """One end of the connection between the main process and a worker; any thread may send, one receives.

    Args:
        end: The socket.
        send_timeout_s: How long the other side may take to read before it counts as hung; None for no limit.
    """

    def __init__(self, end: socket.socket, send_timeout_s: int | None = None) -> None:
        self._end = end
        self._lock = Lock()
        if send_timeout_s is not None:
            # A limit on sending alone: who receives waits as long as it takes.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", send_timeout_s, 0))

    def send(self, message: Order | Answer, *, waiting: bool = True) -> None:
        """Send a message.

        Args:
            message: What to send.
            waiting: Whether to wait for room.

        Raises:
            OSError: The other side has ended, or does not read.
        """
        content = msgspec.msgpack.encode(message)
        flags = 0 if waiting else socket.MSG_DONTWAIT
        with self._lock:
            self._end.sendall(_LENGTH.pack(len(content)), flags)
            self._end.sendall(content, flags)

    def receive(self) -> bytes | None:
        """The next message, still encoded; None when the other side has ended."""
        length = read_exactly(self._end, _LENGTH.size)
        if length is None:
            return None
        content = read_exactly(self._end, *_LENGTH.unpack(length))
        return None if content is None else bytes(content)

    def shut(self) -> None:
        """End the connection for both sides, whatever they wait for."""
        shut(self._end)

    def close(self) -> None:
        """Release it; nobody uses it any more."""
        self._end.close()


class WorkerTraceback(Exception):  # noqa: N818 - never raised: the cause of an error that was raised elsewhere
    """Where in a worker the error was raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def told(error: EtlError) -> Failure:
    """An error as a message."""
    kind = next(one for one in type(error).__mro__ if one.__module__ == errors.__name__)
    return Failure(
        kind.__name__,
        storable(str(error)),
        error.uid if isinstance(error, RecordError) else None,
        error.split if isinstance(error, RecordError) else None,
        error.findings if isinstance(error, ConfigurationError) else (),
        storable("".join(traceback.format_exception(error))),
    )


def raised(failure: Failure) -> EtlError:
    """The error that a message tells of."""
    kind = getattr(errors, failure.kind)
    error: EtlError
    if issubclass(kind, RecordError):
        error = kind(failure.message, uid=failure.uid, split=failure.split)
    elif issubclass(kind, ConfigurationError):
        error = kind(failure.message, failure.findings)
    else:
        error = kind(failure.message)
    error.__cause__ = WorkerTraceback(failure.trace)
    return error
