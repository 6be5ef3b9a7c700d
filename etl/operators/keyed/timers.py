"""Timers: moments at which a function wants to be called again for a key."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any

import numpy as np

from etl.errors import RecordError
from etl.event_time import FOREVER
from etl.operators.keyed.columns import Ids
from etl.operators.keyed.handles import Cursor, Handle
from etl.operators.keyed.moments import MomentsColumn, MomentType
from etl.operators.keyed.table import KeyedTable
from etl.operators.keyed.time_queue import TimeQueue
from etl.schema import PostgresType

SUCCESSORS_MAX = 1_000_000
"""When a stream is drained, so many timers of a key may be set by timers, or one that sets its successor had no end."""


class TimersHandle(Handle):
    """The timers of the key that the function works on; each moment is set once at most.

    Args:
        name: What messages call them.
        cursor: Which key that is.
        type_: Of the moments.

    Attributes:
        fresh: Moments and ids that were set since this was last emptied.
        touched: Ids whose timers were changed since this was last emptied.
        firing: The moment of the timer of this kind that the function is called with, None while it is not.
        moments: The type of the moments.
    """

    column: MomentsColumn

    def __init__(self, name: str, cursor: Cursor, type_: PostgresType) -> None:
        self.moments = MomentType(name, type_)
        super().__init__(cursor, MomentsColumn(self.moments.arrow, f"timers of {type_}"))
        self._name = name
        self.fresh: list[tuple[int, int]] = []
        self.touched: list[int] = []
        self.firing: int | None = None

    def set(self, moment: Any) -> None:
        """Be called at this moment, or as soon as possible where it has passed.

        Raises:
            RecordError: It is no moment of the column's type, or not after the one of the timer that is firing.
        """
        counted = self.moments.counted(moment)
        if self.firing is not None and counted <= self.firing:
            firing = self.moments.shown(self.firing)
            raise RecordError(
                f'state "{self._name}": {moment} is not after {firing}, the moment of the timer that fires'
            )
        id_ = self._cursor.id
        if self.is_set(counted, id_):
            return
        moments = self.column.values[id_]
        if moments is None:
            self.column.values[id_] = {counted}
        else:
            moments.add(counted)
        self.fresh.append((counted, id_))
        self.touched.append(id_)

    def cancel(self, moment: Any) -> None:
        """Be not called at this moment; nothing where that was not to be."""
        counted = self.moments.counted(moment)
        if self.is_set(counted, self._cursor.id):
            self.drop(counted, self._cursor.id)

    def clear(self) -> None:
        """Cancel all timers of the key."""
        if self.column.values[self._cursor.id] is not None:
            self.column.values[self._cursor.id] = None
            self.touched.append(self._cursor.id)

    def is_set(self, moment: int, id_: int) -> bool:
        """Whether there is a timer of an id for a moment."""
        moments = self.column.values[id_]
        return moments is not None and moment in moments

    def drop(self, moment: int, id_: int) -> None:
        """Forget a timer that is set."""
        moments = self.column.values[id_]
        assert moments is not None
        moments.remove(moment)
        if not moments:
            self.column.values[id_] = None
        self.touched.append(id_)


class Timers:
    """The timers of all keys, of one kind, and those among them that are due.

    What is cancelled stays in the queue until its moment; it is looked at then whether the timer is still set.

    Args:
        handle: Where they are set.
        table: Whose ids they have.
    """

    def __init__(self, handle: TimersHandle, table: KeyedTable) -> None:
        self.handle = handle
        self._table = table
        self._queue = TimeQueue()
        self._limit: int | None = None
        self._due: list[tuple[int, int, int]] = []
        self._successors: Counter[int] = Counter()

    @property
    def earliest(self) -> int | None:
        """The first moment for which there may be a timer, None where there is none."""
        return self._queue.earliest

    def load(self, ids: Ids) -> None:
        """Take up the timers of restored keys."""
        column = self.handle.column.values
        self._enqueue([(moment, id_) for id_ in ids.tolist() for moment in column[id_] or ()])

    def open(self, limit: int) -> Ids:
        """Begin to fire timers up to a limit; returns the ids of those that are due."""
        self._limit = limit
        moments, ids = self._queue.take(limit)
        hashes = self._table.hashes(ids).tolist()
        candidates = zip(moments.tolist(), hashes, ids.tolist(), strict=True)
        self._due = [one for one in candidates if self.handle.is_set(one[0], one[2])]
        heapq.heapify(self._due)
        return np.array([id_ for _, _, id_ in self._due], dtype=np.int64)

    def take_in(self) -> None:
        """Note what was set since this was last called: some of it may be due at once.

        Raises:
            RecordError: At the end of time, timers have set others for ever.
        """
        fresh = self.handle.fresh
        if not fresh:
            return
        limit = self._limit
        if limit == FOREVER and self.handle.firing is not None:
            self._count_successors(fresh)
        if limit is not None:
            hashes = self._table.hashes(np.array([id_ for _, id_ in fresh], dtype=np.int64)).tolist()
            for (moment, id_), hashed in zip(fresh, hashes, strict=True):
                if moment <= limit:
                    heapq.heappush(self._due, (moment, hashed, id_))
        self._enqueue([one for one in fresh if limit is None or one[0] > limit])
        fresh.clear()

    def is_due(self, until: int) -> bool:
        """Whether :meth:`next_due` may have something."""
        return bool(self._due) and self._due[0][0] <= until

    def next_due(self, until: int) -> tuple[int, int] | None:
        """Moment and id of the first due timer not after ``until``, which is then set no more; None: there is none."""
        while self.is_due(until):
            moment, _, id_ = heapq.heappop(self._due)
            if self.handle.is_set(moment, id_):
                self.handle.drop(moment, id_)
                return moment, id_
        return None

    def close(self) -> None:
        """All that is due has fired."""
        self._limit = None
        self._successors.clear()

    def _count_successors(self, fresh: list[tuple[int, int]]) -> None:
        for moment, id_ in fresh:
            self._successors[id_] += 1
            if self._successors[id_] > SUCCESSORS_MAX:
                raise RecordError(
                    f"all timers fire since the stream is drained, and {SUCCESSORS_MAX} were set by such as fired, the"
                    f" last one for {self.handle.moments.shown(moment)}; let the function end that, or do not drain"
                )

    def _enqueue(self, timers: list[tuple[int, int]]) -> None:
        if timers:
            moments, ids = zip(*timers, strict=True)
            self._queue.add(np.array(moments, dtype=np.int64), np.array(ids, dtype=np.int64))
