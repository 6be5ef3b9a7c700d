"""Transformations that keep state by key, as inert data; carried out by :mod:`etl.operators.keyed`.

What they remember belongs to their uid and is part of every checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from etl.accumulator import Accumulator, CustomColumn, ExpressionAccumulator, custom_column, row_type
from etl.clock import SPAN_MAX
from etl.errors import ConfigurationError, Finding
from etl.event_time import is_event_time
from etl.lazy import LazyModule
from etl.operator import LATE
from etl.schema import Field, PostgresType, Schema, name_findings
from etl.transformation import (
    Transformation,
    declared_schema,
)

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

SUM_DIGITS = 38
_NO_KEYS = ("json", "jsonb")


class Emission(StrEnum):
    """When an aggregation emits a key whose values have changed."""

    CHECKPOINT = "checkpoint"
    """Once a checkpoint, with the values at its barrier."""
    UPDATE = "update"
    """After every batch that changed it."""
    CLOSE = "close"
    """When its window closes, and at the next barrier after rows that came late."""


class AggregateKind(StrEnum):
    """What is remembered of the values of a key."""

    LEN = "len"
    COUNT = "count"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    MEAN = "mean"
    FIRST = "first"
    LAST = "last"
    FIRST_BY = "first by"
    LAST_BY = "last by"


@dataclass(frozen=True, slots=True)
class AggregateColumn:
    """One column of an aggregation.

    Attributes:
        name: Of the column.
        kind: What is remembered.
        value: Expression over a row; None for ``pl.len()``.
        value_type: Its type.
        order: What decides between first and last, None where the order of arrival does.
        order_type: Its type, ``value_type`` where there is no order.
        type: Of the result.
    """

    name: str
    kind: AggregateKind
    value: pl.Expr | None
    value_type: PostgresType
    order: pl.Expr | None
    order_type: PostgresType
    type: PostgresType


@dataclass(frozen=True, slots=True, eq=False)
class Stateful(Transformation):
    """Rows with the same key meet in the same subtask, which remembers something of them.

    Attributes:
        uid: Names the state in the store, across runs and changes of the code.
        keys: Columns that make the key; NULL is a key like any other.
        parallelism: Number of subtasks; the job's when None.
        keys_in_memory: How many keys each subtask keeps in memory from one checkpoint to the next; None for all.
    """

    uid: str
    keys: tuple[str, ...]
    _: KW_ONLY
    parallelism: int | None = None
    keys_in_memory: int | None = None

    @property
    def event_time_columns(self) -> tuple[str, ...]:
        """For each input the column that says when a row happened; empty where event time does not matter."""
        return ()

    @property
    def unrepeatable(self) -> str | None:
        """What it does that comes out otherwise when the same rows are read again after a failure, None if nothing."""
        return None

    @property
    def keys_of_inputs(self) -> tuple[tuple[str, ...], ...]:
        """For each input the columns that make the key there."""
        return (self.keys,)

    @property
    def emits_again(self) -> bool:
        """Whether a row that it yields may replace one that it has yielded before."""
        return False

    @property
    def result_keys(self) -> tuple[str, ...]:
        """Columns that say which row a later one replaces."""
        return self.keys

    def side_schema(self, tag: str, inputs: Sequence[Schema]) -> Schema:
        """The columns of a side output: of late rows those of the input.

        Raises:
            ConfigurationError: There is none of this tag.
        """
        if tag != LATE or not self.event_time_columns:
            raise self.refusal(f"it has no side output {tag!r}", "only what works by event time has late rows")
        return inputs[0]

    def event_time_findings(self, inputs: Sequence[Schema]) -> Iterable[Finding]:
        """What is wrong with the columns of event time."""
        for column, schema in zip(self.event_time_columns, inputs, strict=False):
            if column not in schema:
                yield self.finding(f"event time {column!r} is no column here", f"choose from: {schema}")
            elif not is_event_time(schema[column]):
                problem = f'event time "{column}" is {schema[column]}, not a moment'
                yield self.finding(problem, "name a column of type timestamptz, timestamp or date")

    def key_fields(self, schema: Schema) -> tuple[Field, ...]:
        """The key's columns.

        Raises:
            ConfigurationError: One is missing, given twice, or of a type that has no equality.
        """
        findings = list(self.key_findings(self.keys, schema))
        if findings:
            raise ConfigurationError.from_findings(str(self), findings)
        return tuple(Field(name, schema[name]) for name in self.keys)

    def key_findings(self, keys: Sequence[str], schema: Schema) -> Iterable[Finding]:
        """What is wrong with columns that are to be the key of an input."""
        if not keys:
            yield self.finding("it has no key", 'name at least one column, e.g. key_by("customer_id")')
        given: tuple[object, ...] = tuple(keys)
        names = [name for name in given if isinstance(name, str)]
        for other in given:
            if not isinstance(other, str):
                cure = "name columns; compute others with with_columns(…) before"
                yield self.finding(f"{other!r} is no name of a column", cure)
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield self.finding(f"key column {name!r} is given twice", "name it once")
        for name in dict.fromkeys(names):
            if name not in schema:
                yield self.finding(f"key column {name!r} is not there", f"choose from: {schema}")
            elif schema[name].is_array or schema[name].base in _NO_KEYS:
                problem = f'key column "{name}" is {schema[name]}, whose values have no equality here'
                yield self.finding(problem, "compute a key of another type with with_columns(…) before")

    def __str__(self) -> str:
        return f'{self.kind} "{self.uid}" at {self.location}'


@dataclass(frozen=True, slots=True, eq=False)
class Aggregate(Stateful):
    """One row of results for each key, emitted again when it has changed."""

    kind = "aggregate"
    emissions: ClassVar[tuple[Emission, ...]] = (Emission.CHECKPOINT, Emission.UPDATE)

    expressions: tuple[tuple[str, object], ...] = ()
    declared: Mapping[str, str] | None = None
    emission: Emission = Emission.CHECKPOINT

    @property
    def emits_again(self) -> bool:
        """Always."""
        return True

    def output_schema(self, inputs: Sequence[Schema]) -> Schema:
        """The key's columns, then one column for each expression."""
        columns = self.columns(inputs[0])
        return Schema((*self.key_fields(inputs[0]), *(Field(column.name, column.type) for column in columns)))

    def columns(self, schema: Schema) -> tuple[AggregateColumn | CustomColumn, ...]:
        """What each expression asks for.

        Raises:
            ConfigurationError: It is none that can be carried on from batch to batch.
        """
        self.key_fields(schema)
        declared = declared_schema(self, self.declared) or Schema(())
        found: list[AggregateColumn | CustomColumn] = []
        findings = [*self._argument_findings(), *self._name_findings(declared)]
        for name, expression in self.expressions:
            try:
                found.append(self._column(name, expression, schema, declared))
            except ConfigurationError as error:
                findings += error.findings
        if findings:
            raise ConfigurationError.from_findings(str(self), findings)
        return tuple(found)

    def describe(self) -> str:
        """Key and columns."""
        columns = ", ".join(f"{name}={expression}" for name, expression in self.expressions)
        return f"aggregate by {', '.join(self.keys)}: {columns}"

    def _argument_findings(self) -> Iterable[Finding]:
        if not self.expressions:
            yield self.finding("no columns are given", "e.g. aggregate(uid, total=pl.col(…).sum(), rows=pl.len())")
        emission: object = self.emission
        if not isinstance(emission, Emission) or emission not in self.emissions:
            shown = str(emission) if isinstance(emission, Emission) else emission
            yield self.finding(f"emit={shown!r} is unknown", f"choose from {', '.join(self.emissions)}")

    def _name_findings(self, declared: Schema) -> Iterable[Finding]:
        names = [name for name, _ in self.expressions]
        for name in names:
            for finding in name_findings(name):
                yield self.finding(f"{finding.subject}: {finding.problem}", finding.cure)
            if name in self.keys:
                yield self.finding(f'column "{name}" is a column of the key', "give the result another name")
        for field in declared:
            if field.name not in names:
                yield self.finding(f'schema declares "{field.name}", which is not computed', "remove it there")

    def _column(
        self, name: str, expression: object, schema: Schema, declared: Schema
    ) -> AggregateColumn | CustomColumn:
        if isinstance(expression, Accumulator | ExpressionAccumulator):
            return custom_column(self, name, expression, schema, declared)
        kind, value, order = self._recognised(name, expression)
        value_type = row_type(self, name, value, schema) if value is not None else PostgresType.parse("int8")
        order_type = row_type(self, name, order, schema) if order is not None else value_type
        result = _result_type(kind, value_type)
        if result is None or (order is not None and not _has_order(order_type)):
            problem = f'column "{name}": there is no {kind} of {value_type}' + (
                f" ordered by {order_type}" if order is not None else ""
            )
            raise self.refusal(problem, "cast the column to another type before")
        wanted = next((field.type for field in declared if field.name == name), result)
        if wanted != result and not _is_wider_sum(kind, value_type, wanted):
            problem = f'column "{name}" is {result}, not {wanted} as declared'
            raise self.refusal(problem, "cast it with with_columns(…) behind the aggregation")
        return AggregateColumn(name, kind, value, value_type, order, order_type, wanted)

    def _recognised(self, name: str, expression: object) -> tuple[AggregateKind, pl.Expr | None, pl.Expr | None]:
        """The aggregate that an expression asks for, told by rebuilding it from its parts and comparing."""
        if isinstance(expression, pl.Expr):
            bare = expression.meta.undo_aliases()
            if bare.meta.eq(pl.len()):
                return AggregateKind.LEN, None, None
            for inner in bare.meta.pop():
                for kind, rebuilt in _candidates(inner):
                    if rebuilt.meta.eq(bare):
                        return self._with_order(kind, inner)
        raise self.refusal(
            f'column "{name}": {expression} is no aggregate that can be carried on from batch to batch',
            "use len, count, sum, min, max, mean, first or last of an expression over single rows, or"
            " sort_by(one expression).first() or .last(), or an accumulator of your own; compute with the results"
            " behind the aggregation",
        )

    def _with_order(self, kind: AggregateKind, inner: pl.Expr) -> tuple[AggregateKind, pl.Expr | None, pl.Expr | None]:
        ordered = {AggregateKind.FIRST: AggregateKind.FIRST_BY, AggregateKind.LAST: AggregateKind.LAST_BY}
        parts = inner.meta.pop() if kind in ordered else []
        if len(parts) == 2:
            for value, order in (parts, parts[::-1]):
                if any(value.sort_by(order, maintain_order=stable).meta.eq(inner) for stable in (False, True)):
                    return ordered[kind], value, order
        return kind, inner, None


