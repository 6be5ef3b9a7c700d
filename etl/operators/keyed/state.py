"""The state of one operator subtask: keys, columns, what has changed, and the chains it is stored in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from etl.errors import StateError
from etl.key_group import KEY_GROUPS, groups_of_hashes
from etl.operators.keyed.columns import Flags, Ids, StateColumn
from etl.operators.keyed.key_index import NOT_FOUND, KeyIndex, Numbered
from etl.state import Fragment, StateCut, StateSummary

REMOVED = "removed"
"""Column of a fragment: whether the key is there no more; only where what it was is in an earlier chunk."""

KEY_PREFIX, STATE_PREFIX = "key:", "state:"
"""What the names of the other columns begin with."""

DECLARED = "declared"
"""Key in a column's metadata: see :attr:`etl.operators.keyed.columns.StateColumn.declared`."""

CHAIN_CHUNKS_MAX = 128
"""A restore of a key group reads no more chunks than that."""

CUT_ROWS_MAX = 65_536
"""Rows that are taken out of the columns at once, unless one key group has more."""

_NONE = -1


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


class KeyedState:
    """One row of state for each key.

    Args:
        uid: The operator.
        keys: Name and type of the key's columns.
        columns: The columns of the state by name; the caller reads and writes them by id.
        grouped_by: How many of the key's columns, from the first on, decide about the key group: those by which rows
            are exchanged. All when None.
    """

    def __init__(
        self,
        uid: str,
        keys: Mapping[str, pa.DataType],
        columns: Mapping[str, StateColumn],
        grouped_by: int | None = None,
    ) -> None:
        self._uid = uid
        self._index = KeyIndex(list(keys.values()), grouped_by)
        self._columns = dict(columns)
        self._changed = ChangedIds()
        self._removed: Flags = np.zeros(0, dtype=np.bool_)
        self._stored: Flags = np.zeros(0, dtype=np.bool_)
        self._chains = _Chains()
        fields = [pa.field(KEY_PREFIX + name, arrow) for name, arrow in keys.items()]
        fields += [_state_field(name, column) for name, column in columns.items()]
        self._schema = pa.schema([pa.field(REMOVED, pa.bool_()), *fields])

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

    def live_ids(self) -> Ids:
        """The ids of all keys that are there, ascending."""
        ids = self._index.live_ids()
        return ids[~self._removed[ids]]

    def rows(self, ids: Ids) -> pa.RecordBatch:
        """Keys and state of ids, in the columns of a fragment."""
        columns = [*self._index.keys(ids), *(column.take(ids) for column in self._columns.values())]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(list(self._schema)[1:]))

    def touch(self, ids: Ids) -> None:
        """The state of these ids has changed and belongs into the next cut."""
        self._changed.add(ids, self.ids_end)

    def restore(self, fragments: Sequence[Fragment]) -> None:
        """See :meth:`etl.state.StatefulOperator.restore`."""
        for fragment in fragments:
            if not fragment.rows.schema.equals(self._schema, check_metadata=True):
                raise StateError(
                    f'state of operator "{self._uid}" has columns {_shown(fragment.rows.schema)}, and the job\'s'
                    f" operator keeps {_shown(self._schema)}; give the changed operator a new uid, and the old one to"
                    f' Job(…, forget=["{self._uid}"])'
                )
        # All at once: no key is in two key groups, and a step for each of many small fragments is what takes time.
        for rows in pa.Table.from_batches([one.rows for one in fragments], self._schema).combine_chunks().to_batches():
            self._take_in(rows)
        for fragment in fragments:
            self._chains.restored(fragment)

    def _take_in(self, rows: pa.RecordBatch) -> None:
        removed, *columns = rows.columns
        keys = len(columns) - len(self._columns)
        ids = self.add(columns[:keys]).ids
        for column, values in zip(self._columns.values(), columns[keys:], strict=True):
            column.put(ids, values)
        self._stored[ids] = True
        self._forget(ids[np.asarray(removed)])

    def cut(self, watermark: int | None = None, late_rows: int = 0) -> StateCut:
        """See :meth:`etl.state.StatefulOperator.cut`.

        Args:
            watermark: See :class:`etl.state.StateSummary`.
            late_rows: See there.
        """
        fragments = self._changed_fragments()
        return StateCut(self._uid, fragments, StateSummary(self._chains.chunks, watermark, late_rows))

    def _changed_fragments(self) -> Sequence[Fragment]:
        changed = self._changed.take()
        if not len(changed):
            return ()
        groups = groups_of_hashes(self._index.hashes(changed))
        changes = np.bincount(groups, minlength=KEY_GROUPS)
        is_full = self._chains.next_is_full(changes)
        ids = changed[~is_full[groups]]
        if is_full.any():
            everything = self.live_ids()
            ids = np.concatenate([ids, everything[is_full[groups_of_hashes(self._index.hashes(everything))]]])
        fragments = self._fragments(ids, np.flatnonzero(changes), is_full)
        self._stored[ids] = True
        self._forget(changed[self._removed[changed]])
        return fragments

    def _forget(self, ids: Ids) -> None:
        self._removed[ids] = False
        self._stored[ids] = False
        self._changed.discard(ids)
        for column in self._columns.values():
            column.clear(ids)
        self._index.remove(ids)

    def _fragments(self, ids: Ids, changed_groups: Ids, is_full: Flags) -> list[Fragment]:
        hashes = self._index.hashes(ids)
        order = np.argsort(hashes, kind="stable")
        ids = ids[order]
        borders = np.searchsorted(groups_of_hashes(hashes[order]), np.arange(KEY_GROUPS + 1))
        fragments: list[Fragment] = []
        for groups in _runs(changed_groups, borders):
            first, last = int(borders[groups[0]]), int(borders[groups[-1] + 1])
            some = ids[first:last]
            columns = [pa.array(self._removed[some]), *self.rows(some).columns]
            rows = pa.RecordBatch.from_arrays(columns, schema=self._schema)
            for group in groups:
                begin, end = int(borders[group]), int(borders[group + 1])
                sequence = self._chains.append(group, end - begin, full=bool(is_full[group]))
                fragments.append(Fragment(group, sequence, rows.slice(begin - first, end - begin)))
        return fragments


