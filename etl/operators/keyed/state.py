"""The state of one operator subtask as it is stored: tables of rows by key, and the chains they are cut into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from etl.errors import StateError
from etl.key_group import KEY_GROUPS, groups_of_hashes
from etl.operators.keyed.columns import Flags, Ids, StateColumn
from etl.operators.keyed.evolution import CURE as EVOLUTION_CURE
from etl.operators.keyed.evolution import Evolution
from etl.operators.keyed.table import DECLARED, KEY_PREFIX, STATE_PREFIX, KeyedTable
from etl.state import Fragment, StateCut, StateSummary

REMOVED = "removed"
"""Column of a fragment: whether the key is there no more; only where what it was is in an earlier chunk."""

CHAIN_CHUNKS_MAX = 128
"""A restore of a key group reads no more chunks than that."""

CUT_ROWS_MAX = 65_536
"""Rows that are taken out of the columns at once, unless one key group has more."""

_NONE = -1


class KeyedTables:
    """Tables of an operator that are stored together: a fragment has the columns of all of them.

    A row has NULL in the columns of the other tables. Which table it belongs to is told by the first key column that is
    the table's own; rows of the table without a name have none.

    Args:
        uid: The operator.
        tables: By name. All are grouped by the same columns of the key; those with a name have more of them behind,
            which are never NULL.
        evolution: What becomes of rows in former shapes; None where there is but the present one.
    """

    def __init__(self, uid: str, tables: Mapping[str, KeyedTable], evolution: Evolution | None = None) -> None:
        self._uid = uid
        self._evolution = evolution
        self._to_rewrite: Flags = np.zeros(KEY_GROUPS, dtype=np.bool_)
        self._tables = list(tables.values())
        self._chains = _Chains()
        fields: dict[str, pa.Field] = {REMOVED: pa.field(REMOVED, pa.bool_())}
        own = [{field.name: field for field in table.fields(name)} for name, table in tables.items()]
        for part in (KEY_PREFIX, STATE_PREFIX):
            fields |= {name: field for one in own for name, field in one.items() if name.startswith(part)}
        self._schema = pa.schema(list(fields.values()))
        names = self._schema.names
        self._places = [[names.index(name) for name in one] for one in own]
        self._marks = [
            names.index(list(one)[table.grouped_by]) if name else None
            for (name, table), one in zip(tables.items(), own, strict=True)
        ]

    def restore(self, fragments: Sequence[Fragment]) -> None:
        """See :meth:`etl.state.StatefulOperator.restore`."""
        present = [self._in_present_shape(fragment) for fragment in fragments]
        # All at once: no key is in two key groups, and a step for each of many small fragments is what takes time.
        for rows in pa.Table.from_batches(present, self._schema).combine_chunks().to_batches():
            for table, places, mark in zip(self._tables, self._places, self._marks, strict=True):
                some = self._rows_of_table(rows, mark)
                table.take_in(np.asarray(some.column(0)), [some.column(place) for place in places])
        for fragment in fragments:
            if not self._to_rewrite[fragment.key_group]:
                self._chains.restored(fragment)

    def _in_present_shape(self, fragment: Fragment) -> pa.RecordBatch:
        """The rows; those of a former shape are changed, and their key group is written anew with the next cut."""
        rows = fragment.rows
        if rows.schema.equals(self._schema, check_metadata=True):
            return rows
        adapted = None if self._evolution is None else self._evolution.adapted(rows, self._schema)
        if adapted is None:
            cure = "" if self._evolution is None else f"{EVOLUTION_CURE}; or "
            raise StateError(
                f'state of operator "{self._uid}" has columns {_shown(rows.schema)}, and the job\'s operator keeps'
                f" {_shown(self._schema)}; {cure}give the changed operator a new uid, and the old one to"
                f' Job(…, forget=["{self._uid}"])'
            )
        self._to_rewrite[fragment.key_group] = True
        return adapted

    def _rows_of_table(self, rows: pa.RecordBatch, mark: int | None) -> pa.RecordBatch:
        if len(self._tables) == 1:
            return rows
        if mark is not None:
            return rows.filter(rows.column(mark).is_valid())
        others = [np.asarray(rows.column(other).is_valid()) for other in self._marks if other is not None]
        return rows.filter(pa.array(~np.logical_or.reduce(others)))

    def cut(self, watermark: int | None = None, late_rows: int = 0) -> StateCut:
        """See :meth:`etl.state.StatefulOperator.cut`.

        Args:
            watermark: See :class:`etl.state.StateSummary`.
            late_rows: See there.
        """
        fragments = self._changed_fragments()
        return StateCut(self._uid, fragments, StateSummary(self._chains.chunks, watermark, late_rows))

    def rebase(self, key_group: int, rows: int) -> None:
        """The full snapshot of a key group that was cut last has so many rows."""
        self._chains.rebase(key_group, rows)

    def _changed_fragments(self) -> Sequence[Fragment]:
        changed = [table.take_changed() for table in self._tables]
        groups = [groups_of_hashes(table.hashes(ids)) for table, ids in zip(self._tables, changed, strict=True)]
        changes = np.bincount(np.concatenate(groups), minlength=KEY_GROUPS)
        changes[self._to_rewrite] += 1
        self._to_rewrite[:] = False
        if not changes.any():
            return ()
        is_full = self._chains.next_is_full(changes)
        written: list[Ids] = []
        for table, ids, of_ids in zip(self._tables, changed, groups, strict=True):
            ids = ids[~is_full[of_ids]]
            if is_full.any():
                everything = table.live_ids()
                ids = np.concatenate([ids, everything[is_full[groups_of_hashes(table.hashes(everything))]]])
            written.append(ids)
        fragments = self._fragments(written, np.flatnonzero(changes), is_full)
        for table, ids, of_table in zip(self._tables, written, changed, strict=True):
            table.told(ids, of_table)
        return fragments

    def _fragments(self, ids: Sequence[Ids], changed_groups: Ids, is_full: Flags) -> list[Fragment]:
        ordered = [_by_group(table, of_table) for table, of_table in zip(self._tables, ids, strict=True)]
        fragments: list[Fragment] = []
        for groups in _runs(changed_groups, np.sum([borders for _, borders in ordered], axis=0)):
            ends = [(int(borders[groups[0]]), int(borders[groups[-1] + 1])) for _, borders in ordered]
            parts = [
                self._rows(number, sorted_ids[first:last])
                for number, ((sorted_ids, _), (first, last)) in enumerate(zip(ordered, ends, strict=True))
            ]
            for group in groups:
                slices = [
                    rows.slice(int(borders[group]) - first, int(borders[group + 1] - borders[group]))
                    for rows, (_, borders), (first, _) in zip(parts, ordered, ends, strict=True)
                ]
                rows = slices[0] if len(slices) == 1 else pa.concat_batches(slices)
                sequence = self._chains.append(group, rows.num_rows, full=bool(is_full[group]))
                fragments.append(Fragment(group, sequence, rows))
        return fragments

    def _rows(self, number: int, ids: Ids) -> pa.RecordBatch:
        table, places = self._tables[number], self._places[number]
        columns = dict(zip(places, table.values(ids), strict=True))
        columns[0] = pa.array(table.removed(ids))
        arrays = [
            columns[place] if place in columns else pa.nulls(len(ids), field.type)
            for place, field in enumerate(self._schema)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


class KeyedState(KeyedTable):
    """A table that is all that its operator stores.

    Args:
        uid: The operator.
        keys: See :class:`~etl.operators.keyed.table.KeyedTable`.
        columns: See there.
        grouped_by: See there.
        evolution: See :class:`KeyedTables`.
    """

    def __init__(
        self,
        uid: str,
        keys: Mapping[str, pa.DataType],
        columns: Mapping[str, StateColumn],
        grouped_by: int | None = None,
        evolution: Evolution | None = None,
    ) -> None:
        super().__init__(keys, columns, grouped_by)
        self._stored_as = KeyedTables(uid, {"": self}, evolution)

    def restore(self, fragments: Sequence[Fragment]) -> None:
        """See :meth:`etl.state.StatefulOperator.restore`."""
        self._stored_as.restore(fragments)

    def cut(self, watermark: int | None = None, late_rows: int = 0) -> StateCut:
        """See :meth:`KeyedTables.cut`."""
        return self._stored_as.cut(watermark, late_rows)

    def close(self) -> None:
        """Release what is held beside memory."""


def _by_group(table: KeyedTable, ids: Ids) -> tuple[Ids, Ids]:
    """Ids in the order of their hashes, and where the key groups begin among them."""
    hashes = table.hashes(ids)
    order = np.argsort(hashes, kind="stable")
    return ids[order], np.searchsorted(groups_of_hashes(hashes[order]), np.arange(KEY_GROUPS + 1))


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

    def rebase(self, group: int, rows: int) -> None:
        self._base_rows[group] = rows

    def restored(self, fragment: Fragment) -> None:
        self.append(fragment.key_group, fragment.rows.num_rows, full=fragment.sequence == 0)


def _shown(schema: pa.Schema) -> str:
    columns = [
        f"{field.name.partition(':')[2]} ({(field.metadata or {}).get(DECLARED.encode(), b'').decode() or field.type})"
        for field in schema
        if field.name != REMOVED
    ]
    return ", ".join(columns)
