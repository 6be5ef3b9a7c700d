"""Contract of an operator: batches in, batches out, in one thread, in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class SideOutput:
    """Rows that leave an operator beside its results.

    Attributes:
        tag: Which of its side outputs, e.g. :data:`LATE`.
        batch: With the columns of that side output.
    """

    tag: str
    batch: pa.RecordBatch


LATE = "late"
"""Side output of rows that came after what they belong to was closed."""

LATE_RIGHT = "late_right"
"""The same of the second input of a join."""

Output: TypeAlias = pa.RecordBatch | SideOutput


class Operator(ABC):
    """One subtask's instance of a transformation; lives for one attempt.

    The runtime calls :meth:`process` and :meth:`flush` from a single thread. An operator without state (see
    :mod:`etl.state`) keeps no rows back between calls: when a barrier passes, everything it was given has been emitted.
    """

    @abstractmethod
    def process(self, batch: pa.RecordBatch) -> Iterable[Output]:
        """Transform one batch.

        Args:
            batch: Columns of the input schema, in order.

        Returns:
            Any number of batches with the columns of the output schema, in order; empty ones are dropped. Beside
            them, rows for side outputs.

        Raises:
            RecordError: A record cannot be carried exactly.
        """

    def entry(self, number: int) -> Callable[[pa.RecordBatch], Iterable[Output]]:
        """What takes the batches of an input, numbered as declared; :meth:`process`, unless inputs differ."""
        return self.process

    def advance(self, watermark: int) -> Iterable[Output]:
        """Event time has come to a watermark, see :mod:`etl.event_time`; it only grows.

        Called between batches, after all rows that came before the watermark. What is emitted here goes out before
        the watermark does, so it is not late for whoever comes next.
        """
        return ()

    def passed_on(self, watermark: int) -> int:
        """Which watermark goes on when one has come: held back where later results may have happened before it.

        Called after :meth:`advance`. :data:`etl.event_time.FOREVER` is never held back.
        """
        return watermark

    @property
    def due(self) -> int | None:
        """The earliest moment, in microseconds since 1970, at which :meth:`tick` has something to do; None: never."""
        return None

    def tick(self, now: int) -> Iterable[Output]:
        """The clock has come to ``now``; called between batches, soon after :attr:`due`."""
        return ()

    def flush(self) -> Iterable[Output]:
        """What goes out before a barrier that has come; called for each one, before the state is cut."""
        return ()

    def close(self) -> None:
        """Release what the operator holds; called exactly once, also after errors."""
