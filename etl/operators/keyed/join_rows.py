"""The rows of one side of a join that wait for partners, as state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from etl.errors import RecordError
from etl.event_time import microseconds_of
from etl.key_group import hash_keys
from etl.operators.keyed.columns import Flags, Ids, PrimitiveColumn, state_column
from etl.operators.keyed.key_times import KeyTimes, Numbers
from etl.operators.keyed.table import KeyedTable
from etl.operators.keyed.time_queue import Moments, TimeQueue
from etl.schema import Schema

ROWS_MAX = 65_536
"""Rows that are taken out of the columns at once."""

Columns = Mapping[str, pa.Array]


class JoinRows:
    """Whole rows, remembered exactly: found by key and time, and told when their time has come.

    Rows have ids, as everything in a :class:`~etl.operators.keyed.table.KeyedTable`; an id is that of its row until the
    row is removed. Costs are those of the rows that are added, found, due and removed.

    Args:
        schema: Columns of the rows.
        keys: Those that make the key.
        stored_keys: What these are called in the state, where those of both sides have the same names.
        time: The column that says when a row happened.
        notes_partners: Whether it is remembered which rows have had a partner.

    Attributes:
        table: For :class:`~etl.operators.keyed.state.KeyedTables`, which restores and cuts it.
        time: See the argument.
    """

    def __init__(
        self, schema: Schema, keys: Sequence[str], stored_keys: Sequence[str], time: str, *, notes_partners: bool
    ) -> None:
        self._schema = schema
        self._keys = list(keys)
        self.time = time
        self._columns = {field.name: state_column(field.type.arrow) for field in schema if field.name not in keys}
        for name, column in self._columns.items():
            column.declared = schema[name].name
        self._joined = PrimitiveColumn(pa.bool_()) if notes_partners else None
        own = {unused("joined", self._columns): self._joined} if self._joined is not None else {}
        key_types = {stored: schema[name].arrow for stored, name in zip(stored_keys, keys, strict=True)}
        sequence = unused("sequence", key_types)
        self.table = KeyedTable(
            {**key_types, sequence: pa.int64()}, {**self._columns, **own}, grouped_by=len(key_types)
        )
        self._next = 0
        self._waiting = TimeQueue()
        self._times = KeyTimes()
        self._is_indexed = False

    def keys_of(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """The columns of a batch that make the key."""
        return [batch.column(name) for name in self._keys]

    def moments_of(self, batch: pa.RecordBatch) -> Moments:
        """When the rows of a batch happened.

        Raises:
            RecordError: A row does not say it.
        """
        moments = microseconds_of(batch.column(self.time))
        if moments.null_count:
            raise RecordError(
                f'"{self.time}" is NULL in a row, which says nothing of when it happened; filter such rows before'
            )
        return np.asarray(moments)

    def add(self, batch: pa.RecordBatch, moments: Moments, joined: Flags | None = None) -> None:
        """Keep rows.

        Args:
            batch: The rows; none has NULL in its key.
            moments: When they happened.
            joined: Which of them have had a partner, where that is remembered.
        """
        self._index()
        keys = self.keys_of(batch)
        sequence = pa.array(np.arange(self._next, self._next + len(batch)))
        self._next += len(batch)
        ids = self.table.add([*keys, sequence]).ids
        for name, column in self._columns.items():
            column.put(ids, batch.column(name))
        if self._joined is not None:
            assert joined is not None
            self._joined.put(ids, pa.array(joined))
        self.table.touch(ids)
        self._note(ids, keys, moments)

    def partners(self, keys: Sequence[pa.Array], first: Moments, last: Moments) -> Iterator[tuple[Numbers, Ids]]:
        """Pairs of a row asked for and the id of a row with its key that happened between two moments, both included.

        Args:
            keys: Of the rows asked for, without NULLs.
            first: For each row the first moment.
            last: For each row the last one.
        """
        self._index()
        for rows, ids in self._times.within(hash_keys(keys), first, last):
            chosen = pa.array(rows)
            same = self.table.begins_with(ids, [column.take(chosen) for column in keys])
            yield rows[same], ids[same]

    def note_partners(self, ids: Ids) -> None:
        """These rows have had a partner; some may come many times."""
        if self._joined is not None:
            new = np.unique(ids[~self._joined.values[ids]])
            self._joined.values[new] = True
            self.table.touch(new)

    def due(self, until: int) -> Ids:
        """The rows that happened until a moment, itself included, in the order of time; each is told once."""
        self._index()
        return self._waiting.take(until)[1]

    def without_partner(self, ids: Ids) -> Ids:
        """Those of these rows that have had none."""
        assert self._joined is not None
        return ids[~self._joined.values[ids]]

    def columns(self, ids: Ids) -> Columns:
        """The rows with these ids, exactly as they came."""
        found = dict(zip(self._keys, self.table.keys(ids), strict=False))
        return found | {name: column.take(ids) for name, column in self._columns.items()}

    def remove(self, ids: Ids) -> None:
        """Forget rows that were due."""
        self._times.remove(ids)
        self.table.remove(ids)

    def _note(self, ids: Ids, keys: Sequence[pa.Array], moments: Moments) -> None:
        self._waiting.add(moments, ids)
        self._times.add(hash_keys(keys), moments, ids)

    def _index(self) -> None:
        """Find out once what was restored, since that comes piece by piece."""
        if self._is_indexed:
            return
        self._is_indexed = True
        ids = self.table.live_ids()
        if len(ids):
            *keys, sequence = self.table.keys(ids)
            self._next = int(np.asarray(sequence).max()) + 1
            order = np.argsort(np.asarray(sequence), kind="stable")
            chosen = pa.array(order)
            moments = np.asarray(microseconds_of(self.columns(ids)[self.time]))
            self._note(ids[order], [column.take(chosen) for column in keys], moments[order])


def unused(name: str, taken: Collection[str]) -> str:
    """A name that is not taken: this one, or the next like it."""
    while name in taken:
        name += "_"
    return name


def in_pieces(ids: Ids) -> Iterator[Ids]:
    """Ids in pieces of at most :data:`ROWS_MAX`."""
    for begin in range(0, len(ids), ROWS_MAX):
        yield ids[begin : begin + ROWS_MAX]
