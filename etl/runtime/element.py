"""What flows between subtasks, in order: batches, watermarks, barriers, cuts of state, and the end of the input."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from etl.state import StateCut


@dataclass(frozen=True, slots=True)
class Barrier:
    """Everything before it belongs to this checkpoint, everything after it to a later one."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class Watermark:
    """How far event time has come on a channel, see :mod:`etl.event_time`.

    Attributes:
        time: In microseconds; never less than before. None as long as nothing is known.
        idle: Nothing comes for now: others need not wait for this channel. It ends with the next watermark.
    """

    time: int | None
    idle: bool = False


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """Nothing follows on this channel."""


@dataclass(frozen=True, slots=True)
class CutTaken:
    """The state of a subtask at a barrier, on its way to be encoded; flows to the snapshot subtask only."""

    subtask: str
    checkpoint_id: int
    cut: StateCut


Element = pa.RecordBatch | Watermark | Barrier | CutTaken | EndOfInput
