"""Watermarks at the source, split by split, and at whoever has several inputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from etl.errors import StateError
from etl.event_time import FOREVER, EventTime, in_microseconds, microseconds_of
from etl.lazy import LazyModule
from etl.runtime.element import Watermark
from etl.source import Position

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy")

STORED = "event_time"
"""Under this name a split's event time is stored in its position."""

LEAST = -(1 << 63)
"""Before every moment: of a split of which nothing was read."""


@dataclass(frozen=True, slots=True)
class SplitTime:
    """Event time as it is stored with the position of a split.

    Attributes:
        latest: The latest moment among the rows read of it, None where there was none.
        watermark: That of the source, None where there was none.
    """

    latest: int | None = None
    watermark: int | None = None

    @classmethod
    def taken_from(cls, split_id: str, position: Position) -> tuple[SplitTime, Position]:
        """A stored position apart: event time, and what the source itself has stored.

        Raises:
            StateError: The event time is not one.
        """
        rest = {name: value for name, value in position.items() if name != STORED}
        stored = position.get(STORED, {})
        try:
            return cls(**{name: _parsed(text) for name, text in stored.items()}), rest
        except (AttributeError, TypeError, ValueError) as error:
            raise StateError(f"{split_id}: the stored event time {stored!r} is none: {error}") from error

    def added_to(self, position: Position) -> Position:
        """The position with it, as it is stored."""
        return {**position, STORED: {"latest": _shown(self.latest), "watermark": _shown(self.watermark)}}


