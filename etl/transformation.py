"""What a job does to its rows, as inert data: one frozen dataclass a transformation.

A transformation knows which columns it yields (:meth:`Transformation.output_schema`), so every schema of a job is known
before it runs. How it is carried out is the matter of :mod:`etl.operators`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pyarrow as pa

from etl.errors import ConfigurationError, Finding
from etl.lazy import LazyModule
from etl.schema import Field, Schema

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

Row = dict[str, Any]
"""One row by column name, with exact Python values: ``Decimal``, aware ``datetime``, ``bytes``, ``list``, ``None`` …"""
RowPredicate = Callable[[Row], bool]
RowValue = Callable[[Row], Any]
RowFunction = Callable[[Row], Mapping[str, Any]]
RowsFunction = Callable[[Row], Iterable[Mapping[str, Any]]]
FrameFunction = Callable[["pl.DataFrame"], "pl.DataFrame"]

ANCHOR = "__etl_row"
"""A helper column beside the user's: literals are spread over its rows, and a result of other length is refused."""

PARALLELISM_MAX = 128
"""Of anything: as many as there are key groups."""

_PACKAGE_DIR = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Location:
    """Where the user declared something."""

    file: str
    line: int

    @classmethod
    def of_caller(cls) -> Location:
        """The nearest calling frame outside of this package."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE_DIR):
            frame = frame.f_back
        return cls(frame.f_code.co_filename, frame.f_lineno)

    def __str__(self) -> str:
        path = Path(self.file)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{shown}:{self.line}"


@dataclass(frozen=True, slots=True, eq=False)
class Transformation(ABC):
    """Rows in, rows out; declared by a method of :class:`etl.job.Stream`.

    Attributes:
        location: Where the user called the method.
        deterministic: False when the same row may yield something else the next time (random, clock, look-ups): a
            replay after a failure may then differ from what was seen before it.
    """

    kind: ClassVar[str]

    location: Location
    _: KW_ONLY
    deterministic: bool = True

    @abstractmethod
    def output_schema(self, inputs: Sequence[Schema]) -> Schema:
        """The columns it yields for these input columns.

        Raises:
            ConfigurationError: It cannot work on them; the findings say why.
        """

    @property
    def calls_functions(self) -> bool:
        """Whether it calls Python functions of the user."""
        return False

    def describe(self) -> str:
        """One line for ``etl explain``: what is done, without the place."""
        return self.kind

    def finding(self, problem: str, cure: str) -> Finding:
        """A finding about this transformation, with its place."""
        return Finding(str(self), problem, cure)

    def refusal(self, problem: str, cure: str) -> ConfigurationError:
        """An error with one finding about this transformation."""
        return ConfigurationError.from_findings(str(self), [self.finding(problem, cure)])

    def __str__(self) -> str:
        return f"{self.kind} at {self.location}"


@dataclass(frozen=True, slots=True, eq=False)
class Filter(Transformation):
    """Keep the rows for which a predicate is true; false and NULL drop the row."""

    kind = "filter"

    predicate: pl.Expr | RowPredicate

    def output_schema(self, inputs: Sequence[Schema]) -> Schema:
        """The input's columns, unchanged."""
        if isinstance(self.predicate, pl.Expr):
            require_row_wise(self, [self.predicate], inputs[0])
            yielded = evaluate_empty(self, [self.predicate], inputs[0])
            if yielded.dtypes() != [pl.Boolean]:
                shown = ", ".join(str(dtype) for dtype in yielded.dtypes())
                raise self.refusal(f"the predicate yields {shown}, not one boolean", "compare, e.g. pl.col(…) > 0")
        else:
            _require_callable(self, self.predicate)
        return inputs[0]

    @property
    def calls_functions(self) -> bool:
        """Whether the predicate is one."""
        return not isinstance(self.predicate, pl.Expr)

    def describe(self) -> str:
        """The predicate."""
        return f"filter {_shown(self.predicate)}"


@dataclass(frozen=True, slots=True)
class RowColumn:
    """A column computed by a Python function over the row; its type comes from the declared schema."""

    name: str
    function: RowValue


@dataclass(frozen=True, slots=True, eq=False)
class Select(Transformation):
    """Exactly the columns that the expressions yield, in their order."""

    kind = "select"

    expressions: tuple[pl.Expr, ...]
    declared: Mapping[str, str] | None = None

    def output_schema(self, inputs: Sequence[Schema]) -> Schema:
        """The expressions' columns; a column that is only renamed keeps its declared type."""
        _require_expressions(self, self.expressions)
        require_row_wise(self, self.expressions, inputs[0])
        yielded = evaluate_empty(self, self.expressions, inputs[0])
        return typed_schema(self, yielded, inherited_types(self.expressions, inputs[0]), self.declared)

    def describe(self) -> str:
        """The expressions."""
        return "select " + ", ".join(_shown(expression) for expression in self.expressions)


