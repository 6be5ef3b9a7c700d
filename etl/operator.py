"""Contract of an operator: batches in, batches out, in one thread, in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import pyarrow as pa


class Operator(ABC):
    """One subtask's instance of a transformation; lives for one attempt.

    The runtime calls :meth:`process` and :meth:`flush` from a single thread. An operator without state (see
    :mod:`etl.state`) keeps no rows back between calls: when a barrier passes, everything it was given has been emitted.
    """

    @abstractmethod
    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Transform one batch.

        Args:
            batch: Columns of the input schema, in order.

        Returns:
            Any number of batches with the columns of the output schema, in order; empty ones are dropped.

        Raises:
            RecordError: A record cannot be carried exactly.
        """

    def flush(self) -> Iterable[pa.RecordBatch]:
        """What goes out before a barrier that has come; called for each one, before the state is cut."""
        return ()

    def close(self) -> None:
        """Release what the operator holds; called exactly once, also after errors."""