class SourceWatermarks:
    """Finds the watermarks of one source subtask, in the order in which it reads.

    The watermark of a split is its latest moment less the out-of-orderness. That of the source is the least among the
    splits that have something to read, and stays where it is while there is none. Those that other subtasks read are
    left to them: whoever takes rows of all subtasks takes the least of their watermarks as well.

    Args:
        event_time: What the source declares.
        floor: Of the splits that no subtask has taken yet, see :meth:`SplitAssigner.floor`.
    """

    def __init__(self, event_time: EventTime, floor: Callable[[], int] = lambda: FOREVER) -> None:
        self._declared = event_time
        self._floor = floor
        self._out_of_orderness = in_microseconds(event_time.out_of_orderness)
        self._every = in_microseconds(event_time.every)
        self._latest: dict[str, int] = {}
        self._to_read: deque[str] = deque()
        self._idle = False
        self.watermark: int | None = None

    def restore(self, split_id: str, stored: SplitTime) -> None:
        """Go on from what was stored with a position."""
        if stored.latest is not None:
            split_id = self._stream(split_id)
            self._latest[split_id] = max(stored.latest, self._latest.get(split_id, LEAST))
        if stored.watermark is not None:
            self.watermark = max(stored.watermark, _or_least(self.watermark))

    def stored(self, split_id: str) -> SplitTime:
        """What is to be stored with the position of a split."""
        return SplitTime(self._latest.get(self._stream(split_id)), self.watermark)

    def latest_of(self, split_id: str) -> int | None:
        """The latest moment among the rows read of a split."""
        return self._latest.get(self._stream(split_id))

    def begin(self) -> Watermark | None:
        """With what to begin when the first splits are assigned.

        It is not beyond any of them: what is restored may have been ahead of a split that another subtask was reading.
        """
        if self.watermark is None:
            return None
        least = min((self._latest.get(one, LEAST) for one in self._to_read), default=FOREVER)
        released = int(self._stepped(np.asarray([min(least, self._floor())]))[0])
        self.watermark = None if released == LEAST else min(released, self.watermark)
        return None if self.watermark is None else Watermark(self.watermark)

    def assigned(self, split_ids: Sequence[str]) -> None:
        """These splits will be read, one after the other, behind those assigned before."""
        for split_id in split_ids:
            stream = self._stream(split_id)
            if stream not in self._to_read:
                self._to_read.append(stream)

    def advance_to(self, time: int) -> Watermark:
        """Go on as if in every split a row had come that moves the watermark to a moment."""
        for stream in self._to_read:
            self._latest[stream] = max(time + self._out_of_orderness, self._latest.get(stream, LEAST))
        self.watermark = max(time, _or_least(self.watermark))
        return Watermark(self.watermark)

    def all_read(self) -> None:
        """Everything that was assigned is read."""
        self._to_read.clear()

    def catch_up(self, time: int | None) -> Watermark | None:
        """Nothing is left of the whole source, whose watermark has come to a moment in another subtask."""
        if time is None or time <= _or_least(self.watermark):
            return None
        self.watermark = time
        return Watermark(time)

    def ran_dry(self, age: Callable[[], int], *, others_read: bool = False) -> Watermark | None:
        """There is nothing to read now.

        Args:
            age: For how long there has been nothing, in microseconds.
            others_read: Whether another subtask speaks for the source.

        Returns:
            The watermark that tells others not to wait, where another subtask speaks for the source, or the source has
            been idle for long enough.
        """
        idle_after = self._declared.idle_after
        if self._idle or not (others_read or (idle_after is not None and age() >= in_microseconds(idle_after))):
            return None
        self._idle = True
        return Watermark(self.watermark, idle=True)

    def wake(self) -> Watermark | None:
        """There may be something to read again: the watermark that tells others to wait, where they do not."""
        if not self._idle:
            return None
        self._idle = False
        return Watermark(self.watermark)

    def follow(self, split_id: str, batch: pa.RecordBatch, now: int) -> Iterator[pa.RecordBatch | Watermark]:
        """The rows of a batch with the watermarks that belong between and behind them.

        One lies before each row that is behind it, so that it is decided by the order of the rows alone, and not by
        where batches end, whether a row is late.

        Args:
            split_id: Where the batch was read; those assigned before it are done.
            batch: With the event time's column.
            now: The wall clock, in microseconds since 1970.
        """
        if (awake := self.wake()) is not None:
            yield awake
        stream = self._stream(split_id)
        while self._to_read and self._to_read[0] != stream:
            self._to_read.popleft()
        moments = microseconds_of(batch.column(self._declared.column))
        happened = np.asarray(moments.fill_null(LEAST))
        counted = happened
        if self._declared.future_skew is not None:
            counted = np.where(happened > now + in_microseconds(self._declared.future_skew), LEAST, happened)
        latest = np.maximum.accumulate(np.maximum(counted, self._latest.get(stream, LEAST)))
        # What is released behind each row; before it, it is what was released behind the one before.
        released = np.maximum(self._released(latest, stream), _or_least(self.watermark))
        before = np.concatenate([[_or_least(self.watermark)], released[:-1]])
        if int(latest[-1]) > LEAST:
            self._latest[stream] = int(latest[-1])
        yield from self._cut(batch, (happened < before) & np.asarray(moments.is_valid()), before)
        if int(released[-1]) > _or_least(self.watermark):
            self.watermark = int(released[-1])
            yield Watermark(self.watermark)

    def _stream(self, split_id: str) -> str:
        return "" if self._declared.in_sequence else split_id

    def _released(self, latest: np.ndarray[Any, Any], stream: str) -> np.ndarray[Any, Any]:
        """The watermark behind each row: the least over the splits still to be read, in whole steps."""
        others = [self._latest.get(other, LEAST) for other in self._to_read if other != stream]
        return self._stepped(np.minimum(latest, min([*others, self._floor()])))

    def _stepped(self, least: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        known = least > LEAST + self._out_of_orderness + self._every
        stepped = (np.where(known, least, 0) - self._out_of_orderness) // self._every * self._every
        return np.where(known, stepped, LEAST)

    def _cut(
        self, batch: pa.RecordBatch, behind: np.ndarray[Any, Any], before: np.ndarray[Any, Any]
    ) -> Iterator[pa.RecordBatch | Watermark]:
        begin = 0
        for row in np.flatnonzero(behind).tolist():
            watermark = int(before[row])
            if watermark > _or_least(self.watermark):
                if row > begin:
                    yield batch.slice(begin, row - begin)
                self.watermark, begin = watermark, row
                yield Watermark(watermark)
        yield batch.slice(begin) if begin else batch


class InputWatermarks:
    """The watermark of a subtask: the least among its inputs that are not idle. It never goes back.

    Args:
        inputs: How many.
    """

    def __init__(self, inputs: int) -> None:
        self._inputs = [Watermark(None)] * inputs
        self._merged = Watermark(None)
        self._least: int | None = None

    def resume(self, watermark: int) -> None:
        """Begin with what a checkpoint has stored.

        It is not taken for told: whoever comes behind may have stored less, and has to hear of it once more.
        """
        self._least = watermark

    def advance(self, index: int, watermark: Watermark) -> Watermark | None:
        """Note what an input says; returns the own watermark if it has changed by that."""
        self._inputs[index] = watermark
        return self._merge()

    def _merge(self) -> Watermark | None:
        active = [one.time for one in self._inputs if not one.idle]
        found = [time for time in active if time is not None]
        time = min(found) if found and len(found) == len(active) else None
        if time == FOREVER and any(one.time != FOREVER for one in self._inputs):
            # An idle input is not waited for, but nobody has said that what is open of it is to be closed.
            time = None
        if time is None or (self._least is not None and time < self._least):
            time = self._least
        merged = Watermark(time, idle=not active)
        if merged == self._merged:
            return None
        self._merged, self._least = merged, time
        return merged


def _or_least(time: int | None) -> int:
    return LEAST if time is None else time


def _shown(time: int | None) -> str | None:
    return None if time is None else f"{np.datetime64(time, 'us')}"


def _parsed(text: str | None) -> int | None:
    if text is None:
        return None
    time = int(np.datetime64(text, "us").astype(np.int64))
    if _shown(time) != text:
        # NumPy knows more spellings than are written here, "now" among them.
        raise ValueError(f"{text!r} is not as it was written")
    return time
