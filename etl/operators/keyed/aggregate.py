"""Aggregations by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from etl.keyed import Aggregate, Emission
from etl.operators.calling import evaluating
from etl.operators.exact import frame_of, placed
from etl.operators.keyed.accumulators import accumulator_for
from etl.operators.keyed.columns import Ids
from etl.operators.keyed.grouping import key_arrays
from etl.operators.keyed.state import ChangedIds, KeyedState
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
        self._accumulators = [accumulator_for(column) for column in transformation.columns(input_schema)]
        self._at_updates = transformation.emission is Emission.UPDATE
        self._unemitted = ChangedIds()
        columns = {f"{one.name}.{part}": column for one in self._accumulators for part, column in one.columns.items()}
        self._state = KeyedState(self.uid, {field.name: field.type.arrow for field in self._keys}, columns)
        # The output names carry an accumulator's number: a column of the user's may be called like a part of another.
        self._partials = [
            partial.alias(_partial_name(number, part))
            for number, one in enumerate(self._accumulators)
            for part, partial in one.partials.items()
        ]

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Take the rows in; nothing comes out unless every update is wanted."""
        with placed(self._transformation):
            frame = frame_of(batch)
            with evaluating(self._transformation):
                grouped = frame.group_by([field.name for field in self._keys], maintain_order=True).agg(self._partials)
            keys = self._state.add(key_arrays(grouped, self._keys))
            for number, one in enumerate(self._accumulators):
                one.merge(keys, {part: grouped[_partial_name(number, part)] for part in one.partials})
        self._state.touch(keys.ids)
        if self._at_updates:
            return self._results(keys.ids)
        self._unemitted.add(keys.ids, self._state.ids_end)
        return ()

    def flush(self) -> Iterable[pa.RecordBatch]:
        """The keys that have changed since the last barrier."""
        return self._results(self._unemitted.take())

    def restore(self, fragment: Fragment) -> None:
        """See :meth:`etl.state.StatefulOperator.restore`."""
        self._state.restore(fragment)

    def cut(self) -> StateCut:
        """See :meth:`etl.state.StatefulOperator.cut`."""
        return self._state.cut()

    def _results(self, ids: Ids) -> Iterator[pa.RecordBatch]:
        for first in range(0, len(ids), EMITTED_ROWS_MAX):
            some = ids[first : first + EMITTED_ROWS_MAX]
            with placed(self._transformation):
                arrays = [*self._state.keys(some), *(one.result(some) for one in self._accumulators)]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _partial_name(number: int, part: str) -> str:
    return f"__etl_{number}_{part}"
