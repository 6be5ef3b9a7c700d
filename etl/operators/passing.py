"""Nothing is done to the rows where the runtime does it all: it merges channels, or deals batches out to them."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from etl.operator import Operator


class PassingOperator(Operator):
    """Hands on what it is given."""

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """The batch itself."""
        return (batch,)
