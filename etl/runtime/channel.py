"""Bounded channels between subtasks: a full one blocks its sender, which is the backpressure."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from threading import Condition

import pyarrow as pa

from etl.runtime.element import Element

ROWS_MAX = 262_144
BYTES_MAX = 8 << 20


class ChannelClosedError(Exception):
    """The attempt is over; the thread that sees this ends quietly."""


class Channel:
    """A first-in-first-out queue of elements, bounded in rows and bytes.

    A single batch larger than the bounds passes when the channel is empty. Barriers weigh nothing.
    """

    def __init__(self, gate: InputGate, rows_max: int, bytes_max: int) -> None:
        self._gate = gate
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._elements: deque[Element] = deque()
        self._rows = 0
        self._bytes = 0

    def put(self, element: Element) -> None:
        """Append an element, waiting for room.

        Raises:
            ChannelClosedError: The attempt was ended meanwhile.
        """
        rows, size_bytes = _weight(element)
        with self._gate.changed:
            while not self._gate.closed and self._is_full(rows, size_bytes):
                self._gate.changed.wait()
            if self._gate.closed:
                raise ChannelClosedError
            self._elements.append(element)
            self._rows += rows
            self._bytes += size_bytes
            self._gate.changed.notify_all()

    def _is_full(self, rows: int, size_bytes: int) -> bool:
        if rows == 0 or self._rows == 0:
            return False
        return self._rows + rows > self._rows_max or self._bytes + size_bytes > self._bytes_max

    def pop(self) -> Element | None:
        """The oldest element, None when there is none. Called by the gate, which holds the lock."""
        if not self._elements:
            return None
        element = self._elements.popleft()
        rows, size_bytes = _weight(element)
        self._rows -= rows
        self._bytes -= size_bytes
        return element


class InputGate:
    """All input channels of one subtask, read by one thread."""

    def __init__(self, inputs: int, rows_max: int = ROWS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self.changed = Condition()
        self.closed = False
        self.channels = tuple(Channel(self, rows_max, bytes_max) for _ in range(inputs))
        self._next = 0

    def get(self, blocked: Collection[int] = ()) -> tuple[int, Element]:
        """The next element of any channel that is not blocked, taking turns; waits until there is one.

        Raises:
            ChannelClosedError: The attempt was ended.
        """
        received = self.get_within(None, blocked)
        assert received is not None
        return received

    def get_within(self, timeout_s: float | None, blocked: Collection[int] = ()) -> tuple[int, Element] | None:
        """Like :meth:`get`, but None when the time is up; it is up at once when it is 0.

        Raises:
            ChannelClosedError: The attempt was ended.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self.changed:
            while not self.closed:
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return None
                found = self._pop(blocked)
                if found is not None:
                    return found
                self.changed.wait(left_s)
            raise ChannelClosedError

    def poll(self, blocked: Collection[int] = ()) -> tuple[int, Element] | None:
        """Like :meth:`get`, but None instead of waiting."""
        with self.changed:
            return self._pop(blocked)

    def _pop(self, blocked: Collection[int]) -> tuple[int, Element] | None:
        for step in range(len(self.channels)):
            index = (self._next + step) % len(self.channels)
            element = None if index in blocked else self.channels[index].pop()
            if element is not None:
                self._next = (index + 1) % len(self.channels)
                self.changed.notify_all()
                return index, element
        return None

    def close(self) -> None:
        """End all waiting, on both sides."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


def _weight(element: Element) -> tuple[int, int]:
    if isinstance(element, pa.RecordBatch):
        return element.num_rows, element.get_total_buffer_size()
    return 0, 0