@dataclass(frozen=True, slots=True, eq=False)
class Deduplicate(Stateful):
    """The first row of each key, and no other, or no other for some time.

    Attributes:
        ttl: How long; for ever when None.
        time: The column of event time by which that is measured; the clock when None.
    """

    kind = "deduplicate"

    ttl: timedelta | None = None
    time: str | None = None

    @property
    def event_time_columns(self) -> tuple[str, ...]:
        """See :class:`Stateful`."""
        return () if self.time is None else (self.time,)

    @property
    def unrepeatable(self) -> str | None:
        """See :class:`Stateful`."""
        return "forgets by the clock" if self.ttl is not None and self.time is None else None

    def output_schema(self, inputs: Sequence[Schema]) -> Schema:
        """The input's columns, unchanged."""
        findings = list(ttl_findings(self, self.ttl))
        if self.ttl is None and self.time is not None:
            findings.append(self.finding(f"time={self.time!r} is given, and nothing goes by it", "add ttl=…"))
        if findings:
            raise ConfigurationError.from_findings(str(self), findings)
        self.key_fields(inputs[0])
        return inputs[0]

    def describe(self) -> str:
        """The key, and how long it is remembered."""
        span = (
            "" if self.ttl is None else f", for {self.ttl} {'by the clock' if self.time is None else 'of ' + self.time}"
        )
        return f"deduplicate by {', '.join(self.keys)}{span}"


