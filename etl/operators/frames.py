"""Python functions over polars frames."""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl
import pyarrow as pa

from etl.errors import RecordError
from etl.operator import Operator
from etl.operators.calling import guarded, name_of
from etl.operators.exact import batch_of_frame, frame_of, placed
from etl.schema import Schema
from etl.transformation import FrameFunction, Transformation


class MapBatchesOperator(Operator):
    """A frame for each batch."""

    def __init__(self, transformation: Transformation, function: FrameFunction, schema: Schema) -> None:
        self._transformation = transformation
        self._function = guarded(transformation, function)
        self._name = name_of(function)
        self._schema = schema

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """What the function returned, in the declared types."""
        with placed(self._transformation):
            frame = frame_of(batch)
            returned: object = self._function(frame)
            if not isinstance(returned, pl.DataFrame):
                shown = type(returned).__name__
                raise RecordError(f"{self._name} returned {shown}, not a polars.DataFrame")
            return (batch_of_frame(returned, self._schema),)
