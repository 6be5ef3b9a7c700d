"""Aggregations by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from etl.keyed import Aggregate, Emission
from etl.operators.exact import placed
from etl.operators.keyed.columns import Ids
from etl.operators.keyed.grouping import key_arrays, key_frame
from etl.operators.keyed.reduction import Reduction
from etl.operators.keyed.spilling import state_of
from etl.operators.keyed.table import ChangedIds
from etl.schema import Schema
from etl.state import Fragment, StateCut, StatefulOperator

EMITTED_ROWS_MAX = 65_536
"""Rows of a batch that goes out at a barrier."""


class AggregateOperator(StatefulOperator):
    """Keeps results by key and emits those that have changed."""

    def __init__(self, transformation: Aggregate, input_schema: Schema, output_schema: Schema) -> None:
        self.uid = transformation.uid
        self._transformation = transformation
        self._keys = transformation.key_fields(input_schema)
        self._schema = output_schema.to_arrow()
        self._reduction = Reduction(transformation, input_schema)
        self._at_updates = transformation.emission is Emission.UPDATE
        self._unemitted = ChangedIds()
        keys = {field.name: field.type.arrow for field in self._keys}
        self._state = state_of(transformation, keys, self._reduction.columns)

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Take the rows in; nothing comes out unless every update is wanted."""
        with placed(self._transformation):
            reduced = self._reduction.reduce(key_frame(batch, self._keys), self._reduction.inputs(batch))
            keys = self._state.add(key_arrays(reduced, self._keys))
            self._reduction.merge(keys, reduced)
        self._state.touch(keys.ids)
        if self._at_updates:
            return self._results(keys.ids)
        self._unemitted.add(keys.ids, self._state.ids_end)
        return ()

    def flush(self) -> Iterable[pa.RecordBatch]:
        """The keys that have changed since the last barrier."""
        return self._results(self._unemitted.take())

    def results(self) -> Iterable[pa.RecordBatch]:
        """Those of all keys."""
        return self._results(self._state.live_ids())

    def restore(self, fragments: Sequence[Fragment]) -> None:
        """See :meth:`etl.state.StatefulOperator.restore`."""
        self._state.restore(fragments)

    def close(self) -> None:
        """See :meth:`etl.operator.Operator.close`."""
        self._state.close()

    def cut(self) -> StateCut:
        """See :meth:`etl.state.StatefulOperator.cut`."""
        return self._state.cut()

    def _results(self, ids: Ids) -> Iterator[pa.RecordBatch]:
        for first in range(0, len(ids), EMITTED_ROWS_MAX):
            some = ids[first : first + EMITTED_ROWS_MAX]
            with placed(self._transformation):
                arrays = [*self._state.keys(some), *self._reduction.results(some)]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)
