"""The rows of one side of a join, as state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from etl.errors import RecordError
from etl.event_time import microseconds_of
from etl.key_group import hash_keys
from etl.operators.keyed.columns import Ids, PrimitiveColumn, StateColumn, state_column
from etl.operators.keyed.key_times import KeyTimes, Numbers
from etl.operators.keyed.table import KeyedTable, unused
from etl.operators.keyed.time_queue import Moments, TimeQueue
from etl.schema import Schema

ROWS_MAX = 65_536
"""Rows that are taken out of the columns at once."""

Columns = Mapping[str, pa.Array]


class WaitingRows:
    """Whole rows, remembered exactly, and told when their time has come.

    Rows have ids, as everything in a :class:`~etl.operators.keyed.table.KeyedTable`; an id is that of its row until the
    row is removed. Costs are those of the rows that are added, due and removed.

    Args:
        schema: Columns of the rows.
        keys: Those that make the key.
        stored_keys: What these are called in the state, where those of both sides have the same names.
        time: The column that says when a row happened.
        notes: More columns of the state, by what they are called unless a column of the rows is.

    Attributes:
        table: For :class:`~etl.operators.keyed.state.KeyedTables`, which restores and cuts it.
    """

    def __init__(
        self,
        schema: Schema,
        keys: Sequence[str],
        stored_keys: Sequence[str],
        time: str,
        notes: Mapping[str, StateColumn] = {},
    ) -> None:
        self._keys = list(keys)
        self._time = time
        self._columns = {field.name: state_column(field.type.arrow) for field in schema if field.name not in keys}
        for name, column in self._columns.items():
            column.declared = schema[name].name
        columns: dict[str, StateColumn] = {**self._columns}
        for name, note in notes.items():
            columns[unused(name, columns)] = note
        key_types = {stored: schema[name].arrow for stored, name in zip(stored_keys, keys, strict=True)}
        sequence = unused("sequence", key_types)
        self.table = KeyedTable({**key_types, sequence: pa.int64()}, columns, grouped_by=len(key_types))
        self._next = 0
        self._waiting = TimeQueue()
        self._is_noted = False

    def keys_of(self, columns: pa.RecordBatch | Columns) -> list[pa.Array]:
        """The columns that make the key."""
        return [columns[name] for name in self._keys]

    def moments_of(self, columns: pa.RecordBatch | Columns) -> Moments:
        """When rows happened.

        Raises:
            RecordError: One of them does not say it.
        """
        moments = microseconds_of(columns[self._time])
        if moments.null_count:
            raise RecordError(
                f'"{self._time}" is NULL in a row, which says nothing of when it happened; filter such rows before'
            )
        return np.asarray(moments)

    def add(self, batch: pa.RecordBatch, moments: Moments) -> Ids:
        """Keep rows, none of which has NULL in its key; returns their ids."""
        self._note_restored()
        keys = self.keys_of(batch)
        sequence = pa.array(np.arange(self._next, self._next + len(batch)))
        self._next += len(batch)
        ids = self.table.add([*keys, sequence]).ids
        for name, column in self._columns.items():
            column.put(ids, batch.column(name))
        self.table.touch(ids)
        self._note(ids, keys, moments)
        return ids

    def due(self, until: int) -> Ids:
        """The rows that happened until a moment, itself included, in the order of time; each is told once.

        Those that are not removed are told again after a restart.
        """
        self._note_restored()
        return self._waiting.take(until)[1]

    def columns(self, ids: Ids) -> Columns:
        """The rows with these ids, exactly as they came."""
        found = dict(zip(self._keys, self.table.keys(ids), strict=False))
        return found | {name: column.take(ids) for name, column in self._columns.items()}

    def remove(self, ids: Ids) -> None:
        """Forget rows that were due."""
        self.table.remove(ids)

    def _note(self, ids: Ids, keys: Sequence[pa.Array], moments: Moments) -> None:  # noqa: ARG002 - for who needs it
        """Rows are there; of those with the same key and moment the later ones come later."""
        self._waiting.add(moments, ids)

    def _note_restored(self) -> None:
        """Find out once what was restored, since that comes piece by piece."""
        if self._is_noted:
            return
        self._is_noted = True
        ids = self.table.live_ids()
        if len(ids):
            sequence = np.asarray(self.table.keys(ids)[-1])
            self._next = int(sequence.max()) + 1
            ids = ids[np.argsort(sequence, kind="stable")]
            columns = self.columns(ids)
            self._note(ids, self.keys_of(columns), self.moments_of(columns))


class PartnerRows(WaitingRows):
    """Rows that are found by key and time as well.

    Args:
        schema: See :class:`WaitingRows`.
        keys: See there.
        stored_keys: See there.
        time: See there.
        notes_partners: Whether it is remembered which rows have had a partner.
    """

    def __init__(
        self, schema: Schema, keys: Sequence[str], stored_keys: Sequence[str], time: str, *, notes_partners: bool
    ) -> None:
        self._joined = PrimitiveColumn(pa.bool_()) if notes_partners else None
        super().__init__(schema, keys, stored_keys, time, {} if self._joined is None else {"joined": self._joined})
        self._times = KeyTimes()

    def partners(self, keys: Sequence[pa.Array], first: Moments, last: Moments) -> Iterator[tuple[Numbers, Ids]]:
        """Pairs of a row asked for and the id of a row with its key that happened between two moments, both included.

        Args:
            keys: Of the rows asked for, without NULLs.
            first: For each row the first moment.
            last: For each row the last one.
        """
        self._note_restored()
        for rows, ids in self._times.within(hash_keys(keys), first, last):
            chosen = pa.array(rows)
            same = self.table.begins_with(ids, [column.take(chosen) for column in keys])
            yield rows[same], ids[same]

    def note_partners(self, ids: Ids) -> None:
        """These rows have had a partner; some may come many times."""
        if self._joined is not None:
            new = np.unique(ids[~self._joined.values[ids]])
            self._joined.put(new, pa.array(np.ones(len(new), dtype=np.bool_)))
            self.table.touch(new)

    def without_partner(self, ids: Ids) -> Ids:
        """Those of these rows that have had none."""
        assert self._joined is not None
        return ids[~self._joined.values[ids]]

    def remove(self, ids: Ids) -> None:
        """See :meth:`WaitingRows.remove`."""
        self._times.remove(ids)
        super().remove(ids)

    def _note(self, ids: Ids, keys: Sequence[pa.Array], moments: Moments) -> None:
        super()._note(ids, keys, moments)
        self._times.add(hash_keys(keys), moments, ids)


def in_pieces(ids: Ids) -> Iterator[Ids]:
    """Ids in pieces of at most :data:`ROWS_MAX`."""
    for begin in range(0, len(ids), ROWS_MAX):
        yield ids[begin : begin + ROWS_MAX]
