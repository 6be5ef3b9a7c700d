"""Python functions that remember something of each key, and go by time: timers, rows in order, a time to live.

Every call has its moment, ``now``: that of the row or the timer, but never before the watermark (where a row came too
late, or a timer was set for what is past). By it is judged whether what is remembered has outlived its time. So with
rows that keep their source's promise, nothing depends on where batches end.

In order, a timer for a moment comes before the rows of that moment: at a watermark, all rows before it have come, and
no more is needed for the timer; some of that very moment may still come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import GeneratorType
from typing import Any

import numpy as np
import pyarrow as pa

from etl.clock import Clock
from etl.errors import EtlError, RecordError
from etl.event_time import FOREVER, in_microseconds, microseconds_since_1970
from etl.keyed_process import ROWS_TABLE, Process, Timer
from etl.operator import LATE, Output, SideOutput
from etl.operators.calling import RAISED, given_shown, name_of
from etl.operators.exact import batch_of_values, placed, rows_of
from etl.operators.keyed.columns import Ids
from etl.operators.keyed.expiry import Expiry
from etl.operators.keyed.handles import Cursor
from etl.operators.keyed.moments import MomentColumn, MomentType, moments_of
from etl.operators.keyed.process import ProcessOperator
from etl.operators.keyed.row_buffer import RowBuffer
from etl.operators.keyed.state import KeyedTables
from etl.operators.keyed.time_queue import Moments
from etl.operators.keyed.timers import Timers, TimersHandle
from etl.operators.rows import ROWS_MAX
from etl.schema import PostgresType, Schema
from etl.state import Fragment, StateCut
from etl.transformation import Row

_BEGINNING = -(1 << 63)
_BY_CLOCK = PostgresType.parse("timestamptz")
_NO_IDS: Ids = np.zeros(0, dtype=np.int64)
_WRITTEN = "written at"
"""No name of a declared state has a blank."""


class TimedProcessOperator(ProcessOperator):
    """Calls a function with each row, and others with timers, and the state of the key.

    Args:
        transformation: What was declared.
        input_schema: Columns of the rows.
        output_schema: Columns of the results.
        clock: Time.
    """

    def __init__(self, transformation: Process, input_schema: Schema, output_schema: Schema, clock: Clock) -> None:
        self._clock = clock
        self._time = transformation.time
        time_type = _BY_CLOCK if self._time is None else input_schema[self._time]
        cursor = Cursor()
        event, by_clock = TimersHandle("timers", cursor, time_type), TimersHandle("clock_timers", cursor, _BY_CLOCK)
        self._written = MomentColumn(MomentType(_WRITTEN, time_type).arrow, "")
        more = {"timers": event} if transformation.on_timer is not None else {}
        more |= {"clock_timers": by_clock} if transformation.on_clock_timer is not None else {}
        apart = {} if transformation.ttl is None else {_WRITTEN: self._written}
        super().__init__(transformation, input_schema, output_schema, more, apart, cursor)
        self._timers, self._clock_timers = Timers(event, self._state), Timers(by_clock, self._state)
        self._used = [timers for timers in (self._timers, self._clock_timers) if timers.handle in more.values()]
        self._expiry: Expiry | None = None
        if transformation.ttl is not None:
            self._expiry = Expiry(in_microseconds(transformation.ttl), self._written)
        self._of_states = [self._columns[name] for name in transformation.states]
        self._buffer: RowBuffer | None = None
        self._tables = KeyedTables(self.uid, {"": self._state})
        if transformation.in_order and self._time is not None:
            self._buffer = RowBuffer(input_schema, transformation.keys, self._time)
            self._tables = KeyedTables(self.uid, {"": self._state, ROWS_TABLE: self._buffer.table})
        self._watermark: int | None = None
        self._late_rows = 0
        self._is_loaded = False
        # Of the calls that are under way:
        self._now = _BEGINNING
        self._key_of: dict[int, Row] = {}

    def process(self, batch: pa.RecordBatch) -> Iterator[Output]:
        """What the function yields for each row; in order, only late rows go out: the others wait for their turn."""
        with placed(self._transformation):
            self._load()
            if self._buffer is not None:
                yield from self._keep(self._buffer, batch)
                return
            ids, new = self._ids(batch)
            yield from self._emitted(self._calls_with_rows(ids, self._moments(batch), rows_of(batch)))
            self._settle(new)

    def advance(self, watermark: int) -> Iterator[Output]:
        """What the functions yield for the rows and timers whose turn has come.

        At :data:`~etl.event_time.FOREVER` that is all of them, and the watermark stays at the last one.
        """
        if self._time is None:
            return
        with placed(self._transformation):
            self._load()
            self._now = former = _BEGINNING if self._watermark is None else self._watermark
            self._note_keys(self._timers.open(watermark))
            new = _NO_IDS
            if self._buffer is not None:
                ids = self._buffer.due(watermark)
                of_keys, new = self._ids(self._buffer.keys(ids))
                yield from self._take_turns(self._buffer, ids, of_keys)
            yield from self._emitted(self._calls_with_timers(self._timers, watermark))
            self._end_of_calls(self._timers, new)
            reached = self._now if watermark == FOREVER else max(former, watermark)
            self._watermark = reached if reached > _BEGINNING else None
            self._expire(reached)

    @property
    def due(self) -> int | None:
        """See :attr:`etl.operator.Operator.due`."""
        self._load()
        moments = [self._clock_timers.earliest]
        if self._expiry is not None and self._time is None:
            moments.append(self._expiry.earliest)
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: int) -> Iterator[Output]:
        """What the function yields for timers of the clock."""
        with placed(self._transformation):
            self._load()
            if self._time is None:
                self._now = now
            else:
                self._now = _BEGINNING if self._watermark is None else self._watermark
            self._note_keys(self._clock_timers.open(now))
            yield from self._emitted(self._calls_with_timers(self._clock_timers, now))
            self._end_of_calls(self._clock_timers, _NO_IDS)
            if self._time is None:
                self._expire(now)

    def restore(self, fragments: Sequence[Fragment]) -> None:
        """See :meth:`etl.state.StatefulOperator.restore`."""
        self._tables.restore(fragments)

    def resume(self, watermark: int) -> None:
        """See :meth:`etl.state.StatefulOperator.resume`."""
        self._watermark = watermark

    def cut(self) -> StateCut:
        """See :meth:`etl.state.StatefulOperator.cut`."""
        late_rows, self._late_rows = self._late_rows, 0
        with placed(self._transformation):
            return self._tables.cut(self._watermark, late_rows)

    def _load(self) -> None:
        """Find what waits among the keys, once: they are restored piece by piece."""
        if not self._is_loaded:
            self._is_loaded = True
            ids = self._state.live_ids()
            for timers in self._used:
                timers.load(ids)
            if self._expiry is not None:
                self._expiry.load(ids)

    def _keep(self, buffer: RowBuffer, batch: pa.RecordBatch) -> Iterator[Output]:
        assert self._time is not None
        moments = moments_of(batch, self._time)
        if self._watermark is not None:
            late = moments < self._watermark
            if late.any():
                self._late_rows += int(late.sum())
                yield SideOutput(LATE, batch.filter(pa.array(late)))
                batch = batch.filter(pa.array(~late))
        buffer.add(batch)

    def _take_turns(self, buffer: RowBuffer, ids: Ids, of_keys: Ids) -> Iterator[pa.RecordBatch]:
        """Call the functions with rows that were kept, and with the timers between them."""
        assert self._time is not None
        self._note_keys(of_keys)
        for begin in range(0, len(ids), ROWS_MAX):
            some = slice(begin, begin + ROWS_MAX)
            rows = rows_of(buffer.rows(ids[some]))
            yield from self._emitted(
                self._calls_with_rows(of_keys[some], buffer.moments(ids[some]), rows, self._timers)
            )
        buffer.remove(ids)

    def _moments(self, batch: pa.RecordBatch) -> Moments:
        """When each row is judged to have come; asked only where something outlives its time."""
        if self._expiry is None:
            return np.zeros(len(batch), dtype=np.int64)
        if self._time is None:
            return np.full(len(batch), microseconds_since_1970(self._clock.now()))
        moments = moments_of(batch, self._time)
        return moments if self._watermark is None else np.maximum(moments, self._watermark)

    def _calls_with_rows(
        self, ids: Ids, moments: Moments, rows: Iterable[Row], timers: Timers | None = None
    ) -> Iterator[Any]:
        """What the function returns for one row after the other, and for the timers that come before each."""
        cursor, seen, function = self._cursor, self._seen, self._transformation.function
        for id_, moment, row in zip(ids.tolist(), moments.tolist(), rows, strict=True):
            if timers is not None and timers.is_due(moment):
                yield from self._calls_with_timers(timers, moment)
            self._now = moment
            self._come_to(id_)
            cursor.given, self._function = row, function
            yield function(row, seen)
            self._after(id_)

    def _calls_with_timers(self, timers: Timers, until: int) -> Iterator[Any]:
        """What the function returns for timers that are due, one after the other."""
        function = self._transformation.on_timer if timers is self._timers else self._transformation.on_clock_timer
        while (found := timers.next_due(until)) is not None:
            assert function is not None
            moment, id_ = found
            if timers is self._timers:
                self._now = max(self._now, moment)
            self._come_to(id_)
            self._cursor.given = timer = Timer(dict(self._key_of[id_]), timers.handle.moments.shown(moment))
            timers.handle.firing, self._function = moment, function
            yield function(timer, self._seen)
            self._after(id_)
            timers.handle.firing = None

    def _come_to(self, id_: int) -> None:
        """The next call is for this key."""
        self._cursor.id = id_
        if self._expiry is not None and self._expiry.is_over(id_, self._now):
            self._forget(id_)

    def _after(self, id_: int) -> None:
        """What was returned is worked off."""
        if self._cursor.changed:
            self._cursor.changed = False
            self._changed.append(id_)
            if self._expiry is not None:
                self._expiry.write(id_, self._now)
        for timers in self._used:
            timers.take_in()

    def _emitted(self, calls: Iterator[Any]) -> Iterator[pa.RecordBatch]:
        for found in self._values(calls):
            if found:
                yield batch_of_values(found, self._schema)

    def _values(self, calls: Iterator[Any]) -> Iterator[list[Any]]:
        """The values of the rows that the functions return, see :func:`batch_of_values`."""
        found: list[Any] = []
        try:
            for returned in calls:
                if type(returned) is GeneratorType or self._has_rows(returned):
                    for one in returned:
                        found.extend(self._shape.values(one))
                        if len(found) == self._values_max:
                            yield found
                            found = []
        except RecordError as error:
            raise RecordError(f"{error}; in {name_of(self._function)}{given_shown(self._cursor.given)}") from error
        except EtlError:
            raise
        except RAISED as error:
            raise self._failure(error) from error
        yield found

    def _note_keys(self, ids: Ids) -> None:
        """Have the keys of these ids at hand for their timers."""
        if not self._used:
            return
        some = np.unique(ids)
        keys = pa.RecordBatch.from_arrays(self._state.keys(some), names=[field.name for field in self._keys])
        self._key_of.update(zip(some.tolist(), rows_of(keys), strict=True))

    def _end_of_calls(self, timers: Timers, new: Ids) -> None:
        timers.close()
        self._key_of.clear()
        self._settle(new)

    def _expire(self, now: int) -> None:
        if self._expiry is not None:
            for id_ in self._expiry.take(now):
                self._forget(id_)
            self._settle(_NO_IDS)

    def _forget(self, id_: int) -> None:
        """Empty all states of a key; its timers stay."""
        for column in self._of_states:
            column.values[id_] = None
        self._written.values[id_] = None
        self._changed.append(id_)

    def _settle(self, new: Ids) -> None:
        for timers in self._used:
            self._changed += timers.handle.touched
            timers.handle.touched.clear()
        super()._settle(new)
