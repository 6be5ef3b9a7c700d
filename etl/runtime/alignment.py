"""Barrier alignment of a subtask with several inputs: pure decisions, no waiting.

In exactly-once mode a channel whose barrier has come is blocked until all have: what follows the barrier on it
belongs to the next checkpoint. In at-least-once mode nothing is blocked, so rows behind a barrier may enter the
checkpoint before it, and come again after a restart. A channel that has ended counts as aligned for ever.
"""

from __future__ import annotations

from etl.errors import InternalError
from etl.runtime.element import Barrier
from etl.sink import CheckpointMode


class Aligner:
    """Tracks barriers of one subtask.

    Args:
        inputs: Number of input channels.
        mode: Whether channels are blocked while others lag behind.
    """

    def __init__(self, inputs: int, mode: CheckpointMode) -> None:
        self._blocks = mode is not CheckpointMode.AT_LEAST_ONCE
        self._arrived: set[int] = set()
        self._ended: set[int] = set()
        self._inputs = inputs
        self._checkpoint_id: int | None = None

    @property
    def blocked(self) -> frozenset[int]:
        """Channels not to be read now."""
        return frozenset(self._arrived) if self._blocks else frozenset()

    @property
    def ended(self) -> bool:
        """Whether every input has ended."""
        return len(self._ended) == self._inputs

    def barrier(self, index: int, barrier: Barrier) -> Barrier | None:
        """Note a barrier on a channel; returns it when it has now arrived on all of them."""
        if self._checkpoint_id is None:
            self._checkpoint_id = barrier.checkpoint_id
        if barrier.checkpoint_id != self._checkpoint_id or index in self._arrived:
            raise InternalError(f"barrier {barrier.checkpoint_id} came while {self._checkpoint_id} was being aligned")
        self._arrived.add(index)
        return self._complete()

    def end(self, index: int) -> Barrier | None:
        """Note the end of a channel; returns the barrier that was waiting only for it."""
        self._ended.add(index)
        return self._complete()

    def _complete(self) -> Barrier | None:
        if self._checkpoint_id is None or len(self._arrived | self._ended) < self._inputs:
            return None
        barrier = Barrier(self._checkpoint_id)
        self._arrived.clear()
        self._checkpoint_id = None
        return barrier
