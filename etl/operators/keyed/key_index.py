"""Numbers for keys: a hash table whose every step works on all rows of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from etl.key_group import Hashes, hash_within_groups
from etl.operators.keyed.columns import ComparableColumn, Flags, Ids, state_column

NOT_FOUND = -1
"""Instead of the id of a key that is not there."""

_EMPTY = NOT_FOUND
_LEFT = -2
"""A slot whose key was removed: a search goes on behind it."""
_SLOTS_MIN = 4096
_ROWS_PER_SLOT_MAX = 0.5


@dataclass(frozen=True, slots=True)
class Numbered:
    """Keys that all differ.

    Attributes:
        ids: Their numbers.
        new: Which of them had none before.
    """

    ids: Ids
    new: Flags


class KeyIndex:
    """Keys of one or more columns, each with an id: dense numbers in the order in which they came.

    The id of a removed key is given to a later one. Open addressing with linear probing: equal hashes are no proof, the
    keys themselves are compared.

    Args:
        types: Arrow types of the key columns.
        grouped_by: How many of them, from the first on, decide about the key group; all when None.
    """

    def __init__(self, types: Sequence[pa.DataType], grouped_by: int | None = None) -> None:
        self._grouped_by = len(types) if grouped_by is None else grouped_by
        self._columns: tuple[ComparableColumn, ...] = tuple(state_column(arrow) for arrow in types)
        self._hashes: Hashes = np.zeros(0, dtype=np.uint64)
        self._slots: Ids = np.full(_SLOTS_MIN, _EMPTY, dtype=np.int64)
        self._size = 0
        self._slots_used = 0
        self._free: Ids = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._size - len(self._free)

    @property
    def ids_end(self) -> int:
        """All ids are below."""
        return self._size

    def live_ids(self) -> Ids:
        """The ids of all keys, ascending."""
        live = np.ones(self._size, dtype=np.bool_)
        live[self._free] = False
        return np.flatnonzero(live)

    def add(self, keys: Sequence[pa.Array]) -> Numbered:
        """Number keys.

        Args:
            keys: One array a column; no key may come twice.
        """
        hashes = self.hash(keys)
        ids = self._find(keys, hashes)
        missing = np.flatnonzero(ids == _EMPTY)
        new = np.zeros(len(ids), dtype=np.bool_)
        if len(missing):
            new[missing] = True
            chosen = pa.array(missing)
            ids[missing] = self._append([column.take(chosen) for column in keys], hashes[missing])
        return Numbered(ids, new)

    def find(self, keys: Sequence[pa.Array]) -> Ids:
        """The id of each key, :data:`NOT_FOUND` where there is none; a key may come many times."""
        return self._find(keys, self.hash(keys))

    def begins_with(self, ids: Ids, keys: Sequence[pa.Array]) -> Flags:
        """Whether the key of each id has in its first columns the values beside it."""
        same = np.ones(len(ids), dtype=np.bool_)
        for column, values in zip(self._columns, keys, strict=False):
            same &= column.equal(ids, values)
        return same

    def hash(self, keys: Sequence[pa.Array]) -> Hashes:
        """The hashes of any keys."""
        return hash_within_groups(keys, self._grouped_by)

    def keys(self, ids: Ids) -> list[pa.Array]:
        """The keys of these ids, one array a column."""
        return [column.take(ids) for column in self._columns]

    def hashes(self, ids: Ids) -> Hashes:
        """The hashes of these ids' keys."""
        return self._hashes[ids]

    def remove(self, ids: Ids) -> None:
        """Forget keys; the ids may be given to others from now on."""
        slots = self._slots_of(ids)
        self._slots[slots] = _LEFT
        self._free = np.concatenate([self._free, ids])

    def _find(self, keys: Sequence[pa.Array], hashes: Hashes) -> Ids:
        found = np.full(len(hashes), _EMPTY, dtype=np.int64)
        slots, rows = self._first_slots(hashes), np.arange(len(hashes))
        while len(rows) and self._size:
            candidates = self._slots[slots]
            # An id below zero is none, and yields the hash of some other key.
            alike = (self._hashes[candidates] == hashes) & (candidates >= 0)
            self._compare(keys, rows, candidates, alike)
            found[rows[alike]] = candidates[alike]
            others = np.flatnonzero(~alike & (candidates != _EMPTY))
            rows, hashes, slots = rows[others], hashes[others], self._next_slots(slots[others])
        return found

    def _compare(self, keys: Sequence[pa.Array], rows: npt.NDArray[np.int64], ids: Ids, alike: Flags) -> None:
        """Of rows whose hashes are alike, keep those in ``alike`` whose keys are equal."""
        chosen = np.flatnonzero(alike)
        if not len(chosen):
            return
        if len(rows) == len(keys[0]) and 2 * len(chosen) > len(rows):
            # nearly all of them: to compare the others as well is less work than to pick
            for column, values in zip(self._columns, keys, strict=True):
                alike &= column.equal(ids, values)
            return
        picked = pa.array(rows[chosen])
        for column, values in zip(self._columns, keys, strict=True):
            alike[chosen] &= column.equal(ids[chosen], values.take(picked))

    def _first_slots(self, hashes: Hashes) -> Ids:
        return (hashes & np.uint64(len(self._slots) - 1)).astype(np.int64)

    def _next_slots(self, slots: Ids) -> Ids:
        return (slots + 1) & (len(self._slots) - 1)

    def _append(self, keys: Sequence[pa.Array], hashes: Hashes) -> Ids:
        ids = self._fresh_ids(len(hashes))
        for column, values in zip(self._columns, keys, strict=True):
            column.reserve(self._size)
            column.put(ids, values)
        if self._size > len(self._hashes):
            grown = np.zeros(max(self._size, 2 * len(self._hashes), _SLOTS_MIN), dtype=np.uint64)
            grown[: len(self._hashes)] = self._hashes
            self._hashes = grown
        self._hashes[ids] = hashes
        if self._slots_used + len(ids) > _ROWS_PER_SLOT_MAX * len(self._slots):
            self._rebuild()
        else:
            self._claim_slots(ids)
        return ids

    def _fresh_ids(self, count: int) -> Ids:
        again, self._free = self._free[:count], self._free[count:]
        first, self._size = self._size, self._size + count - len(again)
        return np.concatenate([again, np.arange(first, self._size)])

    def _rebuild(self) -> None:
        slots = len(self._slots)
        while len(self) > _ROWS_PER_SLOT_MAX * slots / 2:
            slots *= 2
        self._slots, self._slots_used = np.full(slots, _EMPTY, dtype=np.int64), 0
        self._claim_slots(self.live_ids())

    def _slots_of(self, ids: Ids) -> Ids:
        """Where these ids, which are all there, have their slots."""
        slots = self._first_slots(self._hashes[ids])
        while True:
            elsewhere = self._slots[slots] != ids
            if not elsewhere.any():
                return slots
            slots[elsewhere] = self._next_slots(slots[elsewhere])

    def _claim_slots(self, ids: Ids) -> None:
        """Each id takes the first free slot from its hash on; where two want the same one, one of them goes on."""
        slots = self._first_slots(self._hashes[ids])
        self._slots_used += len(ids)
        while len(ids):
            free = self._slots[slots] == _EMPTY
            self._slots[slots[free]] = ids[free]
            homeless = self._slots[slots] != ids
            ids, slots = ids[homeless], self._next_slots(slots[homeless])
