"""All columns of an aggregation together: from the rows of a batch to the states of its keys."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pyarrow as pa

from etl.accumulator import CustomColumn, ExpressionAccumulator
from etl.keyed import Aggregate, AggregateColumn
from etl.operators.calling import evaluating
from etl.operators.exact import frame_of
from etl.operators.keyed.accumulators import Accumulator, accumulator_for
from etl.operators.keyed.columns import Ids, StateColumn
from etl.operators.keyed.custom import ByExpressions, ByFunctions
from etl.operators.keyed.key_index import Numbered
from etl.schema import Schema
from etl.transformation import ANCHOR


class Reduction:
    """The accumulators of an aggregation.

    Args:
        transformation: The aggregation.
        input_schema: Columns of the batches.

    Attributes:
        columns: What is remembered of each key.
    """

    def __init__(self, transformation: Aggregate, input_schema: Schema) -> None:
        self._transformation = transformation
        self._accumulators = [
            _accumulator_for(column, transformation) for column in transformation.columns(input_schema)
        ]
        self.columns: dict[str, StateColumn] = {
            f"{one.name}.{part}": column for one in self._accumulators for part, column in one.columns.items()
        }

    def inputs(self, batch: pa.RecordBatch) -> pl.DataFrame:
        """What is aggregated, a value for every row: also where an expression is the same for all rows."""
        expressions = [
            expression.alias(_input(number, name))
            for number, one in enumerate(self._accumulators)
            for name, (expression, _) in one.inputs.items()
        ]
        frame = frame_of(batch)
        with evaluating(self._transformation):
            return frame.select(pl.first().alias(ANCHOR), *expressions).drop(ANCHOR)

    def reduce(self, keys: pl.DataFrame, inputs: pl.DataFrame, *others: pl.Expr) -> pl.DataFrame:
        """One row a key, in the order in which they come first: the key, partial results, and the others.

        Args:
            keys: The key of each row.
            inputs: In the order of the keys, rows of what :meth:`inputs` has yielded.
            others: Further expressions over the rows of a key.
        """
        partials = [
            partial.alias(_partial(number, part))
            for number, one in enumerate(self._accumulators)
            for part, partial in one.partials({name: inputs[_input(number, name)] for name in one.inputs}).items()
        ]
        frame = keys.with_columns(inputs.get_columns())
        with evaluating(self._transformation):
            return frame.group_by(keys.columns, maintain_order=True).agg(*partials, *others)

    def merge(self, keys: Numbered, reduced: pl.DataFrame) -> None:
        """Take in what :meth:`reduce` has yielded for these keys."""
        for number, one in enumerate(self._accumulators):
            one.take_in(keys, {part: reduced[_partial(number, part)] for part in one.partial_names})

    def absorb(self, into: Ids, earlier: Ids) -> None:
        """See :meth:`etl.operators.keyed.accumulators.Accumulator.absorb`."""
        for one in self._accumulators:
            one.absorb(into, earlier)

    def results(self, ids: Ids) -> Sequence[pa.Array]:
        """The columns of the results of keys."""
        return [one.result(ids) for one in self._accumulators]


def _accumulator_for(column: AggregateColumn | CustomColumn, transformation: Aggregate) -> Accumulator:
    if isinstance(column, AggregateColumn):
        return accumulator_for(column)
    if isinstance(column.accumulator, ExpressionAccumulator):
        return ByExpressions(column, transformation)
    return ByFunctions(column, transformation)


def _input(number: int, name: str) -> str:
    return f"input_{number}_{name}"


def _partial(number: int, part: str) -> str:
    return f"partial_{number}_{part}"
