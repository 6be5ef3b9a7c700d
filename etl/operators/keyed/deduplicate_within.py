"""The first row of each key, and no other for some time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from etl.clock import Clock
from etl.event_time import FOREVER, in_microseconds, microseconds_since_1970
from etl.keyed import Deduplicate
from etl.operator import LATE, Output, SideOutput
from etl.operators.exact import placed
from etl.operators.keyed.columns import Ids
from etl.operators.keyed.grouping import first_rows, key_arrays, key_frame
from etl.operators.keyed.moments import MomentType, SortedMomentsColumn, moments_of
from etl.operators.keyed.state import KeyedState
from etl.operators.keyed.time_queue import Moments, TimeQueue, later
from etl.schema import PostgresType, Schema
from etl.state import Fragment, StateCut, StatefulOperator

_BY_CLOCK = PostgresType.parse("timestamptz")


class DeduplicateWithinOperator(StatefulOperator):
    """Lets a row pass if none of the same key that passed lies less than the time to live from it, before or after.

    Of each key the moments of the rows that passed are remembered, until no row can come that lies so near.

    Args:
        transformation: What was declared, with a time to live.
        schema: Columns of the rows.
        clock: Time, which counts where no column of event time is declared.
    """

    def __init__(self, transformation: Deduplicate, schema: Schema, clock: Clock) -> None:
        assert transformation.ttl is not None
        self.uid = transformation.uid
        self._transformation = transformation
        self._keys = transformation.key_fields(schema)
        self._time = transformation.time
        self._ttl = in_microseconds(transformation.ttl)
        self._clock = clock
        type_ = _BY_CLOCK if self._time is None else schema[self._time]
        self._passed = SortedMomentsColumn(MomentType("passed", type_).arrow, f"moments of {type_}")
        key_types = {field.name: field.type.arrow for field in self._keys}
        self._state = KeyedState(self.uid, key_types, {"passed": self._passed})
        self._waiting: TimeQueue | None = None
        self._watermark: int | None = None
        self._late_rows = 0

    def process(self, batch: pa.RecordBatch) -> Iterator[Output]:
        """The rows that pass, in their order, and those that came too late to be judged."""
        with placed(self._transformation):
            waiting = self._queue()
            if self._time is None:
                moments = np.full(len(batch), microseconds_since_1970(self._clock.now()))
            else:
                moments = moments_of(batch, self._time)
                if self._watermark is not None and (late := moments < self._watermark).any():
                    self._late_rows += int(late.sum())
                    yield SideOutput(LATE, batch.filter(pa.array(late)))
                    batch, moments = batch.filter(pa.array(~late)), moments[~late]
            frame = key_frame(batch, self._keys)
            self._state.add(key_arrays(first_rows(frame), self._keys))
            ids = self._state.find(key_arrays(frame, self._keys))
            passes = np.fromiter(self._judged(ids, moments), dtype=np.bool_, count=len(ids))
            self._state.touch(ids[passes])
            waiting.add(later(moments[passes], self._ttl), ids[passes])
            yield batch if passes.all() else batch.filter(pa.array(passes))

    def _judged(self, ids: Ids, moments: Moments) -> Iterable[bool]:
        passed, ttl = self._passed.values, self._ttl
        for id_, moment in zip(ids.tolist(), moments.tolist(), strict=True):
            known = passed[id_]
            if known is None:
                passed[id_] = [moment]
                yield True
                continue
            place = bisect_left(known, moment)
            # Only the nearest ones matter: there may be many while event time is held back.
            passes = all(abs(moment - one) >= ttl for one in known[max(0, place - 1) : place + 1])
            if passes:
                known.insert(place, moment)
            yield passes

    def advance(self, watermark: int) -> Iterable[Output]:
        """Forget what no row can come near to any more; the end of time says nothing about that."""
        if self._time is not None and watermark != FOREVER:
            self._watermark = watermark if self._watermark is None else max(self._watermark, watermark)
            self._forget(self._watermark)
        return ()

    @property
    def due(self) -> int | None:
        """See :attr:`etl.operator.Operator.due`."""
        return self._queue().earliest if self._time is None else None

    def tick(self, now: int) -> Iterable[Output]:
        """Forget what is over by the clock."""
        if self._time is None:
            self._forget(now)
        return ()

    def resume(self, watermark: int) -> None:
        """See :meth:`etl.state.StatefulOperator.resume`."""
        self._watermark = watermark

    def restore(self, fragments: Sequence[Fragment]) -> None:
        """See :meth:`etl.state.StatefulOperator.restore`."""
        self._state.restore(fragments)

    def cut(self) -> StateCut:
        """See :meth:`etl.state.StatefulOperator.cut`."""
        late_rows, self._late_rows = self._late_rows, 0
        return self._state.cut(self._watermark, late_rows)

    def _forget(self, now: int) -> None:
        _, ids = self._queue().take(now)
        some = np.unique(ids)
        for id_ in some.tolist():
            known = self._passed.values[id_] or []
            self._passed.values[id_] = known[bisect_right(known, now - self._ttl) :] or None
        is_empty = np.array([self._passed.values[id_] is None for id_ in some.tolist()], dtype=np.bool_)
        self._state.touch(some[~is_empty])
        self._state.remove(some[is_empty])

    def _queue(self) -> TimeQueue:
        """When moments are to be forgotten: found once, since the keys are restored piece by piece."""
        if self._waiting is None:
            self._waiting = TimeQueue()
            ids = self._state.live_ids()
            pairs = [(moment, id_) for id_ in ids.tolist() for moment in self._passed.values[id_] or ()]
            moments, of_moments = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
            self._waiting.add(later(moments, self._ttl), of_moments)
        return self._waiting
