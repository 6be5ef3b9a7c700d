"""From a declared transformation to the operator that carries it out."""

from __future__ import annotations

import polars as pl

from etl.errors import InternalError
from etl.operator import Operator
from etl.operators.frames import MapBatchesOperator
from etl.operators.projection import FilterOperator, ProjectionOperator
from etl.operators.rows import FilterRowsOperator, FlatMapOperator, MapOperator
from etl.operators.union import UnionOperator
from etl.schema import Schema
from etl.transformation import Filter, FlatMap, Map, MapBatches, Select, Transformation, Union, WithColumns


def operator_for(transformation: Transformation, input_schema: Schema, output_schema: Schema) -> Operator:
    """A new operator for one subtask and one attempt.

    Args:
        transformation: What was declared.
        input_schema: Columns of the batches it will be given.
        output_schema: Columns it must yield, as found by the transformation's ``output_schema``.

    Raises:
        InternalError: No operator is known for this kind of transformation.
    """
    match transformation:
        case Filter(predicate=predicate):
            if isinstance(predicate, pl.Expr):
                return FilterOperator(transformation, predicate)
            return FilterRowsOperator(transformation, predicate)
        case Select(expressions=columns) | WithColumns(columns=columns):
            return ProjectionOperator(transformation, columns, input_schema, output_schema)
        case Map(function=function):
            return MapOperator(transformation, function, output_schema)
        case FlatMap(function=function):
            return FlatMapOperator(transformation, function, output_schema)
        case MapBatches(function=function):
            return MapBatchesOperator(transformation, function, output_schema)
        case Union():
            return UnionOperator()
    raise InternalError(f"no operator is known for {transformation}")
