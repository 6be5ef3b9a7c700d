"""Polars expressions over batches. Columns that are only taken over never leave Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import polars as pl
import pyarrow as pa

from etl.operator import Operator
from etl.operators.calling import evaluating, guarded
from etl.operators.exact import array_of_series, array_of_values, frame_of, placed, rows_of
from etl.schema import Schema
from etl.transformation import ANCHOR, RowColumn, Transformation, empty_frame, renamed_column


class FilterOperator(Operator):
    """Keeps the rows for which an expression is true."""

    def __init__(self, transformation: Transformation, predicate: pl.Expr) -> None:
        self._transformation = transformation
        self._predicate = predicate.alias(ANCHOR + "_kept")

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """The rows whose predicate is true, in order."""
        with placed(self._transformation):
            frame = frame_of(batch)
            with evaluating(self._transformation):
                judged = frame.select(pl.first().alias(ANCHOR), self._predicate)
        mask = judged.to_series(1).to_arrow()
        return (batch if mask.true_count == len(batch) else batch.filter(mask),)


class ProjectionOperator(Operator):
    """Computes columns from the input row; those it does not compute are taken over from the input."""

    def __init__(
        self,
        transformation: Transformation,
        columns: Sequence[pl.Expr | RowColumn],
        input_schema: Schema,
        output_schema: Schema,
    ) -> None:
        self._transformation = transformation
        self._schema = output_schema
        self._arrow = output_schema.to_arrow()
        self._functions = {
            column.name: guarded(transformation, column.function) for column in columns if isinstance(column, RowColumn)
        }
        self._computed: list[pl.Expr] = []
        self._taken_over: dict[str, str] = {}
        for column in columns:
            if not isinstance(column, RowColumn):
                self._plan(column, input_schema)

    def _plan(self, expression: pl.Expr, input_schema: Schema) -> None:
        for single in _singles(expression, input_schema):
            renamed = renamed_column(single)
            if renamed is not None and input_schema[renamed[0]] == self._schema[renamed[1]]:
                self._taken_over[renamed[1]] = renamed[0]
            else:
                self._computed.append(single)

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """A batch of the same number of rows."""
        with placed(self._transformation):
            arrays = self._evaluate(batch) if self._computed else {}
            arrays |= self._call(batch) if self._functions else {}
        columns = [
            arrays[name] if name in arrays else batch.column(self._taken_over.get(name, name))
            for name in self._schema.names
        ]
        return (pa.RecordBatch.from_arrays(columns, schema=self._arrow),)

    def _evaluate(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        frame = frame_of(batch)
        with evaluating(self._transformation):
            yielded = frame.select(pl.first().alias(ANCHOR), *self._computed).drop(ANCHOR)
        return {series.name: array_of_series(series, self._schema[series.name]) for series in yielded.iter_columns()}

    def _call(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        arrays: dict[str, pa.Array] = {}
        for name, function in self._functions.items():
            # each function gets rows of its own: what one does to them must not reach the next
            values = [function(row) for row in rows_of(batch)]
            arrays[name] = array_of_values(name, values, self._schema[name])
        return arrays


def _singles(expression: pl.Expr, schema: Schema) -> list[pl.Expr]:
    """A selection of several columns as one expression for each; anything else as it is."""
    if not expression.meta.is_column_selection():
        return [expression]
    return [pl.col(name) for name in empty_frame(schema).select(expression).columns]
