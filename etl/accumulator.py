"""Aggregates of one's own: what is remembered of the rows of a key, and how two such memories become one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from etl.errors import ConfigurationError, Finding
from etl.lazy import LazyModule
from etl.schema import Field, PostgresType, Schema, name_findings
from etl.transformation import (
    ANCHOR,
    Transformation,
    empty_frame,
    evaluate_empty,
    inherited_types,
    require_row_wise,
    typed_schema,
)

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")


class Accumulator(ABC):
    """An aggregate in Python: derive from it, and give an instance to ``aggregate``.

    ::

        class Longest(Accumulator):
            state_type = "text"
            result_type = "int4"

            def zero(self):
                return ""

            def add(self, state, value):
                return value if value is not None and len(value) > len(state) else state

            def merge(self, earlier, later):
                return self.add(earlier, later)

            def result(self, state):
                return len(state)

        names.key_by("country").aggregate("longest", characters=Longest(pl.col("name")))

    The methods must depend on nothing but what they are given. What they return is exactly of the declared types, as
    everywhere.

    Args:
        values: Expressions over single rows: what :meth:`add` is given of each.

    Attributes:
        state_type: Column type of what is remembered of a key, e.g. ``"numeric(12,2)"`` or ``"int8[]"``.
        result_type: Column type of the result; that of the state where it is None.
    """

    state_type: ClassVar[str]
    result_type: ClassVar[str | None] = None

    def __init__(self, *values: pl.Expr) -> None:
        self.values = values

    @abstractmethod
    def zero(self) -> Any:
        """The state of no rows."""

    @abstractmethod
    def add(self, state: Any, /, *values: Any) -> Any:
        """The state with a further row; rows of a key come in their order."""

    @abstractmethod
    def merge(self, earlier: Any, later: Any) -> Any:
        """The state of the rows of both: as if those of ``later`` had been added to ``earlier``."""

    def result(self, state: Any) -> Any:
        """What is emitted; the state itself."""
        return state

    def __str__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(map(str, self.values))})"


@dataclass(frozen=True, slots=True, eq=False)
class ExpressionAccumulator:
    """An aggregate in expressions of polars, which work on all keys at once.

    ::

        distinct = ExpressionAccumulator(
            partials={"seen": pl.col("customer").unique()},
            merge={"seen": pl.col("seen").explode().unique().sort()},
            result=pl.col("seen").list.len(),
        )
        orders.key_by("shop").aggregate("customers", customers=distinct)

    A merge of one state must be that state, and it must not matter which rows are reduced together. polars adds up
    64-bit integers without a look at what does not fit; cast where that could happen.

    Attributes:
        partials: By the name of a part of the state, an aggregate over the rows of a key within a batch.
        merge: By the same names, an aggregate over states, whose columns are the parts; earlier rows come first.
        result: Over a state, as over a row.
    """

    partials: Mapping[str, pl.Expr]
    merge: Mapping[str, pl.Expr]
    result: pl.Expr

    def __str__(self) -> str:
        parts = (f"{name}={self.partials[name]} merged by {self.merge[name]}" for name in self.partials)
        return f"{self.result} of {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class CustomColumn:
    """One column of an aggregation that a user's accumulator computes.

    Attributes:
        name: Of the column.
        accumulator: What was given.
        inputs: By name, what is taken of each row, and its type.
        states: What is remembered.
        type: Of the result.
    """

    name: str
    accumulator: Accumulator | ExpressionAccumulator
    inputs: Mapping[str, tuple[pl.Expr, PostgresType]]
    states: Schema
    type: PostgresType


def custom_column(
    transformation: Transformation,
    name: str,
    accumulator: Accumulator | ExpressionAccumulator,
    schema: Schema,
    declared: Schema,
) -> CustomColumn:
    """What an accumulator needs over these columns.

    Args:
        transformation: Whom to name in errors.
        name: Of the result.
        accumulator: What was given.
        schema: The input's columns.
        declared: Declared types of results.

    Raises:
        ConfigurationError: Says what is wrong with it.
    """
    if isinstance(accumulator, Accumulator):
        column = _in_python(transformation, name, accumulator, schema)
    else:
        column = _in_expressions(transformation, name, accumulator, schema, declared)
    if name in declared and declared[name] != column.type:
        problem = f'column "{name}" is {column.type}, not {declared[name]} as declared'
        raise transformation.refusal(problem, "cast it with with_columns(…) behind the aggregation")
    return column


def row_type(transformation: Transformation, name: str, expression: pl.Expr, schema: Schema) -> PostgresType:
    """The type of an expression over single rows.

    Raises:
        ConfigurationError: It looks at more than one row, or has no exact type.
    """
    require_row_wise(transformation, [expression], schema)
    named = expression.alias(name)
    yielded = evaluate_empty(transformation, [named], schema)
    if pl.UInt64 in yielded.dtypes():
        cure = "cast it to pl.Int64, or to pl.Decimal(20, 0)"
        raise transformation.refusal(f'column "{name}": {expression} yields unsigned 64-bit integers', cure)
    return typed_schema(transformation, yielded, inherited_types([named], schema), None)[name]


def _in_python(transformation: Transformation, name: str, accumulator: Accumulator, schema: Schema) -> CustomColumn:
    shown = type(accumulator).__qualname__
    values: object = getattr(accumulator, "values", ())
    if not isinstance(values, tuple) or not values or not all(isinstance(value, pl.Expr) for value in values):
        problem = f'column "{name}": {shown} is given {values!r}, not expressions'
        raise transformation.refusal(problem, f'say what it takes of each row, e.g. {shown}(pl.col("…"))')
    types: list[PostgresType] = []
    for text in (getattr(accumulator, "state_type", None), accumulator.result_type):
        try:
            types.append(types[0] if text is None and types else PostgresType.parse(str(text)))
        except ConfigurationError as error:
            cure = 'set state_type = "…", and result_type where it is another one'
            raise transformation.refusal(f'column "{name}": {shown}: {error}', cure) from error
    inputs = {
        f"value_{number}": (value, row_type(transformation, name, value, schema)) for number, value in enumerate(values)
    }
    return CustomColumn(name, accumulator, inputs, Schema((Field("state", types[0]),)), types[1])


def _in_expressions(
    transformation: Transformation, name: str, accumulator: ExpressionAccumulator, schema: Schema, declared: Schema
) -> CustomColumn:
    findings = list(_part_findings(transformation, name, accumulator))
    if findings:
        raise ConfigurationError.from_findings(str(transformation), findings)
    states = _reduced(transformation, accumulator.partials, schema)
    merged = _reduced(transformation, accumulator.merge, states)
    for field in states:
        if merged[field.name] != field.type:
            problem = f'column "{name}": part "{field.name}" is {field.type}, and merged it is {merged[field.name]}'
            raise transformation.refusal(problem, "cast one of them")
    require_row_wise(transformation, [accumulator.result], states)
    result = accumulator.result.alias(name)
    wanted = {name: declared[name].name} if name in declared else None
    yielded = evaluate_empty(transformation, [result], states)
    type_ = typed_schema(transformation, yielded, inherited_types([result], states), wanted)[name]
    roots = dict.fromkeys(root for one in accumulator.partials.values() for root in one.meta.root_names())
    inputs = {root: (pl.col(root), schema[root]) for root in roots}
    # A value of each row, whatever else is taken of it: rows are counted by it.
    return CustomColumn(name, accumulator, {**inputs, ANCHOR: (pl.lit(0), PostgresType.parse("int4"))}, states, type_)


def _part_findings(transformation: Transformation, name: str, accumulator: ExpressionAccumulator) -> Iterable[Finding]:
    parts: tuple[object, object] = (accumulator.partials, accumulator.merge)
    if not all(isinstance(part, Mapping) and part for part in parts) or set(accumulator.partials) != set(
        accumulator.merge
    ):
        problem = f'column "{name}": partials and merge do not name the same parts'
        yield transformation.finding(problem, 'e.g. partials={"n": pl.len()}, merge={"n": pl.col("n").sum()}')
        return
    for part in accumulator.partials:
        for finding in name_findings(part):
            yield transformation.finding(f"{finding.subject}: {finding.problem}", finding.cure)
    given: Sequence[object] = (*accumulator.partials.values(), *accumulator.merge.values(), accumulator.result)
    for expression in given:
        if not isinstance(expression, pl.Expr):
            yield transformation.finding(
                f'column "{name}": {expression!r} is not an expression', "give polars expressions"
            )
        elif expression.meta.has_multiple_outputs() or expression.meta.is_regex_projection():
            yield transformation.finding(f'column "{name}": {expression} names several columns', "name each one")


def _reduced(transformation: Transformation, expressions: Mapping[str, pl.Expr], schema: Schema) -> Schema:
    """The columns that aggregates over these columns yield, found by running them over no rows."""
    named = [expression.alias(name) for name, expression in expressions.items()]
    query = empty_frame(schema).lazy().group_by(pl.lit(0).alias(ANCHOR)).agg(*named).drop(ANCHOR)
    try:
        yielded = query.collect().schema
    except pl.exceptions.PolarsError as error:
        problem = str(error).partition("\n")[0].partition("; valid columns")[0]
        raise transformation.refusal(problem, f"correct the expression; the columns here are: {schema}") from error
    return typed_schema(transformation, yielded, Schema(()), None)
