"""The first row of each key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from etl.keyed import Deduplicate
from etl.operators.exact import placed
from etl.operators.keyed.grouping import ROW, first_rows, key_arrays, key_frame
from etl.operators.keyed.spilling import state_of
from etl.schema import Schema
from etl.state import Fragment, StateCut, StatefulOperator


class DeduplicateOperator(StatefulOperator):
    """Remembers the keys it has seen and lets pass only rows of new ones."""

    def __init__(self, transformation: Deduplicate, schema: Schema) -> None:
        self.uid = transformation.uid
        self._transformation = transformation
        self._keys = transformation.key_fields(schema)
        self._state = state_of(transformation, {field.name: field.type.arrow for field in self._keys}, {})

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """The rows whose keys were never seen before, in their order."""
        with placed(self._transformation):
            first = first_rows(key_frame(batch, self._keys))
            keys = self._state.add(key_arrays(first, self._keys))
        self._state.touch(keys.ids[keys.new])
        rows = first[ROW].to_arrow().filter(pa.array(keys.new))
        return (batch if len(rows) == len(batch) else batch.take(rows),)

    def restore(self, fragments: Sequence[Fragment]) -> None:
        """See :meth:`etl.state.StatefulOperator.restore`."""
        self._state.restore(fragments)

    def close(self) -> None:
        """See :meth:`etl.operator.Operator.close`."""
        self._state.close()

    def cut(self) -> StateCut:
        """See :meth:`etl.state.StatefulOperator.cut`."""
        return self._state.cut()