def waiting_on_disk(stateful: Stateful) -> Finding:
    """The finding for a bound on the keys in memory of an operator that goes by time."""
    problem = "keys_in_memory is given, and keys whose time will come must be in memory"
    return stateful.finding(problem, "leave it out, or do without timers and ttl")


def ttl_findings(stateful: Stateful, ttl: object) -> Iterable[Finding]:
    """What is wrong with a time to live."""
    if ttl is not None and stateful.keys_in_memory is not None:
        yield waiting_on_disk(stateful)
    if ttl is not None and (not isinstance(ttl, timedelta) or not timedelta(0) < ttl <= SPAN_MAX):
        problem = f"ttl={ttl!r} is no timedelta above 0 and up to {SPAN_MAX.days} days"
        yield stateful.finding(problem, "e.g. ttl=timedelta(days=30)")


def _candidates(inner: pl.Expr) -> Iterable[tuple[AggregateKind, pl.Expr]]:
    yield AggregateKind.COUNT, inner.count()
    yield AggregateKind.SUM, inner.sum()
    yield AggregateKind.MIN, inner.min()
    yield AggregateKind.MAX, inner.max()
    yield AggregateKind.MEAN, inner.mean()
    yield AggregateKind.FIRST, inner.first()
    yield AggregateKind.LAST, inner.last()


def _result_type(kind: AggregateKind, value: PostgresType) -> PostgresType | None:
    """The type of an aggregate over values of a type, None where there is no such aggregate."""
    match kind:
        case AggregateKind.LEN | AggregateKind.COUNT:
            return PostgresType.parse("int8")
        case AggregateKind.SUM:
            return _sum_type(value.arrow)
        case AggregateKind.MEAN:
            return None if _sum_type(value.arrow) is None else PostgresType.parse("float8")
        case AggregateKind.MIN | AggregateKind.MAX:
            return value if _has_order(value) else None
        case _:
            return value


def _sum_type(arrow: pa.DataType) -> PostgresType | None:
    if pa.types.is_integer(arrow) or pa.types.is_boolean(arrow):
        return PostgresType.parse("int8")
    if pa.types.is_decimal128(arrow):
        return PostgresType.parse(f"numeric({SUM_DIGITS},{arrow.scale})")
    return PostgresType.parse("float8") if pa.types.is_floating(arrow) else None


def _has_order(type_: PostgresType) -> bool:
    return not type_.is_array and type_.base not in _NO_KEYS


def _is_wider_sum(kind: AggregateKind, value: PostgresType, wanted: PostgresType) -> bool:
    """Sums may be declared in any exact type of the same scale; a sum that does not fit stops the run."""
    if kind is not AggregateKind.SUM or pa.types.is_floating(value.arrow):
        return False
    scale = value.arrow.scale if pa.types.is_decimal128(value.arrow) else 0
    if pa.types.is_integer(wanted.arrow):
        return scale == 0
    return pa.types.is_decimal128(wanted.arrow) and bool(wanted.arrow.scale == scale)
