"""Aggregations in sessions.

Time is cut into spans as long as the gap. Rows of a key in the same span are less than the gap apart, so they are in
the same session, and a session has rows in each span that it passes through. So what is remembered of a span never has
to be divided, and where it goes is decided when event time has come the gap beyond its last row::

    gap         |   span  1   |   span  2   |   span  3   |   span  4   |
    rows        |      x   x  | x     x     |             |   x         |
                       └─ less than ─┘ └─── the gap or more ───┘

    span 1 is due: span 2 goes on from it, and absorbs it;  span 2 is due: nothing goes on from it, the session closes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from etl.operators.keyed.columns import Flags, Ids, PrimitiveColumn
from etl.operators.keyed.key_index import NOT_FOUND, Numbered
from etl.operators.keyed.time_queue import Moments
from etl.operators.keyed.windowed import MOMENT, WindowedOperator
from etl.operators.keyed.windowing import TimeColumn
from etl.schema import Field, Schema
from etl.windowed import WindowAggregate

_FIRST, _LAST = "first", "last"


class SessionOperator(WindowedOperator):
    """Sessions, emitted when they close."""

    def __init__(self, transformation: WindowAggregate, input_schema: Schema, output_schema: Schema) -> None:
        kept = TimeColumn(Field(transformation.time, input_schema[transformation.time])).kept
        self._first, self._last = PrimitiveColumn(kept), PrimitiveColumn(kept)
        self._first.declared = str(transformation.window)
        columns = {_FIRST: self._first, _LAST: self._last}
        super().__init__(transformation, input_schema, output_schema, columns)
        self._gap = self._assigner.size

    def _further_partials(self) -> Sequence[pl.Expr]:
        return pl.col(MOMENT).min().alias(_FIRST), pl.col(MOMENT).max().alias(_LAST)

    def _took_in(self, spans: Numbered, reduced: pl.DataFrame) -> None:
        for column, name, choose in ((self._first, _FIRST, np.minimum), (self._last, _LAST, np.maximum)):
            there = reduced[name].to_numpy()
            column.values[spans.ids] = np.where(spans.new, there, choose(column.values[spans.ids], there))
            column.valid[spans.ids] = True
        new = spans.ids[spans.new]
        self._waiting.add(self._ends(new), new)

    def _ends(self, ids: Ids) -> Moments:
        return self._last.values[ids] + self._gap

    def _close(self, ids: Ids) -> Iterator[pa.RecordBatch]:
        ends = self._ends(ids)
        is_over = ends <= self._watermark
        # Rows came after it was noted what these wait for.
        self._waiting.add(ends[~is_over], ids[~is_over])
        ids = ids[is_over]
        if len(ids):
            closed = self._join(ids)
            yield from self._results(closed, self._first.values[closed])
            self._state.remove(ids)

    def _join(self, ids: Ids) -> Ids:
        """Let spans be absorbed by those that go on from them, the earliest first; returns those that nothing does."""
        following = self._following(ids)
        order = np.argsort(ids)
        found = order[np.searchsorted(ids, following, sorter=order).clip(max=len(ids) - 1)]
        next_row = np.where(ids[found] == following, found, NOT_FOUND)
        is_first = np.ones(len(ids), dtype=np.bool_)
        is_first[next_row[next_row != NOT_FOUND]] = False
        rows = np.flatnonzero(is_first)
        while len(rows):
            joined = rows[following[rows] != NOT_FOUND]
            into, earlier = following[joined], ids[joined]
            self._reduction.absorb(into, earlier)
            self._first.values[into] = np.minimum(self._first.values[into], self._first.values[earlier])
            self._state.touch(into)
            rows = next_row[rows]
            rows = rows[rows != NOT_FOUND]
        closed: Ids = ids[following == NOT_FOUND]
        return closed

    def _following(self, ids: Ids) -> Ids:
        """The spans in which the sessions of others go on."""
        *keys, starts = self._state.keys(ids)
        behind = self._time.kept_array(np.asarray(starts.cast(pa.int64())) + self._gap)
        following = self._state.find([*keys, behind])
        known = np.flatnonzero(following != NOT_FOUND)
        apart: Flags = self._first.values[following[known]] - self._last.values[ids[known]] >= self._gap
        following[known[apart]] = NOT_FOUND
        return following