@dataclass(frozen=True, slots=True, eq=False)
class WithColumns(Transformation):
    """The input's columns, some replaced and new ones added at the end; all are computed from the input row."""

    kind = "with_columns"

    columns: tuple[pl.Expr | RowColumn, ...]
    declared: Mapping[str, str] | None = None

    def output_schema(self, inputs: Sequence[Schema]) -> Schema:
        """The input's columns, replaced or extended."""
        expressions = [column for column in self.columns if not isinstance(column, RowColumn)]
        _require_expressions(self, expressions, empty_is_fine=len(expressions) < len(self.columns))
        require_row_wise(self, expressions, inputs[0])
        declared = declared_schema(self, self.declared)
        stand_ins = [self._stand_in(column, declared) for column in self.columns]
        yielded = evaluate_empty(self, stand_ins, inputs[0], beside_input=True)
        return typed_schema(self, yielded, inherited_types(expressions, inputs[0], base=inputs[0]), self.declared)

    def _stand_in(self, column: pl.Expr | RowColumn, declared: Schema | None) -> pl.Expr:
        if isinstance(column, pl.Expr):
            return column
        _require_callable(self, column.function)
        if declared is None or column.name not in declared:
            cure = f'add schema={{"{column.name}": "…"}} to the call'
            raise self.refusal(f'column "{column.name}" comes from a function and has no type', cure)
        dtype = empty_frame(Schema((Field(column.name, declared[column.name]),))).dtypes[0]
        return pl.lit(None, dtype=dtype).alias(column.name)

    @property
    def calls_functions(self) -> bool:
        """Whether a column comes from one."""
        return any(isinstance(column, RowColumn) for column in self.columns)

    def describe(self) -> str:
        """The columns."""
        return "with_columns " + ", ".join(_shown(column) for column in self.columns)


@dataclass(frozen=True, slots=True, eq=False)
class _OfRows(Transformation):
    """What is done by a Python function that is given one row after another."""

    function: RowFunction | RowsFunction
    declared: Mapping[str, str] | None = None

    def output_schema(self, inputs: Sequence[Schema]) -> Schema:
        """The declared columns, or the input's."""
        _require_callable(self, self.function)
        return declared_schema(self, self.declared) or inputs[0]

    @property
    def calls_functions(self) -> bool:
        """It does nothing else."""
        return True

    def describe(self) -> str:
        """The function."""
        return f"{self.kind} {_shown(self.function)}"


@dataclass(frozen=True, slots=True, eq=False)
class Map(_OfRows):
    """One row for each row, by a Python function."""

    kind = "map"

    function: RowFunction


@dataclass(frozen=True, slots=True, eq=False)
class FlatMap(_OfRows):
    """Any number of rows for each row, by a Python function."""

    kind = "flat_map"

    function: RowsFunction


@dataclass(frozen=True, slots=True, eq=False)
class MapBatches(Transformation):
    """A frame for each batch, by a Python function over a polars frame. Where batches end is not defined."""

    kind = "map_batches"

    function: FrameFunction
    declared: Mapping[str, str] | None = None

    def output_schema(self, inputs: Sequence[Schema]) -> Schema:
        """The declared columns, or those that the function yields for an empty frame."""
        _require_callable(self, self.function)
        return declared_schema(self, self.declared) or self._inferred(inputs[0])

    def _inferred(self, schema: Schema) -> Schema:
        cure = "declare its columns with schema={…}"
        try:
            yielded: object = self.function(empty_frame(schema))
        except Exception as error:
            problem = f"{_shown(self.function)} raised {type(error).__name__} for an empty frame: {error}"
            raise self.refusal(problem, cure) from error
        if not isinstance(yielded, pl.DataFrame):
            problem = f"{_shown(self.function)} returned {type(yielded).__name__} for an empty frame"
            raise self.refusal(problem, "return a polars.DataFrame")
        return typed_schema(self, yielded.schema, schema, None)

    @property
    def calls_functions(self) -> bool:
        """It does nothing else."""
        return True

    def describe(self) -> str:
        """The function."""
        return f"{self.kind} {_shown(self.function)}"


@dataclass(frozen=True, slots=True, eq=False)
class SideStream(Transformation):
    """What leaves the operator before it by one of its side outputs; nothing is done to the rows.

    Attributes:
        tag: Which side output.
    """

    kind = "side output"

    tag: str

    def output_schema(self, inputs: Sequence[Schema]) -> Schema:
        """That of the side output, which it is given."""
        return inputs[0]

    def describe(self) -> str:
        """The tag."""
        return f"side output {self.tag}"


