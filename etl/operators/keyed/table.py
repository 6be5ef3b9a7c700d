"""Rows by key in memory: keys, columns, and what has changed since the last cut."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pyarrow as pa

from etl.key_group import Hashes
from etl.operators.keyed.columns import Flags, Ids, StateColumn
from etl.operators.keyed.key_index import NOT_FOUND, KeyIndex, Numbered

KEY_PREFIX, STATE_PREFIX = "key:", "state:"
"""What the names of stored columns begin with."""

DECLARED = "declared"
"""Key in a column's metadata: see :attr:`etl.operators.keyed.columns.StateColumn.declared`."""


class ChangedIds:
    """Ids that were touched since they were last asked for."""

    def __init__(self) -> None:
        self._flags: Flags = np.zeros(0, dtype=np.bool_)

    def add(self, ids: Ids, size: int) -> None:
        """Note ids, all below ``size``."""
        if size > len(self._flags):
            self._flags = grown_flags(self._flags, size)
        self._flags[ids] = True

    def discard(self, ids: Ids) -> None:
        """They are noted no more."""
        self._flags[ids[ids < len(self._flags)]] = False

    def take(self) -> Ids:
        """The ids, ascending; none of them is noted any more."""
        ids = np.flatnonzero(self._flags)
        self._flags[ids] = False
        return ids


def grown_flags(flags: Flags, size: int) -> Flags:
    """Flags with room for ids below ``size`` and some more; those added are False."""
    grown = np.zeros(max(size, 2 * len(flags)), dtype=np.bool_)
    grown[: len(flags)] = flags
    return grown


def unused(name: str, taken: Collection[str]) -> str:
    """A name that is not taken: this one, or the next like it."""
    while name in taken:
        name += "_"
    return name


class KeyedTable:
    """One row of state for each key, and which of them have changed.

    Args:
        keys: Name and type of the key's columns.
        columns: The columns of the state by name; the caller reads and writes them by id.
        grouped_by: How many of the key's columns, from the first on, decide about the key group: those by which rows
            are exchanged. All when None.

    Attributes:
        grouped_by: The same as a number.
    """

    def __init__(
        self,
        keys: Mapping[str, pa.DataType],
        columns: Mapping[str, StateColumn],
        grouped_by: int | None = None,
    ) -> None:
        self._keys = dict(keys)
        self.grouped_by = len(keys) if grouped_by is None else grouped_by
        self._index = KeyIndex(list(keys.values()), grouped_by)
        self._columns = dict(columns)
        self._changed = ChangedIds()
        self._removed: Flags = np.zeros(0, dtype=np.bool_)
        self._stored: Flags = np.zeros(0, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._index) - int(self._removed.sum())

    @property
    def ids_end(self) -> int:
        """All ids are below."""
        return self._index.ids_end

    def add(self, keys: Sequence[pa.Array]) -> Numbered:
        """Number keys that all differ; the columns have room for them, and are NULL where a key is new."""
        numbered = self._index.add(keys)
        for column in self._columns.values():
            column.reserve(self.ids_end)
        if self.ids_end > len(self._removed):
            self._removed = grown_flags(self._removed, self.ids_end)
            self._stored = grown_flags(self._stored, self.ids_end)
        returned = self._removed[numbered.ids]
        if returned.any():
            self._removed[numbered.ids] = False
            return Numbered(numbered.ids, numbered.new | returned)
        return numbered

    def remove(self, ids: Ids) -> None:
        """Forget keys: they are new when they come again.

        The ids of those that a chunk knows of stay theirs until the next cut has told that they are gone.
        """
        is_stored = self._stored[ids]
        self._forget(ids[~is_stored])
        stored = ids[is_stored]
        for column in self._columns.values():
            column.clear(stored)
        self._removed[stored] = True
        self.touch(stored)

    def find(self, keys: Sequence[pa.Array]) -> Ids:
        """The ids of keys, of which any may come many times; ``NOT_FOUND`` for those that are not there."""
        ids = self._index.find(keys)
        known = np.flatnonzero(ids != NOT_FOUND)
        ids[known[self._removed[ids[known]]]] = NOT_FOUND
        return ids

    def keys(self, ids: Ids) -> list[pa.Array]:
        """The keys of ids."""
        return self._index.keys(ids)

    def begins_with(self, ids: Ids, keys: Sequence[pa.Array]) -> Flags:
        """Whether the key of each id has in its first columns the values beside it."""
        return self._index.begins_with(ids, keys)

    def live_ids(self) -> Ids:
        """The ids of all keys that are there, ascending."""
        ids = self._index.live_ids()
        return ids[~self._removed[ids]]

    def hashes(self, ids: Ids) -> Hashes:
        """The hashes of these ids' keys."""
        return self._index.hashes(ids)

    def fields(self, name: str = "") -> list[pa.Field]:
        """The columns of a row of it.

        Args:
            name: Of the table, where it is stored beside others: stands before the names that are its own.
        """
        own = f"{name}." if name else ""
        keys = [
            pa.field(KEY_PREFIX + (key if number < self.grouped_by else own + key), arrow)
            for number, (key, arrow) in enumerate(self._keys.items())
        ]
        return keys + [state_field(own + column, of_state) for column, of_state in self._columns.items()]

    def rows(self, ids: Ids) -> pa.RecordBatch:
        """Keys and state of ids, in the columns of :meth:`fields`."""
        return pa.RecordBatch.from_arrays(self.values(ids), schema=pa.schema(self.fields()))

    def values(self, ids: Ids) -> list[pa.Array]:
        """Like :meth:`rows`, as arrays."""
        return [*self._index.keys(ids), *(column.take(ids) for column in self._columns.values())]

    def touch(self, ids: Ids) -> None:
        """The state of these ids has changed and belongs into the next cut."""
        self._changed.add(ids, self.ids_end)

    def take_in(self, removed: Flags, columns: Sequence[pa.Array]) -> None:
        """Rows that a chunk has, in the columns of :meth:`fields`; those that were removed are there no more."""
        ids = self.add(columns[: len(self._keys)]).ids
        for column, values in zip(self._columns.values(), columns[len(self._keys) :], strict=True):
            column.put(ids, values)
        self._stored[ids] = True
        self._forget(ids[removed])

    def take_changed(self) -> Ids:
        """The ids that were touched since this was last called, ascending."""
        return self._changed.take()

    def removed(self, ids: Ids) -> Flags:
        """Which of these ids are of keys that were removed, and that a chunk still has."""
        return self._removed[ids]

    def told(self, written: Ids, changed: Ids) -> None:
        """Chunks have the written ids now, and no other changed ones; ids of removed keys may be given to others."""
        self._stored[written] = True
        self._forget(changed[self._removed[changed]])

    def _forget(self, ids: Ids) -> None:
        self._removed[ids] = False
        self._stored[ids] = False
        self._changed.discard(ids)
        for column in self._columns.values():
            column.clear(ids)
        self._index.remove(ids)


def state_field(name: str, column: StateColumn) -> pa.Field:
    """A column of state as it is stored."""
    return pa.field(
        STATE_PREFIX + name, column.arrow, metadata={DECLARED: column.declared} if column.declared else None
    )
