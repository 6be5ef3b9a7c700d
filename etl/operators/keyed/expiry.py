"""How long keys are remembered that nobody writes to."""

from __future__ import annotations

import numpy as np

from etl.operators.keyed.columns import Ids
from etl.operators.keyed.moments import MomentColumn
from etl.operators.keyed.time_queue import TimeQueue


class Expiry:
    """When each key was written last, and which of them have not been for too long.

    A key waits once in the queue, for the earliest moment at which its time may be over; when that has come, it is
    looked at whether it was written meanwhile.

    Args:
        ttl: How long a key lives after it was written, in microseconds.
        written: When it was written last.
    """

    def __init__(self, ttl: int, written: MomentColumn) -> None:
        self._ttl = ttl
        self._written = written
        self._queue = TimeQueue()
        self._queued = bytearray()
        self._fresh: list[int] = []

    @property
    def earliest(self) -> int | None:
        """The first moment at which the time of a key may be over."""
        self._enqueue()
        return self._queue.earliest

    def load(self, ids: Ids) -> None:
        """Take up restored keys."""
        for id_ in ids.tolist():
            if self._written.values[id_] is not None:
                self._wait(id_)

    def write(self, id_: int, now: int) -> None:
        """Note that a key was written."""
        before = self._written.values[id_]
        self._written.values[id_] = now if before is None else max(before, now)
        self._wait(id_)

    def is_over(self, id_: int, now: int) -> bool:
        """Whether nothing is remembered of a key any more."""
        written = self._written.values[id_]
        return written is not None and now - written >= self._ttl

    def take(self, now: int) -> list[int]:
        """Ids of keys whose time is over."""
        self._enqueue()
        _, ids = self._queue.take(now)
        over: list[int] = []
        for id_ in ids.tolist():
            self._queued[id_] = 0
            if self.is_over(id_, now):
                over.append(id_)
            elif self._written.values[id_] is not None:
                self._wait(id_)
        return over

    def _wait(self, id_: int) -> None:
        if id_ >= len(self._queued):
            self._queued.extend(bytes(len(self._written.values) - len(self._queued)))
        if not self._queued[id_]:
            self._queued[id_] = 1
            self._fresh.append(id_)

    def _enqueue(self) -> None:
        if self._fresh:
            written = [self._written.values[id_] for id_ in self._fresh]
            # None where it was written and forgotten since; the place in the queue is that of the id's next holder
            moments = [0 if one is None else one + self._ttl for one in written]
            self._queue.add(np.array(moments, dtype=np.int64), np.array(self._fresh, dtype=np.int64))
            self._fresh.clear()
