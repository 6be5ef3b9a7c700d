"""What flows between subtasks, in order: batches, barriers, and the end of the input."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Barrier:
    """Everything before it belongs to this checkpoint, everything after it to a later one."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """Nothing follows on this channel."""


Element = pa.RecordBatch | Barrier | EndOfInput
