"""Aggregations by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import polars as pl
import pyarrow as pa

from etl.keyed import Aggregate, Emission
from etl.operators.calling import evaluating
from etl.operators.exact import frame_of, placed
from etl.operators.keyed.accumulators import accumulator_for
from etl.operators.keyed.columns import Ids
from etl.operators.keyed.grouping import key_arrays, key_frame, key_names
from etl.operators.keyed.state import KeyedState
from etl.operators.keyed.table import ChangedIds
from etl.schema import Schema
from etl.state import Fragment, StateCut, StatefulOperator
from etl.transformation import ANCHOR

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

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Take the rows in; nothing comes out unless every update is wanted."""
        with placed(self._transformation):
            inputs = self._inputs(batch)
            named = [
                (
                    one,
                    {part: partial.alias(f"partial_{number}_{part}") for part, partial in one.partials(of_one).items()},
                )
                for number, (one, of_one) in enumerate(zip(self._accumulators, inputs, strict=True))
            ]
            frame = key_frame(batch, self._keys)
            frame = frame.with_columns([series for of_one in inputs for series in of_one.values()])
            with evaluating(self._transformation):
                partials = [partial for _, of_one in named for partial in of_one.values()]
                grouped = frame.group_by(key_names(self._keys), maintain_order=True).agg(partials)
            keys = self._state.add(key_arrays(grouped, self._keys))
            for one, of_one in named:
                one.merge(keys, {part: grouped[partial.meta.output_name()] for part, partial in of_one.items()})
        self._state.touch(keys.ids)
        if self._at_updates:
            return self._results(keys.ids)
        self._unemitted.add(keys.ids, self._state.ids_end)
        return ()

    def _inputs(self, batch: pa.RecordBatch) -> list[dict[str, pl.Series]]:
        """For each accumulator its inputs, a value for every row: also where an expression is the same for all rows."""
        expressions = {
            f"input_{number}_{name}": expression
            for number, one in enumerate(self._accumulators)
            for name, (expression, _) in one.inputs.items()
        }
        frame = frame_of(batch)
        with evaluating(self._transformation):
            named = [expression.alias(name) for name, expression in expressions.items()]
            computed = frame.select(pl.first().alias(ANCHOR), *named)
        return [
            {name: computed[f"input_{number}_{name}"] for name in one.inputs}
            for number, one in enumerate(self._accumulators)
        ]

    def flush(self) -> Iterable[pa.RecordBatch]:
        """The keys that have changed since the last barrier."""
        return self._results(self._unemitted.take())

    def results(self) -> Iterable[pa.RecordBatch]:
        """Those of all keys."""
        return self._results(self._state.live_ids())

    def restore(self, fragments: Sequence[Fragment]) -> None:
        """See :meth:`etl.state.StatefulOperator.restore`."""
        self._state.restore(fragments)

    def cut(self) -> StateCut:
        """See :meth:`etl.state.StatefulOperator.cut`."""
        return self._state.cut()

    def _results(self, ids: Ids) -> Iterator[pa.RecordBatch]:
        for first in range(0, len(ids), EMITTED_ROWS_MAX):
            some = ids[first : first + EMITTED_ROWS_MAX]
            with placed(self._transformation):
                arrays = [*self._state.keys(some), *(one.result(some) for one in self._accumulators)]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)
