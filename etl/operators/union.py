"""Several streams as one: the channels are merged by the runtime, so the rows only pass."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from etl.operator import Operator


class UnionOperator(Operator):
    """Hands on what it is given; all inputs have the same columns."""

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """The batch itself."""
        return (batch,)
