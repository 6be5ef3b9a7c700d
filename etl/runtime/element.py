"""What flows between subtasks, in order: batches, barriers, cuts of state, and the end of the input."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from etl.state import StateCut


@dataclass(frozen=True, slots=True)
class Barrier:
    """Everything before it belongs to this checkpoint, everything after it to a later one."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """Nothing follows on this channel."""


@dataclass(frozen=True, slots=True)
class CutTaken:
    """The state of a subtask at a barrier, on its way to be encoded; flows to the snapshot subtask only."""

    subtask: str
    checkpoint_id: int
    cut: StateCut


Element = pa.RecordBatch | Barrier | CutTaken | EndOfInput
