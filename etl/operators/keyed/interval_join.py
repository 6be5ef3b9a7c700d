"""Pairs of rows with the same key whose times lie within a span of each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pyarrow as pa

from etl.event_time import FOREVER, in_microseconds
from etl.joins import IntervalJoin
from etl.operators.keyed.columns import Ids
from etl.operators.keyed.join_rows import Columns, PartnerRows, in_pieces
from etl.operators.keyed.joining import LEAST, JoinOperator, columns_of, known_keys, taken
from etl.operators.keyed.time_queue import Moments, later
from etl.schema import Schema


@dataclass(frozen=True, slots=True)
class _Reach:
    """Where the partners of a side's rows lie, from the row's own time on, in microseconds; both included."""

    first: int
    last: int


class IntervalJoinOperator(JoinOperator):
    """A row joins with those of the other side that wait, and waits itself until no partner can come any more.

    Pairs come out with the second of their rows, rows without a partner once nothing can come for them. Both may
    have happened before the watermark that has come, but not by more than the bounds of the join: by that the watermark
    is held back.
    """

    def __init__(self, transformation: IntervalJoin, inputs: Sequence[Schema], output_schema: Schema) -> None:
        described = zip(inputs, transformation.keys_of_inputs, transformation.times, strict=True)
        self._rows = [
            PartnerRows(schema, keys, transformation.keys, time, notes_partners=keeps)
            for (schema, keys, time), keeps in zip(described, transformation.how.keeps, strict=True)
        ]
        super().__init__(transformation, inputs, output_schema, self._rows)
        self._keeps = transformation.how.keeps
        lower, upper = _bounded(transformation.lower), _bounded(transformation.upper)
        self._reaches = (_Reach(lower, upper), _Reach(-upper, -lower))
        self._held_back = max(upper, -lower, 0)

    def advance(self, watermark: int) -> Iterator[pa.RecordBatch]:
        """Forget the rows for which nothing can come any more; those that never had a partner come out if wanted."""
        self.watermark = watermark
        for number, side in enumerate(self._rows):
            ids = side.due(self._done_until(number))
            if self._keeps[number]:
                yield from self._alone(number, side.without_partner(ids))
            side.remove(ids)

    def passed_on(self, watermark: int) -> int:
        """Held back as far as a result may have happened before it."""
        return FOREVER if watermark == FOREVER else max(LEAST, watermark - self._held_back)

    def _take(self, number: int, batch: pa.RecordBatch, moments: Moments) -> Iterable[pa.RecordBatch]:
        side, other, reach = self._rows[number], self._rows[1 - number], self._reaches[number]
        keys = side.keys_of(batch)
        known = known_keys(keys)
        asking = np.flatnonzero(known)
        chosen = pa.array(asking)
        joined = np.zeros(len(batch), dtype=np.bool_)
        first, last = later(moments, reach.first), later(moments, reach.last)
        for rows, ids in other.partners([column.take(chosen) for column in keys], first[asking], last[asking]):
            places = asking[rows]
            joined[places] = True
            other.note_partners(ids)
            yield self._beside(number, columns_of(taken(batch, places)), other.columns(ids), len(ids))
        waits = known & (last >= self.watermark)
        if self._keeps[number]:
            alone = ~waits & ~joined
            yield self._beside(number, columns_of(taken(batch, alone)), None, int(alone.sum()))
        if waits.any():
            ids = side.add(taken(batch, waits), moments[waits])
            side.note_partners(ids[joined[waits]])

    def _alone(self, number: int, ids: Ids) -> Iterator[pa.RecordBatch]:
        for some in in_pieces(ids):
            yield self._beside(number, self._rows[number].columns(some), None, len(some))

    def _beside(self, number: int, own: Columns, others: Columns | None, rows: int) -> pa.RecordBatch:
        """Rows of a side with their partners, the left first."""
        return self._result(own, others, rows) if number == 0 else self._result(others, own, rows)

    def _done_until(self, number: int) -> int:
        """The last moment of rows of a side for which nothing can come any more."""
        if self.watermark == FOREVER:
            return FOREVER
        return min(max(self.watermark - self._reaches[number].last - 1, LEAST), FOREVER)


def _bounded(span: timedelta) -> int:
    """In microseconds; no two moments lie further apart than 64 bits hold."""
    return min(max(in_microseconds(span), -FOREVER), FOREVER)
