"""What a state of the model consists of. All of it is immutable and can be hashed.

The input is rows 0, 1, 2, …; a *unit* is what one sink stages for one checkpoint, a range of rows. Whatever a server
does atomically is one change of the state, so a transaction that is open, and nothing more, is only a lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from etl.sink import Delivery

STORE, OTHER = 0, 1
"""The databases: the store, and one that is not."""


@dataclass(frozen=True, slots=True)
class SinkModel:
    """A sink: how it delivers, and into which database."""

    delivery: Delivery
    database: int = STORE

    @property
    def early(self) -> bool:
        """Whether rows show before their checkpoint has completed."""
        return self.delivery is Delivery.IDEMPOTENT

    @property
    def committed(self) -> bool:
        """Whether rows become visible by a commit after their checkpoint."""
        return self.delivery in {Delivery.TWO_PHASE, Delivery.WRITE_AHEAD}


KINDS: Mapping[str, tuple[SinkModel, ...]] = {
    "transactional": (SinkModel(Delivery.TRANSACTIONAL),),
    "two-phase": (SinkModel(Delivery.TWO_PHASE),),
    "write-ahead": (SinkModel(Delivery.WRITE_AHEAD),),
    "upsert": (SinkModel(Delivery.IDEMPOTENT),),
    "united": (SinkModel(Delivery.TWO_PHASE, OTHER), SinkModel(Delivery.WRITE_AHEAD)),
}
"""The jobs, by the names they have in ``tests.faults.jobs``."""


class Unit(NamedTuple):
    """Rows ``first`` to ``end`` (exclusive), staged by one sink for one checkpoint in one epoch."""

    sink: int
    epoch: int
    checkpoint: int
    first: int
    end: int


class Head(NamedTuple):
    """The head row and what was recorded with it.

    ``before`` is where the checkpoint before the last one ended, for invariants alone.
    """

    epoch: int
    checkpoint: int
    position: int
    before: int
    units: tuple[Unit, ...]


class Writing(IntEnum):
    """What a sink's thread is doing."""

    IDLE = 0
    OPEN = 1
    STAGED = 2


class Run(NamedTuple):
    """One attempt of one process.

    ``step`` is what its coordinator does next, ``part`` and ``todo`` how far it is within that. ``position`` and
    ``checkpoint`` are of the last checkpoint that it has completed or restored, ``end`` is where the next one ends.
    """

    number: int
    step: str
    epoch: int
    checkpoint: int
    position: int
    end: int
    restored: tuple[Unit, ...]
    part: int
    todo: tuple[Unit, ...]
    writers: tuple[Writing, ...]


class World(NamedTuple):
    """One state. ``ledger`` holds (sink, epoch, checkpoint), ``targets`` what :func:`empty_target` says, by sink."""

    head: Head
    fences: tuple[int, ...]
    prepared: frozenset[Unit]
    log: frozenset[Unit]
    ledger: frozenset[tuple[int, int, int]]
    targets: tuple[tuple[int, ...], ...]
    runs: tuple[Run, ...]
    started: int
    meddled: int
    """How often somebody has rolled a prepared transaction back by hand."""


def beginning(sinks: tuple[SinkModel, ...], rows: int) -> World:
    """Nothing has run yet."""
    nothing: frozenset[Unit] = frozenset()
    targets = tuple(empty_target(sink, rows) for sink in sinks)
    return World(Head(0, 0, 0, 0, ()), (0, 0), nothing, nothing, frozenset(), targets, (), 0, 0)


KEYS = 2
"""Upserted rows have one of so many keys, in turn."""


def empty_target(sink: SinkModel, rows: int) -> tuple[int, ...]:
    """What a target holds at first: how often it has each row; of upserted rows the last one (from 1) by key."""
    return (0,) * (KEYS if sink.early else rows)


def written(sink: SinkModel, target: tuple[int, ...], first: int, end: int) -> tuple[int, ...]:
    """The target after rows were written to it."""
    if not sink.early:
        return tuple(count + (first <= row < end) for row, count in enumerate(target))
    latest = list(target)
    for row in range(first, end):
        latest[row % KEYS] = row + 1
    return tuple(latest)
