"""From a declared transformation to the operator that carries it out."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from etl.clock import Clock, SystemClock
from etl.errors import InternalError
from etl.joins import AsOfJoin, IntervalJoin, LookupJoin
from etl.keyed import Aggregate, Deduplicate, Stateful
from etl.keyed_process import Process
from etl.lookup import Lookups
from etl.operator import Operator
from etl.operators.frames import MapBatchesOperator
from etl.operators.passing import PassingOperator
from etl.operators.projection import FilterOperator, ProjectionOperator
from etl.operators.rows import FilterRowsOperator, FlatMapOperator, MapOperator
from etl.schema import Schema
from etl.state import StatefulOperator
from etl.transformation import Filter, FlatMap, Map, MapBatches, Rebalance, Select, Transformation, Union, WithColumns
from etl.window import Session
from etl.windowed import WindowAggregate


def operator_for(
    transformation: Transformation,
    inputs: Sequence[Schema],
    output_schema: Schema,
    clock: Clock | None = None,
    lookups: Lookups | None = None,
) -> Operator:
    """A new operator for one subtask and one attempt.

    Args:
        transformation: What was declared.
        inputs: For each input the columns of the batches that come from there.
        output_schema: Columns it must yield, as found by the transformation's ``output_schema``.
        clock: Time, for what goes by it; the machine's when left out.
        lookups: Gives lookups what they need; None where no database can be asked.

    Raises:
        InternalError: No operator is known for this kind of transformation.
    """
    match transformation:
        case Filter(predicate=predicate):
            if isinstance(predicate, pl.Expr):
                return FilterOperator(transformation, predicate)
            return FilterRowsOperator(transformation, predicate)
        case Select(expressions=columns) | WithColumns(columns=columns):
            return ProjectionOperator(transformation, columns, inputs[0], output_schema)
        case Map(function=function):
            return MapOperator(transformation, function, output_schema)
        case FlatMap(function=function):
            return FlatMapOperator(transformation, function, output_schema)
        case MapBatches(function=function):
            return MapBatchesOperator(transformation, function, output_schema)
        case Union() | Rebalance():
            return PassingOperator()
        case LookupJoin():
            return _lookup_operator_for(transformation, inputs[0], output_schema, lookups)
        case Stateful():
            return _stateful_operator_for(transformation, inputs, output_schema, clock or SystemClock())
    raise InternalError(f"no operator is known for {transformation}")


def _lookup_operator_for(
    transformation: LookupJoin, schema: Schema, output_schema: Schema, lookups: Lookups | None
) -> Operator:
    if lookups is None:
        raise InternalError(f"{transformation}: there is no database here to ask")
    # Imported here: jobs without lookups do not wait for NumPy.
    from etl.operators.keyed.lookup_join import LookupJoinOperator

    context = lookups(transformation.uid, transformation.lookup.database)
    return LookupJoinOperator(transformation, schema, output_schema, context)


def _stateful_operator_for(
    transformation: Stateful, inputs: Sequence[Schema], output_schema: Schema, clock: Clock
) -> StatefulOperator:
    # Imported here: jobs without keyed state do not wait for NumPy.
    from etl.operators.keyed.aggregate import AggregateOperator
    from etl.operators.keyed.as_of_join import AsOfJoinOperator
    from etl.operators.keyed.deduplicate import DeduplicateOperator
    from etl.operators.keyed.deduplicate_within import DeduplicateWithinOperator
    from etl.operators.keyed.interval_join import IntervalJoinOperator
    from etl.operators.keyed.process import ProcessOperator
    from etl.operators.keyed.sessions import SessionOperator
    from etl.operators.keyed.timed_process import TimedProcessOperator
    from etl.operators.keyed.windows import WindowOperator

    match transformation:
        case WindowAggregate(window=Session()):
            return SessionOperator(transformation, inputs[0], output_schema)
        case WindowAggregate():
            return WindowOperator(transformation, inputs[0], output_schema)
        case Aggregate():
            return AggregateOperator(transformation, inputs[0], output_schema)
        case Process(goes_by_time=True):
            return TimedProcessOperator(transformation, inputs[0], output_schema, clock)
        case Process():
            return ProcessOperator(transformation, inputs[0], output_schema)
        case Deduplicate(ttl=None):
            return DeduplicateOperator(transformation, inputs[0])
        case Deduplicate():
            return DeduplicateWithinOperator(transformation, inputs[0], clock)
        case IntervalJoin():
            return IntervalJoinOperator(transformation, inputs, output_schema)
        case AsOfJoin():
            return AsOfJoinOperator(transformation, inputs, output_schema)
    raise InternalError(f"no operator is known for {transformation}")
