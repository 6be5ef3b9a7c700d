"""Hands out the splits of a source to the subtasks that read it, and gives none of them to two at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from etl.clock import Clock, SystemClock
from etl.errors import InternalError
from etl.event_time import FOREVER
from etl.runtime.watermark import LEAST, SplitTime
from etl.source import Position, Split, SplitEnumerator

FOLLOW_POLL_S = 0.5
"""How often a run that goes on looks for something new."""


@dataclass(frozen=True, slots=True)
class ReadUpTo:
    """How far a split was read.

    Attributes:
        position: Where the next read starts.
        latest: The latest moment among its rows, None where there was none or nobody asks for event time.
    """

    position: Position
    latest: int | None = None


@dataclass(slots=True)
class _Reader:
    """What is known of a subtask.

    Attributes:
        reads: Ids of the splits it has.
        barriers: How many it has passed.
        dry: Whether it was told that there is nothing for it.
        watermark: Its watermark when it asked last.
    """

    reads: tuple[str, ...] = ()
    barriers: int = 0
    dry: bool = False
    watermark: int | None = None


class SplitAssigner:
    """Shared by the subtasks of a source, each of which asks for more when it has read what it has.

    A single subtask is given everything that is there, in reading order. Of several each is given one split at a time,
    the largest first. Two rules keep positions right:

    - A split that somebody has is listed for nobody else.
    - A split that has moved goes to another subtask only when that has passed the barrier that covers the move. So the
      rows before are part of an earlier checkpoint than the rows behind, and a checkpoint has one position of it.

    Args:
        enumerator: Finds the splits; asked by one thread at a time.
        known: By id of a split the position that is stored of it.
        subtasks: How many read.
        follow: Whether to look for something new when everything is read.
        clock: Time.

    Attributes:
        restored: By id of a split the event time that was stored with its position.
        has_given: Whether anybody has been given anything to read.
    """

    def __init__(
        self,
        enumerator: SplitEnumerator,
        known: Mapping[str, Position],
        subtasks: int = 1,
        *,
        follow: bool = False,
        clock: Clock | None = None,
    ) -> None:
        stored = {split_id: SplitTime.taken_from(split_id, known[split_id]) for split_id in known}
        self.restored: Mapping[str, SplitTime] = {split_id: time for split_id, (time, _) in stored.items()}
        self._known = {split_id: position for split_id, (_, position) in stored.items()}
        self._latest = {split_id: time.latest for split_id, time in self.restored.items()}
        self._enumerator = enumerator
        self._follow = follow
        self._clock = clock or SystemClock()
        self._readers = [_Reader() for _ in range(subtasks)]
        self.has_given = False
        self._waiting: list[Split] = []
        self._moved_by: dict[str, tuple[int, int]] = {}
        self._last_dry = 0
        self._discovered_s: float | None = None
        self._lock = Lock()
        self._discovery = Lock()

    def take(self, subtask: int, read: Mapping[str, ReadUpTo], watermark: int | None = None) -> Sequence[Split]:
        """What a subtask is to read next; called by it when it has read everything that it has.

        Args:
            subtask: Its number.
            read: What has moved since it asked last.
            watermark: Its watermark.

        Returns:
            Splits with the positions to start from; none when there is nothing for it now, or nothing any more where
            the run does not follow.

        Raises:
            StateError: See :meth:`SplitEnumerator.discover`.
        """
        with self._lock:
            self._give_back(subtask, read)
            self._readers[subtask].watermark = watermark
            if splits := self._hand_out(subtask):
                return splits
        self._discover()
        with self._lock:
            splits = self._hand_out(subtask)
            if not splits and not self._readers[subtask].dry:
                self._readers[subtask].dry = True
                self._last_dry = subtask
            return splits

    def passed_barrier(self, subtask: int) -> None:
        """A subtask has reported its positions and will send the barrier before it reads on."""
        with self._lock:
            self._readers[subtask].barriers += 1

    def others_read(self, subtask: int) -> bool:
        """Whether a dry subtask need not speak for the source: somebody reads, or another one became dry later."""
        with self._lock:
            return self._last_dry != subtask or not all(reader.dry for reader in self._readers)

    @property
    def watermark(self) -> int | None:
        """The highest watermark of a subtask: that of the source when all of them are dry."""
        with self._lock:
            return max((reader.watermark for reader in self._readers if reader.watermark is not None), default=None)

    def latest_of(self, split_id: str) -> int | None:
        """The latest moment among the rows of a split, as far as it was given back."""
        with self._lock:
            return self._latest.get(split_id)

    @property
    def subtasks(self) -> int:
        """How many read."""
        return len(self._readers)

    @property
    def newest(self) -> int | None:
        """The latest moment among all rows, as far as splits were given back."""
        with self._lock:
            return max((latest for latest in self._latest.values() if latest is not None), default=None)

    def floor(self) -> int:
        """Of the splits that wait to be read the latest moment of the one that is furthest behind.

        It is :data:`LEAST` where nothing was read of one, and :data:`FOREVER` where none waits.
        """
        floor = FOREVER
        with self._lock:
            for split in self._waiting:
                latest = self._latest.get(split.id)
                if latest is None:
                    return LEAST
                floor = min(floor, latest)
        return floor

    @property
    def waiting_bytes(self) -> int:
        """How much waits to be read, as far as its splits say so."""
        with self._lock:
            return sum(split.size_bytes for split in self._waiting)

    def _give_back(self, subtask: int, read: Mapping[str, ReadUpTo]) -> None:
        reader = self._readers[subtask]
        reader.reads = ()
        for split_id, one in read.items():
            self._known[split_id] = one.position
            self._latest[split_id] = one.latest
            self._moved_by[split_id] = (subtask, reader.barriers)

    def _hand_out(self, subtask: int) -> list[Split]:
        if len(self._readers) == 1:
            given, self._waiting = self._waiting, []
        else:
            place = next((place for place, one in enumerate(self._waiting) if self._may_take(subtask, one.id)), None)
            given = [] if place is None else [self._waiting.pop(place)]
        if given:
            self.has_given = True
            self._readers[subtask].reads = tuple(split.id for split in given)
            self._readers[subtask].dry = False
        return given

    def _may_take(self, subtask: int, split_id: str) -> bool:
        by, barriers = self._moved_by.get(split_id, (subtask, 0))
        return by == subtask or self._readers[subtask].barriers > barriers

    def _discover(self) -> None:
        with self._discovery:
            if not self._is_due():
                return
            with self._lock:
                read = {split_id for reader in self._readers for split_id in reader.reads}
                listed = read | {split.id for split in self._waiting}
                known = {split_id: position for split_id, position in self._known.items() if split_id not in read}
            # Not under the lock: others go on reading. What they give back meanwhile was listed before, and stays so.
            found = self._enumerator.discover(known)
            with self._lock:
                self._add(found, listed)
            self._discovered_s = self._clock.monotonic_s()

    def _is_due(self) -> bool:
        if self._discovered_s is None:
            return True
        waited = len(self._readers) == 1 or self._clock.monotonic_s() >= self._discovered_s + FOLLOW_POLL_S
        return self._follow and waited

    def _add(self, found: Sequence[Split], listed: set[str]) -> None:
        new = [split for split in found if split.id not in listed]
        if len({split.id for split in new}) < len(new):
            raise InternalError(f"{type(self._enumerator).__name__} listed a split twice")
        self._waiting += new
        if len(self._readers) > 1:
            self._waiting.sort(key=lambda split: -split.size_bytes)
