"""A write-ahead log in memory, for suites that need no database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from etl.sink import Committable, rows_of

_Key = tuple[int, int, int]


class MemoryLogs:
    """What is sealed, shared by the logs of all attempts, as the store's table is."""

    def __init__(self) -> None:
        self.units: dict[_Key, list[pa.RecordBatch]] = {}

    def log(self, uid: str, epoch: int, subtask: int) -> MemoryWriteAheadLog:
        """The log of one sink subtask for one attempt."""
        return MemoryWriteAheadLog(self, uid, epoch, subtask)


class MemoryWriteAheadLog:
    """See :class:`etl.sink.WriteAheadLog`."""

    def __init__(self, shared: MemoryLogs, uid: str, epoch: int, subtask: int) -> None:
        self._units = shared.units
        self._uid = uid
        self._epoch = epoch
        self._subtask = subtask
        self._open: list[pa.RecordBatch] = []

    def append(self, checkpoint_id: int, batch: pa.RecordBatch) -> None:
        """See :class:`etl.sink.WriteAheadLog`."""
        assert (checkpoint_id, self._epoch, self._subtask) not in self._units, "the unit is sealed already"
        self._open.append(batch)

    def seal(self, checkpoint_id: int) -> int:
        """See :class:`etl.sink.WriteAheadLog`."""
        batches, self._open = self._open, []
        if batches:
            self._units[checkpoint_id, self._epoch, self._subtask] = batches
        return rows_of(batches)

    @contextmanager
    def read(self, committable: Committable) -> Iterator[Iterator[pa.RecordBatch]]:
        """See :class:`etl.sink.WriteAheadLog`."""
        yield iter(list(self._units.get(_key(committable), ())))

    def prune(self, committable: Committable) -> None:
        """See :class:`etl.sink.WriteAheadLog`."""
        self._units.pop(_key(committable), None)

    def discard_unfinished(self, completed: Sequence[Committable]) -> None:
        """See :class:`etl.sink.WriteAheadLog`."""
        recorded = {_key(one) for one in completed}
        for key in [key for key in self._units if key[1] < self._epoch and key not in recorded]:
            del self._units[key]

    def pending(self, completed: Sequence[Committable]) -> Sequence[Committable]:
        """See :class:`etl.sink.WriteAheadLog`."""
        there = [one for one in completed if one.epoch < self._epoch and _key(one) in self._units]
        return sorted(there, key=lambda one: (one.checkpoint_id, one.subtask))

    def close(self) -> None:
        """See :class:`etl.sink.WriteAheadLog`."""
        self._open.clear()


def _key(committable: Committable) -> _Key:
    return committable.checkpoint_id, committable.epoch, committable.subtask
