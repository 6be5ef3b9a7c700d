"""Event time: when things happened, as the rows themselves say it, and how far it has come.

A **watermark** is a moment that travels between the rows: everything that happened before it has come, as far as the
source promises. Operators close windows and fire timers when it passes them. Moments are whole microseconds since
1970 (UTC for ``timestamptz``; as written for ``timestamp``; midnight for ``date``), plain integers everywhere in the
engine.

::

    rows of a split ──► latest event time − out_of_orderness ──► minimum over splits ──► minimum over inputs
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pyarrow as pa

from etl.clock import SPAN_MAX
from etl.errors import Finding
from etl.lazy import LazyModule
from etl.schema import PostgresType, Schema

if TYPE_CHECKING:
    import pyarrow.compute as pc
else:
    pc = LazyModule("pyarrow.compute")

FOREVER = (1 << 63) - 1
"""A watermark that closes everything: whatever is still open is closed on purpose."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_DAY = 86_400_000_000
_DAYS_MAX = FOREVER // _DAY


@dataclass(frozen=True, slots=True)
class EventTime:
    """Which column of a source says when a row happened, and what the source promises of it.

    Attributes:
        column: Of type ``timestamptz``, ``timestamp`` or ``date``. A row in which it is NULL moves no watermark.
        out_of_orderness: A row may come so much later than one that happened after it, within a split, and is not late.
        idle_after: A source that has had nothing to read for so long, by the clock, is not waited for by others. None:
            it is waited for, over all runs.
        future_skew: Rows further in the future than that, by the clock, move no watermark: one row with a wrong year
            would make all others late. None: no bound.
        every: Watermarks are multiples of this. Rows that keep the promise do not notice.
        in_sequence: Splits follow one another in time, like the log files of one day after the other. Else each split
            is a stream of its own, and what waits to be read holds the watermark back.
    """

    column: str
    out_of_orderness: timedelta = timedelta(0)
    idle_after: timedelta | None = None
    future_skew: timedelta | None = None
    every: timedelta = timedelta(seconds=1)
    in_sequence: bool = False

    def findings(self, subject: str, schema: Schema) -> Iterable[Finding]:
        """What is wrong with it for a source with these columns."""
        if self.column not in schema:
            yield Finding(subject, f"event time {self.column!r} is no column of it", f"choose from: {schema}")
        elif not is_event_time(schema[self.column]):
            problem = f'event time "{self.column}" is {schema[self.column]}, not a moment'
            yield Finding(subject, problem, "name a column of type timestamptz, timestamp or date")
        for name, least in (("out_of_orderness", 0), ("idle_after", 0), ("future_skew", 0), ("every", 1)):
            value = getattr(self, name)
            if value is None and name in ("idle_after", "future_skew"):
                continue
            if not isinstance(value, timedelta) or not least * _MICROSECOND <= value <= SPAN_MAX:
                at_least = "above 0" if least else "of at least 0"
                problem = f"{name}={value!r} is no timedelta {at_least} and up to {SPAN_MAX.days} days"
                yield Finding(subject, problem, "e.g. timedelta(minutes=5)")


def is_event_time(type_: PostgresType) -> bool:
    """Whether values of a type are moments."""
    return not type_.is_array and bool(pa.types.is_timestamp(type_.arrow) or pa.types.is_date(type_.arrow))


def in_microseconds(span: timedelta) -> int:
    """A span of time as an integer."""
    return span // _MICROSECOND


def microseconds_since_1970(moment: datetime) -> int:
    """An aware moment as an integer."""
    return in_microseconds(moment - _EPOCH)


def microseconds_of(moments: pa.Array) -> pa.Array:
    """Moments as 64-bit integers, NULL where there is none; an infinite date is the last day that they can hold.

    Args:
        moments: Of a type that :func:`is_event_time` accepts, as Arrow holds it.
    """
    if pa.types.is_date(moments.type):
        days = moments.cast(pa.int32()).cast(pa.int64())
        held = pc.max_element_wise(pc.min_element_wise(days, _DAYS_MAX, skip_nulls=False), -_DAYS_MAX, skip_nulls=False)
        return pc.multiply(held, pa.scalar(_DAY, pa.int64()))
    return moments.cast(pa.timestamp("us", moments.type.tz)).cast(pa.int64())
