"""Python functions over rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from etl.errors import RecordError
from etl.operator import Operator
from etl.operators.calling import guarded, guarded_items, name_of
from etl.operators.exact import RowShape, batch_of_values, placed, rows_of
from etl.schema import Schema
from etl.transformation import Row, RowFunction, RowPredicate, RowsFunction, Transformation

ROWS_MAX = 16_384
"""Most rows in a batch that a flat_map emits; a function that multiplies rows must not multiply memory."""


class FilterRowsOperator(Operator):
    """Keeps the rows for which a function returns True."""

    def __init__(self, transformation: Transformation, predicate: RowPredicate) -> None:
        self._transformation = transformation
        self._predicate = guarded(transformation, predicate)
        self._name = name_of(predicate)

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """The rows whose predicate is true, in order; None counts as false, as NULL does."""
        with placed(self._transformation):
            kept = [self._judge(row) for row in rows_of(batch)]
        return (batch if all(kept) else batch.filter(pa.array(kept, pa.bool_())),)

    def _judge(self, row: Row) -> bool:
        verdict: object = self._predicate(row)
        if verdict is True or verdict is False:
            return verdict
        if verdict is None:
            return False
        raise RecordError(f"{self._name} returned {verdict!r}, not a bool")


class MapOperator(Operator):
    """One row for each row."""

    def __init__(self, transformation: Transformation, function: RowFunction, schema: Schema) -> None:
        self._transformation = transformation
        self._function = guarded(transformation, function)
        self._schema = schema
        self._shape = RowShape(schema)

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """A batch of the same number of rows."""
        with placed(self._transformation):
            values = [value for row in rows_of(batch) for value in self._shape.values(self._function(row))]
            return (batch_of_values(values, self._schema),)


class FlatMapOperator(Operator):
    """Any number of rows for each row, in batches of bounded size."""

    def __init__(self, transformation: Transformation, function: RowsFunction, schema: Schema) -> None:
        self._transformation = transformation
        self._function = guarded_items(transformation, function)
        self._schema = schema
        self._shape = RowShape(schema)
        self._values_max = ROWS_MAX * len(schema)

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Batches of at most :data:`ROWS_MAX` rows."""
        with placed(self._transformation):
            found: list[Any] = []
            for row in rows_of(batch):
                for returned in self._function(row):
                    # the values are taken at once: a generator may yield one dict again and again
                    found.extend(self._shape.values(returned))
                    if len(found) == self._values_max:
                        yield batch_of_values(found, self._schema)
                        found = []
            yield batch_of_values(found, self._schema)
