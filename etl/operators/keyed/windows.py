"""Aggregations in windows of a fixed size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
import pyarrow as pa

from etl.keyed import Emission
from etl.operators.keyed.columns import Ids, PrimitiveColumn, primitive_values
from etl.operators.keyed.key_index import Numbered
from etl.operators.keyed.table import ChangedIds
from etl.operators.keyed.time_queue import Moments
from etl.operators.keyed.windowed import START, WindowedOperator
from etl.schema import Schema
from etl.windowed import WindowAggregate


class WindowOperator(WindowedOperator):
    """Tumbling and sliding windows.

    A window waits for its end; then for the moment from which on it takes no more rows, and is forgotten.
    """

    def __init__(self, transformation: WindowAggregate, input_schema: Schema, output_schema: Schema) -> None:
        # Stored, so that it does not matter which emission was chosen when the window was stored.
        self._emitted = PrimitiveColumn(pa.bool_())
        self._emitted.declared = str(transformation.window)
        super().__init__(transformation, input_schema, output_schema, {"emitted": self._emitted})
        self._at_checkpoints = transformation.emission is Emission.CHECKPOINT
        self._at_barrier = ChangedIds()

    def _took_in(self, spans: Numbered, reduced: pl.DataFrame) -> None:
        ids, ends = spans.ids, reduced[START].to_numpy() + self._assigner.size
        self._emitted.values[ids], self._emitted.valid[ids] = False, True
        has_ended = ends <= self._watermark
        due = np.where(has_ended, ends + self._lateness, ends)
        self._waiting.add(due[spans.new], ids[spans.new])
        self._at_barrier.add(ids if self._at_checkpoints else ids[has_ended], self._state.ids_end)

    def _starts(self, ids: Ids) -> Moments:
        return primitive_values(self._state.keys(ids)[-1])

    def _ends(self, ids: Ids) -> Moments:
        return self._starts(ids) + self._assigner.size

    def _close(self, ids: Ids) -> Iterator[pa.RecordBatch]:
        over = self._ends(ids) + self._lateness
        is_over = over <= self._watermark
        self._waiting.add(over[~is_over], ids[~is_over])
        wanted = ~self._emitted.values[ids]
        if self._at_checkpoints:
            wanted &= is_over
        yield from self._emit(ids[wanted])
        self._state.remove(ids[is_over])

    def flush(self) -> Iterator[pa.RecordBatch]:
        """Early results, or those that late rows have changed."""
        yield from super().flush()
        yield from self._emit(self._at_barrier.take())

    def results(self) -> Iterator[pa.RecordBatch]:
        """Those of all windows that are remembered."""
        ids = self._state.live_ids()
        return self._results(ids, self._starts(ids))

    def _emit(self, ids: Ids) -> Iterator[pa.RecordBatch]:
        self._emitted.values[ids] = True
        self._state.touch(ids)
        self._at_barrier.discard(ids)
        return self._results(ids, self._starts(ids))
