"""What subtasks and the coordinator tell each other. They share nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from etl.sink import Committable
from etl.source import Position
from etl.state import StateChunk, StateSummary

# --- from subtasks to the coordinator -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PositionsSnapshotted:
    """A source subtask has come to its barrier: what moved since the last one, and how many records it read."""

    uid: str
    checkpoint_id: int
    positions: Mapping[str, Position]
    rows: int


@dataclass(frozen=True, slots=True)
class UnitStaged:
    """A sink has staged everything before a barrier."""

    uid: str
    checkpoint_id: int
    committable: Committable | None
    rows: int


@dataclass(frozen=True, slots=True)
class StateSnapshotted:
    """The state of an operator subtask at a barrier is encoded.

    Attributes:
        subtask: Which one.
        checkpoint_id: The barrier.
        uid: The operator.
        chunks: What has changed.
        summary: What else the checkpoint is to know of it.
    """

    subtask: str
    checkpoint_id: int
    uid: str
    chunks: Sequence[StateChunk]
    summary: StateSummary


@dataclass(frozen=True, slots=True)
class TimersFired:
    """By the clock an operator has emitted rows, or will at once: a checkpoint is due, though no source has moved."""

    uid: str


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """A source has read as many rows as may go into one checkpoint, and waits."""

    uid: str


@dataclass(frozen=True, slots=True)
class SourceDry:
    """A source has read everything that is there."""

    uid: str


@dataclass(frozen=True, slots=True)
class SubtaskEnded:
    """A subtask has passed the end of its input and released everything."""

    uid: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Something of this attempt cannot go on."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The user asks for a final checkpoint and the end."""


@dataclass(frozen=True, slots=True)
class SavepointRequested:
    """Somebody asks for a checkpoint that is kept; said again and again until it is there.

    Attributes:
        stop: Whether the run is to end with it.
    """

    stop: bool


Message = (
    PositionsSnapshotted
    | UnitStaged
    | StateSnapshotted
    | TimersFired
    | CheckpointRequested
    | SourceDry
    | SubtaskEnded
    | Failed
    | StopRequested
    | SavepointRequested
)

# --- from the coordinator to source subtasks ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Come to a batch border and snapshot positions.

    Attributes:
        checkpoint_id: The checkpoint.
        hold: Keep the barrier back until :class:`ReleaseBarrier` (at-most-once: the position is recorded first).
    """

    checkpoint_id: int
    hold: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseBarrier:
    """The held barrier may flow."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class StopReading:
    """Read nothing more; checkpoints still come."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Send the end of the input and end."""


Command = TakeSnapshot | ReleaseBarrier | StopReading | Finish


@dataclass(slots=True)
class SourceActivity:
    """Whether a source has anything that the last barrier did not cover.

    Written by its subtask, read by the coordinator.
    """

    moved: bool = field(default=False)
