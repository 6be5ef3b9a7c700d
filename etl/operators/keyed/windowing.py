"""From moments to windows: a column of event time, and which windows its rows are in."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import numpy as np
import pyarrow as pa

from etl.errors import RecordError
from etl.event_time import in_microseconds, microseconds_of
from etl.operators.keyed.columns import Ids
from etl.operators.keyed.time_queue import Moments
from etl.schema import Field
from etl.window import Session, Tumbling, Window

_YEARS_MAX = 100_000
_MOMENT_MAX = _YEARS_MAX * 366 * 86_400_000_000
_DAY_US = 86_400_000_000


class TimeColumn:
    """The column of event time, in microseconds since 1970.

    Args:
        field: Name and type.

    Attributes:
        kept: In what Arrow type moments are part of the state.
    """

    def __init__(self, field: Field) -> None:
        self._field = field
        self._is_date = pa.types.is_date(field.type.arrow)
        self.kept: pa.DataType = pa.timestamp("us") if self._is_date else field.type.arrow

    def moments(self, batch: pa.RecordBatch) -> Moments:
        """When each row of a batch happened.

        Raises:
            RecordError: It is not known of a row, or too far away.
        """
        column, name = batch.column(self._field.name), self._field.name
        if column.null_count:
            cure = f'drop such rows before with filter(pl.col("{name}").is_not_null())'
            raise RecordError(f'column "{name}" is NULL, and a row without a time is in no window; {cure}')
        raw = column.cast(pa.int32()).cast(pa.int64()) if self._is_date else column.cast(pa.int64())
        furthest = int(np.abs(np.asarray(raw).clip(-_MOMENT_MAX - 1, _MOMENT_MAX + 1)).max(initial=0))
        if furthest * (_DAY_US if self._is_date else 1) > _MOMENT_MAX:
            problem = f"has infinity or a year beyond {_YEARS_MAX}, which is in no window"
            raise RecordError(f'column "{name}" {problem}; drop such rows before with filter(…)')
        return cast(Moments, np.asarray(microseconds_of(column)))

    def kept_array(self, moments: Moments) -> pa.Array:
        """Moments as they are part of the state."""
        return pa.array(moments, pa.int64()).cast(self.kept)

    def shown_array(self, moments: Moments) -> pa.Array:
        """Moments in the column's type."""
        return self.kept_array(moments).cast(self._field.type.arrow)


class Assigner:
    """Puts rows into windows of a fixed size; those of sessions are as long as the gap, and joined later.

    Attributes:
        size: Of a window, or the gap between sessions, in microseconds.
        windows: In how many a row is, at most.
    """

    def __init__(self, window: Window) -> None:
        size, every, offset = _spans(window)
        self.size, self._every, self._offset = map(in_microseconds, (size, every, offset))
        self.windows = -(-self.size // self._every)
        self._is_session = isinstance(window, Session)

    def assign(self, moments: Moments) -> tuple[Ids, Moments]:
        """For each row and each of its windows the number of the row and the start of the window, row after row."""
        rows = np.arange(len(moments))
        last = (moments - self._offset) // self._every * self._every + self._offset
        if self.windows == 1:
            return rows, last
        starts = last[:, None] - np.arange(self.windows - 1, -1, -1) * self._every
        inside = starts + self.size > moments[:, None]
        return np.broadcast_to(rows[:, None], starts.shape)[inside], starts[inside]

    def ends(self, moments: Moments, starts: Moments) -> Moments:
        """When windows that start there end, if there is no other row than the one of this moment in them."""
        return (moments if self._is_session else starts) + self.size


def _spans(window: Window) -> tuple[timedelta, timedelta, timedelta]:
    match window:
        case Tumbling(size=size, offset=offset):
            return size, size, offset
        case Session(gap=gap):
            return gap, gap, timedelta(0)
        case _:
            return window.size, window.every, window.offset
