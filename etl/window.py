"""Windows: spans of event time in which rows are put together, each from its start on and before its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from etl.clock import SPAN_MAX
from etl.errors import Finding

WINDOWS_OF_A_ROW_MAX = 1_000

_ZERO = timedelta(0)
_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Tumbling:
    """Windows one after the other; each row is in exactly one.

    Attributes:
        size: From start to end.
        offset: Windows start at multiples of the size after 1970-01-01 00:00 (a Thursday) and this offset.
    """

    size: timedelta
    offset: timedelta = _ZERO

    def findings(self, subject: str) -> Iterable[Finding]:
        """What is wrong with it."""
        yield from _span_findings(subject, size=self.size)
        yield from _offset_findings(subject, self.offset)

    def is_of_days(self) -> bool:
        """Whether its windows start and end at midnight."""
        return _are_days(self.size, self.offset)

    def __str__(self) -> str:
        return f"tumbling windows of {self.size}{_shown_offset(self.offset)}"


@dataclass(frozen=True, slots=True)
class Sliding:
    """Windows that overlap; each row is in all those that contain it.

    Attributes:
        size: From start to end.
        every: From the start of one window to that of the next.
        offset: Windows start at multiples of ``every`` after 1970-01-01 00:00 (a Thursday) and this offset.
    """

    size: timedelta
    every: timedelta
    offset: timedelta = _ZERO

    def findings(self, subject: str) -> Iterable[Finding]:
        """What is wrong with it."""
        wrong = [*_span_findings(subject, size=self.size, every=self.every), *_offset_findings(subject, self.offset)]
        yield from wrong
        if wrong:
            return
        if self.every > self.size:
            problem = f"windows of {self.size} every {self.every} leave rows out between them"
            yield Finding(subject, problem, "choose every=… of at most the size")
        elif -(-self.size // self.every) > WINDOWS_OF_A_ROW_MAX:
            problem = f"a row would be in {-(-self.size // self.every)} windows, more than {WINDOWS_OF_A_ROW_MAX}"
            yield Finding(subject, problem, "choose a longer every=…")

    def is_of_days(self) -> bool:
        """Whether its windows start and end at midnight."""
        return _are_days(self.size, self.every, self.offset)

    def __str__(self) -> str:
        return f"sliding windows of {self.size} every {self.every}{_shown_offset(self.offset)}"


@dataclass(frozen=True, slots=True)
class Session:
    """Windows of activity: a row belongs to the session of another one if less than the gap lies between them.

    A session starts with its first row and ends the gap after its last one.

    Attributes:
        gap: Two rows with this distance, and none between them, are in different sessions.
    """

    gap: timedelta

    def findings(self, subject: str) -> Iterable[Finding]:
        """What is wrong with it."""
        yield from _span_findings(subject, gap=self.gap)

    def is_of_days(self) -> bool:
        """Whether its windows start and end at midnight where all rows do."""
        return _are_days(self.gap)

    def __str__(self) -> str:
        return f"sessions with a gap of {self.gap}"


Window: TypeAlias = Tumbling | Sliding | Session


def lateness_findings(subject: str, lateness: object) -> Iterable[Finding]:
    """What is wrong with how much later than its end a window still takes rows."""
    if not isinstance(lateness, timedelta) or not _ZERO <= lateness <= SPAN_MAX:
        problem = f"lateness={lateness!r} is no timedelta from 0 to {SPAN_MAX.days} days"
        yield Finding(subject, problem, "e.g. timedelta(minutes=10)")


def _span_findings(subject: str, **spans: object) -> Iterable[Finding]:
    for name, span in spans.items():
        if not isinstance(span, timedelta) or not _ZERO < span <= SPAN_MAX:
            problem = f"{name}={span!r} is no timedelta above 0 and up to {SPAN_MAX.days} days"
            yield Finding(subject, problem, "e.g. timedelta(hours=1)")


def _offset_findings(subject: str, offset: object) -> Iterable[Finding]:
    if not isinstance(offset, timedelta) or abs(offset) > SPAN_MAX:
        problem = f"offset={offset!r} is no timedelta of at most {SPAN_MAX.days} days"
        yield Finding(subject, problem, "e.g. timedelta(hours=6)")


def _are_days(*spans: timedelta) -> bool:
    return all(span % _DAY == _ZERO for span in spans)


def _shown_offset(offset: timedelta) -> str:
    return f" offset by {offset}" if offset else ""