@dataclass(frozen=True, slots=True, eq=False)
class Union(Transformation):
    """The rows of several streams with the same columns; the order between the streams is not defined."""

    kind = "union"

    def output_schema(self, inputs: Sequence[Schema]) -> Schema:
        """The columns that all inputs share."""
        first = inputs[0]
        for number, other in enumerate(inputs[1:], start=2):
            differences = list(_differences(first, other))
            if differences:
                problem = f"stream {number} differs from stream 1 in " + ", ".join(differences)
                raise self.refusal(problem, "bring all streams to the same columns, order and types with select(…)")
        return first


@dataclass(frozen=True, slots=True, eq=False)
class Rebalance(Transformation):
    """The same rows, dealt out to several subtasks batch by batch; the steps behind it run in each of them.

    Attributes:
        parallelism: How many.
    """

    kind = "rebalance"

    parallelism: int

    def output_schema(self, inputs: Sequence[Schema]) -> Schema:
        """The input's columns, unchanged."""
        if not is_parallelism(self.parallelism):
            raise self.refusal(
                f"parallelism {self.parallelism!r} is not 1 to {PARALLELISM_MAX}", "choose another number"
            )
        return inputs[0]

    def describe(self) -> str:
        """How many subtasks."""
        return f"rebalance over {self.parallelism} subtask(s)"


def is_parallelism(number: object) -> bool:
    """Whether so many subtasks are possible."""
    return type(number) is int and 1 <= number <= PARALLELISM_MAX


def empty_frame(schema: Schema) -> pl.DataFrame:
    """A polars frame without rows in exactly the types that batches of this schema have as frames."""
    return cast(pl.DataFrame, pl.from_arrow(schema.to_arrow().empty_table()))


def evaluate_empty(
    transformation: Transformation, expressions: Sequence[pl.Expr], schema: Schema, *, beside_input: bool = False
) -> pl.Schema:
    """The names and types that expressions yield over this schema, found by running them over no rows.

    Args:
        transformation: Whom to name in errors.
        expressions: What to evaluate.
        schema: The input's columns.
        beside_input: The input's columns stay, as ``with_columns`` does it.

    Raises:
        ConfigurationError: An expression names a column that is not there, or does not fit the columns' types.
    """
    frame = empty_frame(schema).lazy()
    query = frame.with_columns(*expressions) if beside_input else frame.select(*expressions)
    try:
        return query.collect().schema
    except pl.exceptions.PolarsError as error:
        problem = str(error).partition("\n")[0].partition("; valid columns")[0]
        cure = f"correct the expression; the columns here are: {schema}"
        raise transformation.refusal(problem, cure) from error


def require_row_wise(transformation: Transformation, expressions: Sequence[pl.Expr], schema: Schema) -> None:
    """Refuse expressions that look at more than one row: their result would depend on where batches happen to end.

    Raises:
        ConfigurationError: Names the expression.
    """
    for expression in expressions:
        if not _is_row_wise(expression, schema):
            problem = f"{_shown(expression)} does not look at one row at a time, so its result depends on batch borders"
            raise transformation.refusal(problem, "use an expression over single rows, or a function over rows")


def _is_row_wise(expression: pl.Expr, schema: Schema) -> bool:
    """Ask the optimiser of polars: it moves a filter below an expression if and only if that works row by row."""
    frame = empty_frame(schema).with_columns(pl.lit(0, dtype=pl.Int64).alias(ANCHOR)).lazy()
    if not _filter_stays(frame, pl.col(ANCHOR).sum()) or _filter_stays(frame, pl.col(ANCHOR) + 1):
        return True  # this version of polars prints its plans in another way; nothing can be concluded
    return not _filter_stays(frame, expression)


def _filter_stays(frame: pl.LazyFrame, expression: pl.Expr) -> bool:
    try:
        # the struct makes one column of expressions over several columns
        query = frame.select(pl.col(ANCHOR), pl.struct(expression).alias("value"))
        return query.filter(pl.col(ANCHOR) > 0).explain().startswith("FILTER")
    except pl.exceptions.PolarsError:
        return False  # not a valid expression over these columns: reported, with its reason, by evaluate_empty


def renamed_column(expression: pl.Expr) -> tuple[str, str] | None:
    """``(input column, output column)`` when an expression only takes over a column, perhaps under another name."""
    bare = expression.meta.undo_aliases()
    if not bare.meta.is_column() or bare.meta.has_multiple_outputs() or bare.meta.is_regex_projection():
        return None
    return bare.meta.root_names()[0], expression.meta.output_name()


