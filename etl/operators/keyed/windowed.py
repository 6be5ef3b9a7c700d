"""What all aggregations in windows of event time have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import polars as pl
import pyarrow as pa

from etl.event_time import FOREVER, in_microseconds
from etl.operator import LATE, Output, SideOutput
from etl.operators.exact import placed
from etl.operators.keyed.aggregate import EMITTED_ROWS_MAX
from etl.operators.keyed.columns import Flags, Ids, StateColumn
from etl.operators.keyed.grouping import key_arrays, key_frame
from etl.operators.keyed.key_index import Numbered
from etl.operators.keyed.reduction import Reduction
from etl.operators.keyed.state import KeyedState
from etl.operators.keyed.time_queue import Moments, TimeQueue
from etl.operators.keyed.windowing import Assigner, TimeColumn
from etl.schema import Field, Schema
from etl.state import Fragment, StateCut, StatefulOperator
from etl.windowed import WINDOW_START, WindowAggregate

ASSIGNED_ROWS_MAX = 262_144
"""Rows, each counted once for each of its windows, that are worked off at once."""

START, MOMENT = "start", "moment"
"""Columns of frames: where the span of a row starts, and when the row happened."""

_NEVER = -(1 << 63)


class WindowedOperator(StatefulOperator):
    """Keeps results by key and span of time, and what of it is due when.

    The state has a row for each key and span, in the key group of the key. Each of them waits for one moment.

    Args:
        transformation: What was declared.
        input_schema: Columns of the batches.
        output_schema: Columns of the results.
        columns: What is remembered beside the results.
    """

    def __init__(
        self,
        transformation: WindowAggregate,
        input_schema: Schema,
        output_schema: Schema,
        columns: Mapping[str, StateColumn],
    ) -> None:
        self.uid = transformation.uid
        self._transformation = transformation
        self._keys = transformation.key_fields(input_schema)
        self._schema = output_schema.to_arrow()
        self._time = TimeColumn(Field(transformation.time, input_schema[transformation.time]))
        self._assigner = Assigner(transformation.window)
        self._lateness = in_microseconds(transformation.lateness)
        self._reduction = Reduction(transformation, input_schema)
        keys = {field.name: field.type.arrow for field in self._keys} | {WINDOW_START: self._time.kept}
        self._state = KeyedState(self.uid, keys, {**columns, **self._reduction.columns}, grouped_by=len(self._keys))
        self._waiting = TimeQueue()
        self._restored = False
        self._watermark = _NEVER
        self._forgotten = _NEVER
        self._late_rows = 0

    @abstractmethod
    def _took_in(self, spans: Numbered, reduced: pl.DataFrame) -> None:
        """Rows of spans were taken in: remember what belongs to them, and let new ones wait."""

    @abstractmethod
    def _ends(self, ids: Ids) -> Moments:
        """When spans end, as far as is known."""

    @abstractmethod
    def _close(self, ids: Ids) -> Iterator[pa.RecordBatch]:
        """Event time has come to what these spans have waited for."""

    def _further_partials(self) -> Sequence[pl.Expr]:
        """What is to be known of the rows of a span beside the results."""
        return ()

    def process(self, batch: pa.RecordBatch) -> Iterable[Output]:
        """Take the rows in, but for those that come too late for everything they belong to."""
        self._let_restored_wait()
        with placed(self._transformation):
            moments = self._time.moments(batch)
            keys = key_frame(batch, self._keys)
            inputs = self._reduction.inputs(batch).with_columns(pl.Series(MOMENT, moments))
            at_once = max(1, ASSIGNED_ROWS_MAX // self._assigner.windows)
            parts = [slice(first, first + at_once) for first in range(0, max(1, len(moments)), at_once)]
            taken = np.concatenate([self._take_in(moments[part], keys[part], inputs[part]) for part in parts])
        if taken.all():
            return ()
        self._late_rows += int((~taken).sum())
        return (SideOutput(LATE, batch.filter(pa.array(~taken))),)

    def _take_in(self, moments: Moments, keys: pl.DataFrame, inputs: pl.DataFrame) -> Flags:
        """Returns which of the rows were in time for any span."""
        rows, starts = self._assigner.assign(moments)
        late = self._assigner.ends(moments[rows], starts) <= self._forgotten_now()
        rows, starts = rows[~late], starts[~late]
        taken = np.zeros(len(moments), dtype=np.bool_)
        taken[rows] = True
        if len(rows):
            spans = keys[rows].with_columns(pl.Series(START, starts))
            reduced = self._reduction.reduce(spans, inputs[rows], *self._further_partials())
            start = self._time.kept_array(reduced[START].to_numpy())
            found = self._state.add([*key_arrays(reduced, self._keys), start])
            self._reduction.merge(found, reduced)
            self._took_in(found, reduced)
            self._state.touch(found.ids)
        return taken

    def advance(self, watermark: int) -> Iterable[pa.RecordBatch]:
        """Close what ends at the watermark or before.

        Where everything is closed on purpose, event time has come to the end of what is closed, and no further: what
        comes in a later run and is not late for that is not late.
        """
        if watermark == FOREVER:
            watermark = int(self._ends(self._state.live_ids()).max(initial=self._watermark))
        self._watermark = max(self._watermark, watermark)
        return self._close_due()

    def flush(self) -> Iterable[pa.RecordBatch]:
        """Close what has not been closed because it was restored from a checkpoint that was not aligned."""
        return self._close_due()

    def resume(self, watermark: int) -> None:
        """See :meth:`etl.state.StatefulOperator.resume`."""
        self._watermark = watermark

    def resume_forgotten(self, forgotten: int) -> None:
        """See :meth:`etl.state.StatefulOperator.resume_forgotten`.

        With a longer lateness than before, rows of windows that are gone would else begin them anew.
        """
        self._forgotten = forgotten

    def _forgotten_now(self) -> int:
        return self._forgotten if self._watermark == _NEVER else max(self._forgotten, self._watermark - self._lateness)

    def restore(self, fragments: Sequence[Fragment]) -> None:
        """See :meth:`etl.state.StatefulOperator.restore`."""
        self._state.restore(fragments)
        self._restored = True

    def cut(self) -> StateCut:
        """See :meth:`etl.state.StatefulOperator.cut`."""
        late_rows, self._late_rows = self._late_rows, 0
        if self._watermark == _NEVER:
            return self._state.cut(late_rows=late_rows)
        cut = self._state.cut(self._watermark, late_rows)
        return replace(cut, summary=replace(cut.summary, forgotten=self._forgotten_now()))

    def _close_due(self) -> Iterator[pa.RecordBatch]:
        self._let_restored_wait()
        _, ids = self._waiting.take(self._watermark)
        if len(ids):
            yield from self._close(ids)

    def _let_restored_wait(self) -> None:
        if self._restored:
            ids = self._state.live_ids()
            self._waiting.add(self._ends(ids), ids)
            self._restored = False

    def _results(self, ids: Ids, starts: Moments) -> Iterator[pa.RecordBatch]:
        """The results of spans that start and end there, one after the other by their ends."""
        ends = self._ends(ids)
        order = np.argsort(ends, kind="stable")
        ids, starts, ends = ids[order], starts[order], ends[order]
        for first in range(0, len(ids), EMITTED_ROWS_MAX):
            some = slice(first, first + EMITTED_ROWS_MAX)
            with placed(self._transformation):
                keys = self._state.keys(ids[some])[: len(self._keys)]
                borders = [self._time.shown_array(one[some]) for one in (starts, ends)]
                arrays = [*keys, *borders, *self._reduction.results(ids[some])]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)
