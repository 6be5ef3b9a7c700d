"""What a script consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from etl.transformation import Location

if TYPE_CHECKING:
    import polars as pl


class Mark:
    """One thing that happens in a script."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Rows(Mark):
    """See :func:`rows`."""

    source: str
    given: tuple[object, ...]
    missing_null: bool
    location: Location

    def __str__(self) -> str:
        return f'rows("{self.source}") at {self.location}'


@dataclass(frozen=True, slots=True)
class Checkpoint(Mark):
    """See :func:`checkpoint`."""

    def __str__(self) -> str:
        return "checkpoint()"


@dataclass(frozen=True, slots=True)
class Crash(Mark):
    """See :func:`crash`."""

    def __str__(self) -> str:
        return "crash()"


@dataclass(frozen=True, slots=True)
class Rescale(Mark):
    """See :func:`rescale`."""

    parallelism: int
    location: Location

    def __str__(self) -> str:
        return f"rescale({self.parallelism})"


@dataclass(frozen=True, slots=True)
class Advance(Mark):
    """See :func:`advance`."""

    moment: datetime | date
    source: str | None
    location: Location

    def __str__(self) -> str:
        return f"advance({self.moment!r})" if self.source is None else f'advance({self.moment!r}, "{self.source}")'


@dataclass(frozen=True, slots=True)
class Wait(Mark):
    """See :func:`wait`."""

    span: timedelta
    location: Location

    def __str__(self) -> str:
        return f"wait({self.span!r})"


@dataclass(frozen=True, slots=True)
class Drain(Mark):
    """See :func:`drain`."""

    def __str__(self) -> str:
        return "drain()"


def rows(
    source: str, *given: Mapping[str, Any] | pl.DataFrame | pa.Table | pa.RecordBatch, missing_null: bool = False
) -> Rows:
    """The source reads these rows, as one batch. Without any: it has nothing to read.

    Args:
        source: Uid of the source.
        given: Rows as dicts of exact Python values, those that functions get; or one polars or Arrow table.
        missing_null: Whether columns that a dict does not have are NULL; else they are a mistake.
    """
    return Rows(source, given, missing_null, Location.of_caller())


def checkpoint() -> Checkpoint:
    """A checkpoint is taken and completed: what was read before is done, and its output is visible."""
    return Checkpoint()


def crash() -> Crash:
    """The run dies and is started again.

    Everything since the last checkpoint is lost, state comes back from its stored bytes, and what was read since is
    read once more.
    """
    return Crash()


def rescale(parallelism: int) -> Rescale:
    """Like :func:`crash`, but the run that follows has another parallelism."""
    return Rescale(parallelism, Location.of_caller())


def advance(moment: datetime | date, source: str | None = None) -> Advance:
    """Event time comes to a moment although no row says so: what ended before is closed.

    Rows move event time by themselves, as their source declares it; this is for the time after the last one.

    Args:
        moment: A value of the type that the event time's column has.
        source: Uid of the source for which it comes; all those with event time when left out.
    """
    return Advance(moment, source, Location.of_caller())


def wait(span: timedelta) -> Wait:
    """Nothing is read for so long, by the clock: timers of the clock fire, and what is old by it is forgotten.

    The clock goes on by nothing else, and a crash does not turn it back.
    """
    return Wait(span, Location.of_caller())


def drain() -> Drain:
    """Everything that is still open in event time is closed, as by ``etl run --drain``; what follows is another run."""
    return Drain()
