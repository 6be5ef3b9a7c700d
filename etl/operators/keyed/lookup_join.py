"""Rows beside those of a table that is asked for them, by batches of keys."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from etl.event_time import in_microseconds
from etl.joins import JoinKind, LookupJoin
from etl.lookup import LookupContext
from etl.operator import Operator
from etl.operators.exact import batch_of_values, frame_of, placed
from etl.operators.keyed.columns import Flags, Ids, PrimitiveColumn, state_column
from etl.operators.keyed.grouping import ROW, first_rows
from etl.operators.keyed.joining import known_keys
from etl.operators.keyed.key_index import NOT_FOUND
from etl.operators.keyed.table import KeyedTable
from etl.schema import Schema

SPARE = 8
"""Where too many keys are remembered, one in so many more is forgotten: forgetting looks at all of them."""


class LookupJoinOperator(Operator):
    """Asks for the keys of a batch that are not remembered, all at once.

    What is remembered lies in columns under the numbers of keys, like state, but is stored nowhere: another attempt
    asks again.
    """

    def __init__(
        self, transformation: LookupJoin, schema: Schema, output_schema: Schema, context: LookupContext
    ) -> None:
        self._transformation = transformation
        self._schema = output_schema.to_arrow()
        self._reader = transformation.lookup.create_reader(context)
        self._clock = context.clock
        self._ttl_s = in_microseconds(transformation.cache_ttl) / 1_000_000
        self._found_schema = Schema(transformation.looked_up)
        self._columns = {field.name: state_column(field.type.arrow) for field in transformation.looked_up}
        key_types = {f"key_{number}": schema[name].arrow for number, name in enumerate(transformation.keys)}
        self._is_there = PrimitiveColumn(pa.bool_())
        self._asked_s = PrimitiveColumn(pa.float64())
        self._used = PrimitiveColumn(pa.int64())
        found = {f"found.{name}": column for name, column in self._columns.items()}
        noted = {"is there": self._is_there, "asked": self._asked_s, "used": self._used}
        self._table = KeyedTable(key_types, {**found, **noted})
        self._names = list(key_types)
        self._batches = 0

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """The rows, each beside that of its key."""
        with placed(self._transformation):
            keys = [batch.column(name) for name in self._transformation.keys]
            known = np.flatnonzero(known_keys(keys))
            chosen = pa.array(known)
            asked = pa.RecordBatch.from_arrays([column.take(chosen) for column in keys], self._names)
            ids = np.full(len(batch), NOT_FOUND)
            ids[known] = self._ids(asked)
            found = ids != NOT_FOUND
            found[found] = self._is_there.values[ids[found]]
            result = self._beside(batch, ids, found)
            self._forget_some()
            return (result,)

    def close(self) -> None:
        """See :meth:`etl.operator.Operator.close`."""
        self._reader.close()

    def _beside(self, batch: pa.RecordBatch, ids: Ids, found: Flags) -> pa.RecordBatch:
        if self._transformation.how is JoinKind.INNER:
            batch, ids, found = batch.filter(pa.array(found)), ids[found], found[found]
        places = pa.array(np.cumsum(found) - 1, mask=~found)
        beside = [column.take(ids[found]).take(places) for column in self._columns.values()]
        return pa.RecordBatch.from_arrays([*batch.columns, *beside], schema=self._schema)

    def _ids(self, keys: pa.RecordBatch) -> Ids:
        """The numbers of keys, all of which are remembered now, whether they are there or not."""
        self._batches += 1
        different = keys.take(first_rows(frame_of(keys))[ROW].to_arrow())
        ids = self._table.find(different.columns)
        is_known = ids != NOT_FOUND
        now_s = self._clock.monotonic_s()
        is_known[is_known] = now_s - self._asked_s.values[ids[is_known]] < self._ttl_s
        if not is_known.all():
            self._ask(different.filter(pa.array(~is_known)), now_s)
        found = self._table.find(keys.columns)
        self._used.values[found] = self._batches
        return found

    def _ask(self, keys: pa.RecordBatch, now_s: float) -> None:
        answers = self._reader.find(keys)
        rows = batch_of_values([value for _, values in answers for value in values], self._found_schema)
        ids = self._table.add(keys.columns).ids
        there = ids[np.array([place for place, _ in answers], dtype=np.int64)]
        self._asked_s.values[ids] = now_s
        self._is_there.values[ids] = False
        self._is_there.values[there] = True
        for name, column in self._columns.items():
            column.put(there, rows.column(name))

    def _forget_some(self) -> None:
        limit = self._transformation.cache_rows
        if len(self._table) > limit:
            ids = self._table.live_ids()
            order = np.argsort(self._used.values[ids], kind="stable")
            self._table.remove(ids[order[: len(ids) - (limit - limit // SPARE)]])
