"""Rows that wait until event time has come to them, as state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from etl.event_time import microseconds_of
from etl.operators.keyed.columns import Ids, state_column
from etl.operators.keyed.table import KeyedTable, unused
from etl.operators.keyed.time_queue import Moments, TimeQueue
from etl.schema import Schema

SEQUENCE = "sequence"
"""Behind the key's columns, the one that tells rows of the same key apart: they are numbered in the order they came."""


class RowBuffer:
    """Whole rows, remembered exactly, and when each of them is due.

    Rows have ids, as everything in a :class:`~etl.operators.keyed.table.KeyedTable`; an id is that of its row until the
    row is removed. A row lies in the key group of the user's key, so it goes where the key's other state goes. Costs
    are those of the rows that are added, due and removed; those that wait cost nothing.

    ::

        buffer = RowBuffer(schema, ["card"], "at")
        tables = KeyedTables(uid, {"": other_state, "rows": buffer.table})    # stored with other state of the operator
        buffer.add(batch)
        ids = buffer.due(watermark)          # of rows before it, in order
        rows = buffer.rows(ids)
        buffer.remove(ids)

    Args:
        schema: Columns of the rows.
        keys: Those that make the user's key.
        time: The one that says when a row happened; it has no NULL.

    Attributes:
        table: For :class:`~etl.operators.keyed.state.KeyedTables`, which restores and cuts it.
    """

    def __init__(self, schema: Schema, keys: Sequence[str], time: str) -> None:
        self._schema = schema.to_arrow()
        self._keys = list(keys)
        self._time = time
        self._columns = {field.name: state_column(field.type.arrow) for field in schema if field.name not in keys}
        for name, column in self._columns.items():
            column.declared = schema[name].name
        key_types = {name: schema[name].arrow for name in keys}
        sequence = unused(SEQUENCE, key_types)
        self.table = KeyedTable({**key_types, sequence: pa.int64()}, self._columns, grouped_by=len(key_types))
        self._waiting: TimeQueue | None = None
        self._next = 0

    def __len__(self) -> int:
        return len(self.table)

    def add(self, batch: pa.RecordBatch) -> Ids:
        """Keep rows; returns their ids, in the order of the rows."""
        waiting = self._queue()
        sequence = pa.array(np.arange(self._next, self._next + len(batch)))
        self._next += len(batch)
        ids = self.table.add([*(batch.column(name) for name in self._keys), sequence]).ids
        for name, column in self._columns.items():
            column.put(ids, batch.column(name))
        self.table.touch(ids)
        waiting.add(_moments(batch.column(self._time)), ids)
        return ids

    def due(self, before: int) -> Ids:
        """The rows that happened before a moment, in the order of their times, of equal ones in that they came.

        Each is told once, and stays until it is removed; after a restore those that were not are told again.
        """
        _, ids = self._queue().take(before - 1)
        return ids

    def rows(self, ids: Ids) -> pa.RecordBatch:
        """The rows with these ids, exactly as they came."""
        keys = dict(zip(self._keys, self.table.keys(ids), strict=False))
        arrays = [keys[name] if name in keys else self._columns[name].take(ids) for name in self._schema.names]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def keys(self, ids: Ids) -> pa.RecordBatch:
        """The columns of the rows that make the key."""
        return pa.RecordBatch.from_arrays(self.table.keys(ids)[: len(self._keys)], names=self._keys)

    def moments(self, ids: Ids) -> Moments:
        """When the rows happened, in microseconds since 1970."""
        if self._time in self._columns:
            return _moments(self._columns[self._time].take(ids))
        return _moments(self.table.keys(ids)[self._keys.index(self._time)])

    def remove(self, ids: Ids) -> None:
        """Forget rows, each of which was due."""
        self.table.remove(ids)

    def _queue(self) -> TimeQueue:
        """What waits: found when it is first asked for, since the table is restored piece by piece."""
        if self._waiting is None:
            self._waiting = TimeQueue()
            ids = self.table.live_ids()
            if len(ids):
                sequence = np.asarray(self.table.keys(ids)[-1])
                self._next = int(sequence.max()) + 1
                ids = ids[np.argsort(sequence, kind="stable")]
                self._waiting.add(self.moments(ids), ids)
        return self._waiting


def _moments(column: pa.Array) -> Moments:
    return np.asarray(microseconds_of(column))