def frame_types_as_arrow(schema: pl.Schema) -> pa.Schema:
    """The Arrow types of a frame's columns, with times in microseconds (polars knows nanoseconds only)."""
    arrow = pl.DataFrame(schema=schema).to_arrow().schema
    return pa.schema([pa.field(column.name, _in_microseconds(column.type)) for column in arrow])


def _in_microseconds(arrow: pa.DataType) -> pa.DataType:
    if pa.types.is_time64(arrow):
        return pa.time64("us")
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
        return pa.list_(_in_microseconds(arrow.value_type))
    return arrow


def typed_schema(
    transformation: Transformation, yielded: pl.Schema, inherit: Schema, declared: Mapping[str, str] | None
) -> Schema:
    """PostgreSQL types for what polars yields: declared ones first, then inherited ones, then the exact home."""
    findings: list[Finding] = []
    wanted = declared_schema(transformation, declared)
    known = {field.name: field for field in inherit} | {field.name: field for field in wanted or ()}
    fields: list[Field] = []
    for name, dtype in yielded.items():
        before = Schema((known[name],)) if name in known else None
        try:
            arrow = frame_types_as_arrow(pl.Schema({name: dtype}))
            fields += Schema.from_arrow(arrow, inherit=before)
        except (ConfigurationError, pl.exceptions.PolarsError) as error:
            findings.append(transformation.finding(f'column "{name}" ({dtype}): {error}', "give it another type"))
    if not findings:
        findings += _broken_promises(transformation, Schema(tuple(fields)), wanted)
    if findings:
        raise ConfigurationError.from_findings(str(transformation), findings)
    return Schema(tuple(fields))


def _broken_promises(transformation: Transformation, schema: Schema, wanted: Schema | None) -> Iterable[Finding]:
    for field in wanted or ():
        if field.name not in schema:
            yield transformation.finding(f'schema declares "{field.name}", which is not yielded', "remove it there")
        elif schema[field.name] != field.type:
            problem = f'column "{field.name}" is {schema[field.name]}, not {field.type} as declared'
            yield transformation.finding(problem, "cast it in the expression")


def inherited_types(expressions: Sequence[pl.Expr], schema: Schema, *, base: Schema | None = None) -> Schema:
    """Types to keep by output name: those of columns taken over, also under another name."""
    types = {field.name: field.type for field in base or schema}
    for expression in expressions:
        renamed = renamed_column(expression)
        if renamed is not None and renamed[0] in schema:
            types[renamed[1]] = schema[renamed[0]]
    return Schema(tuple(Field(name, type_) for name, type_ in types.items()))


def declared_schema(transformation: Transformation, declared: Mapping[str, str] | None) -> Schema | None:
    """What the user declared of the columns, None where that is nothing.

    Raises:
        ConfigurationError: Lists every name and type that is not one, with the transformation's place.
    """
    if declared is None:
        return None
    given: object = declared
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for text in (*given, *given.values())):
        raise transformation.refusal(f"schema={given!r} is no mapping of names to types", 'e.g. schema={"id": "int8"}')
    try:
        return Schema.declare(declared)
    except ConfigurationError as error:
        findings = [transformation.finding(f"{inner.subject}: {inner.problem}", inner.cure) for inner in error.findings]
        raise ConfigurationError.from_findings(str(transformation), findings) from error


def _require_callable(transformation: Transformation, function: object) -> None:
    if not callable(function) or isinstance(function, pl.Expr):
        problem = f"{type(function).__name__} is not a function"
        raise transformation.refusal(problem, "give a Python function, or a polars expression where one is taken")


def _require_expressions(
    transformation: Transformation, expressions: Sequence[object], *, empty_is_fine: bool = False
) -> None:
    if not expressions and not empty_is_fine:
        raise transformation.refusal("no columns are given", "name at least one")
    for expression in expressions:
        if not isinstance(expression, pl.Expr):
            cure = 'give polars expressions; a constant is pl.lit(…), a column is pl.col("…")'
            raise transformation.refusal(f"{expression!r} is not an expression", cure)


def _differences(first: Schema, other: Schema) -> Iterable[str]:
    for field in first:
        if field.name not in other:
            yield f'"{field.name}" (missing)'
        elif other[field.name] != field.type:
            yield f'"{field.name}" ({other[field.name]} instead of {field.type})'
    yield from (f'"{name}" (additional)' for name in other.names if name not in first)
    if set(first.names) == set(other.names) and first.names != other.names:
        yield f"order ({', '.join(other.names)} instead of {', '.join(first.names)})"


def _shown(what: object) -> str:
    """An expression, column or function in a few words."""
    if isinstance(what, RowColumn):
        return f"{what.name}={_shown(what.function)}"
    if isinstance(what, pl.Expr):
        return str(what)
    return str(getattr(what, "__qualname__", None) or type(what).__name__)