def _runs(groups: Ids, borders: Ids) -> Iterator[list[int]]:
    """Key groups in order, as many together as have a bounded number of rows: an Arrow array of texts has a limit."""
    run: list[int] = []
    for group in groups.tolist():
        if run and borders[group + 1] - borders[run[0]] > CUT_ROWS_MAX:
            yield run
            run = []
        run.append(group)
    if run:
        yield run


class _Chains:
    """How long the chain of each key group is, and when a new one is due."""

    def __init__(self) -> None:
        self._last: npt.NDArray[np.int64] = np.full(KEY_GROUPS, _NONE)
        self._base_rows: npt.NDArray[np.int64] = np.zeros(KEY_GROUPS, dtype=np.int64)
        self._delta_rows: npt.NDArray[np.int64] = np.zeros(KEY_GROUPS, dtype=np.int64)
        # Spread out: if every group began its new chain at the same checkpoint, that one would write everything.
        self._patience = 0.5 + np.arange(KEY_GROUPS) / KEY_GROUPS

    @property
    def chunks(self) -> int:
        """Chunks of all chains."""
        return int((self._last + 1).sum())

    def next_is_full(self, changed: npt.NDArray[np.int64]) -> Flags:
        """By key group: whether the next chunk, with so many rows changed, is to begin a new chain."""
        outgrown = self._delta_rows + changed > self._base_rows * self._patience
        due: Flags = outgrown | (self._last + 1 >= CHAIN_CHUNKS_MAX) | (self._last == _NONE)
        return due & (changed > 0)

    def append(self, group: int, rows: int, *, full: bool) -> int:
        """Add a chunk to a chain, or begin a new one; returns its place."""
        if full:
            self._last[group], self._base_rows[group], self._delta_rows[group] = 0, rows, 0
        else:
            self._last[group] += 1
            self._delta_rows[group] += rows
        return int(self._last[group])

    def restored(self, fragment: Fragment) -> None:
        self.append(fragment.key_group, fragment.rows.num_rows, full=fragment.sequence == 0)


def _state_field(name: str, column: StateColumn) -> pa.Field:
    return pa.field(
        STATE_PREFIX + name, column.arrow, metadata={DECLARED: column.declared} if column.declared else None
    )


def _shown(schema: pa.Schema) -> str:
    columns = [
        f"{field.name.partition(':')[2]} ({(field.metadata or {}).get(DECLARED.encode(), b'').decode() or field.type})"
        for field in schema
        if field.name != REMOVED
    ]
    return ", ".join(columns)
