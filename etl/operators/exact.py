"""Values between Arrow, polars and Python: exactly the declared types, or a :class:`~etl.errors.RecordError`.

The functions here name the column and the value; their callers add the place (:func:`placed`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time
from decimal import Decimal
from functools import cache
from operator import itemgetter
from typing import Any, cast

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from etl.errors import ConfigurationError, RecordError
from etl.operators.calling import shortened
from etl.schema import PostgresType, Schema
from etl.transformation import Row, Transformation

_DAY_US = 86_400_000_000
_DATES = (date.min.toordinal() - date(1970, 1, 1).toordinal(), date.max.toordinal() - date(1970, 1, 1).toordinal())
_TIMESTAMPS = (_DATES[0] * _DAY_US, (_DATES[1] + 1) * _DAY_US - 1)
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@contextmanager
def placed(transformation: Transformation) -> Iterator[None]:
    """Put the transformation's place before the message of a RecordError."""
    try:
        yield
    except RecordError as error:
        raise RecordError(f"{transformation}: {error}", uid=error.uid, split=error.split) from error


def frame_of(batch: pa.RecordBatch) -> pl.DataFrame:
    """A batch as a polars frame, without copies of values where the layouts agree.

    Raises:
        RecordError: A time of 24:00:00, which polars would turn into NULL.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_time(_flat_type(column.type)):
            _require_range(name, _flat(column), pa.int64(), (0, _DAY_US - 1), "the times of day")
    return cast(pl.DataFrame, pl.from_arrow(batch))


def rows_of(batch: pa.RecordBatch) -> Iterator[Row]:
    """The rows of a batch as fresh dicts of exact Python values.

    Raises:
        RecordError: A date or time that Python's types cannot hold (years outside of 1 to 9999, 24:00:00).
    """
    frame = frame_of(batch)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        require_python_range(name, _flat(column))
    return _row_maker(tuple(frame.columns))([series.to_list() for series in frame.iter_columns()])


@cache
def _row_maker(names: tuple[str, ...]) -> Callable[[Sequence[Sequence[Any]]], Iterator[Row]]:
    """From columns to rows.

    It is compiled for the names, as a dataclass's methods are: a dict display takes a fifth of ``dict(zip(…))``.
    """
    values = [f"value_{number}" for number in range(len(names))]
    row = ", ".join(f"{name!r}: {value}" for name, value in zip(names, values, strict=True))
    source = f"lambda columns: ({{{row}}} for {', '.join(values)}, in zip(*columns, strict=True))"
    maker: Callable[[Sequence[Sequence[Any]]], Iterator[Row]] = eval(source)  # noqa: S307 - names come in by their repr
    return maker


def array_of_series(series: pl.Series, type_: PostgresType) -> pa.Array:
    """A computed polars column in the Arrow type of its declared type.

    Raises:
        RecordError: The column has a type of another kind, or a value does not fit.
    """
    arrow = series.to_arrow()
    if arrow.type != type_.arrow:
        arrow = _cast(series.name, arrow, type_)
    _require_valid_text(series.name, arrow, type_)
    return arrow


def batch_of_frame(frame: pl.DataFrame, schema: Schema) -> pa.RecordBatch:
    """A polars frame as a batch; the columns may come in any order.

    Raises:
        RecordError: Columns are missing or additional, or not of the declared types.
    """
    _require_names(frame.columns, schema)
    arrays = [array_of_series(frame[field.name], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema.to_arrow())


class RowShape:
    """The columns that a row returned by a user's function must have: exactly those of a schema."""

    __slots__ = ("_arrays", "_pick", "_schema", "_width")

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._width = len(schema)
        self._pick = _picker(schema.names)
        self._arrays = [number for number, field in enumerate(schema) if field.type.is_array]

    def values(self, row: Any) -> tuple[Any, ...]:
        """The row's values in the order of the schema; lists are copied, since the function may go on changing them.

        Raises:
            RecordError: It is no dict, or has missing or additional columns.
        """
        if type(row) is not dict or len(row) != self._width:
            self._require(row)
        try:
            values = self._pick(row)
        except KeyError:
            self._require(row)
            raise
        return self._with_copies(values) if self._arrays else values

    def _require(self, row: object) -> None:
        if not isinstance(row, dict):
            raise RecordError(f"the function returned {type(row).__name__}, not a dict of column values")
        # by the names that it lists: some kinds of dicts make up values of others
        _require_names(list(row), self._schema)

    def _with_copies(self, values: Sequence[Any]) -> tuple[Any, ...]:
        copied = list(values)
        for number in self._arrays:
            value = copied[number]
            copied[number] = list(value) if type(value) is list else value
        return tuple(copied)


def _picker(names: Sequence[str]) -> Callable[[Row], tuple[Any, ...]]:
    """The values of these names in a row."""
    if len(names) == 1:
        (name,) = names
        return lambda row: (row[name],)  # an itemgetter of one name yields the bare value
    return itemgetter(*names)


def batch_of_values(values: Sequence[Any], schema: Schema) -> pa.RecordBatch:
    """Rows of exact Python values as a batch.

    Args:
        values: Those of one row after the other: a list of rows would have the garbage collector go through each.
        schema: Of the rows.

    Raises:
        RecordError: A value is not exactly of its column's type, or does not fit into it.
    """
    columns = enumerate(schema)
    arrays = [array_of_values(field.name, values[number :: len(schema)], field.type) for number, field in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema.to_arrow())


def array_of_values(name: str, values: Sequence[Any], type_: PostgresType) -> pa.Array:
    """Exact Python values as an Arrow array.

    Args:
        name: The column, for errors.
        values: Python values of exactly the type that belongs to ``type_``, and None.
        type_: The declared type.

    Raises:
        RecordError: Names the column, the value and what is wrong with it.
    """
    if type_.is_array:
        _require_exact(name, values, list, type_)
        elements = [element for value in values if value is not None for element in value]
        array_of_values(name, elements, type_.element)
    else:
        _require_python_types(name, values, type_)
    try:
        array = pa.array(values, type_.arrow)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise RecordError(f'column "{name}": {_offender(values, type_)} does not fit {type_}: {error}') from error
    _require_valid_text(name, array, type_)
    return array


def _require_python_types(name: str, values: Sequence[Any], type_: PostgresType) -> None:
    arrow = type_.arrow
    _require_exact(name, values, python_type(arrow), type_)
    if pa.types.is_timestamp(arrow) or pa.types.is_time(arrow):
        _require_zone(name, values, type_)
    elif pa.types.is_float32(arrow):
        _require_single_precision(name, values)


def _require_zone(name: str, values: Sequence[datetime | time | None], type_: PostgresType) -> None:
    is_wanted = type_.base == "timestamptz"
    for value in values:
        if value is not None and (value.tzinfo is not None and value.utcoffset() is not None) != is_wanted:
            shown = "has no time zone" if is_wanted else "has a time zone"
            raise RecordError(f'column "{name}": {value!r} {shown}, which is wrong for {type_}')


def _require_exact(name: str, values: Sequence[Any], expected: type, type_: PostgresType) -> None:
    if set(map(type, values)) <= {expected, type(None)}:
        return
    wrong = next(value for value in values if value is not None and type(value) is not expected)
    raise RecordError(
        f'column "{name}": {shortened(wrong)} is {type(wrong).__name__}, {type_} takes {expected.__name__}'
    )


def python_type(arrow: pa.DataType) -> type:
    """The Python type whose values a column takes, besides None.

    Raises:
        RecordError: There is none.
    """
    for accepts, python in _PYTHON_TYPES:
        if accepts(arrow):
            return python
    raise RecordError(f"values of Arrow type {arrow} have no Python type here")


_PYTHON_TYPES = (
    (pa.types.is_integer, int),
    (pa.types.is_floating, float),
    (pa.types.is_decimal, Decimal),
    (pa.types.is_boolean, bool),
    (pa.types.is_string, str),
    (pa.types.is_binary, bytes),
    (pa.types.is_date, date),
    (pa.types.is_time, time),
    (pa.types.is_timestamp, datetime),
)


def _require_single_precision(name: str, values: Sequence[float | None]) -> None:
    doubles = pa.array(values, pa.float64())
    back = doubles.cast(pa.float32(), safe=False).cast(pa.float64())
    changed = pc.and_(pc.not_equal(doubles, back), pc.invert(pc.is_nan(doubles)))
    first = pc.index(changed, True).as_py()
    if first >= 0:
        raise RecordError(f'column "{name}": {values[first]!r} has no exact float4; declare float8')


def _offender(values: Sequence[Any], type_: PostgresType) -> str:
    for value in values:
        try:
            pa.array([value], type_.arrow)
        except (pa.ArrowException, ValueError, OverflowError):
            return shortened(value)
    return "a value"


def _require_names(names: Sequence[str], schema: Schema) -> None:
    missing = [name for name in schema.names if name not in names]
    additional = [name for name in names if name not in schema.names]
    problems = [
        f"{what} {', '.join(repr(name) for name in found)}"
        for what, found in (("lacks", missing), ("has additional", additional))
        if found
    ]
    if problems:
        raise RecordError(f"the result {' and '.join(problems)}; declared are: {schema}")


def _cast(name: str, array: pa.Array, type_: PostgresType) -> pa.Array:
    if not _is_same_kind(array.type, type_.arrow):
        raise RecordError(f'column "{name}" came as {array.type}, declared is {type_}')
    try:
        return array.cast(type_.arrow)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise RecordError(f'column "{name}" does not fit {type_}: {error}') from error


def _is_same_kind(actual: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a checked cast can only keep each value or fail, never change it."""
    if pa.types.is_null(actual):
        return True
    if pa.types.is_list(wanted):
        return (pa.types.is_list(actual) or pa.types.is_large_list(actual)) and _is_same_kind(
            actual.value_type, wanted.value_type
        )
    for both in (pa.types.is_integer, pa.types.is_decimal, pa.types.is_time):
        if both(actual) and both(wanted):
            return True
    try:
        return bool(PostgresType.from_arrow(actual).arrow == wanted)
    except ConfigurationError:
        return False  # a type without a home in PostgreSQL: the caller names it


def _require_valid_text(name: str, array: pa.Array, type_: PostgresType) -> None:
    """Batches carry uuid and JSON as text that is known to be valid; sinks rely on it."""
    if type_.base not in ("uuid", "json", "jsonb"):
        return
    is_valid = _is_uuid if type_.base == "uuid" else _is_json
    for value in _flat(array).to_pylist():
        if value is not None and not is_valid(value):
            shown = "a canonical lower-case uuid" if type_.base == "uuid" else "valid JSON"
            raise RecordError(f'column "{name}": {shortened(value)} is not {shown}')


def _is_uuid(text: str) -> bool:
    return _UUID.fullmatch(text) is not None


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


def require_python_range(name: str, array: pa.Array) -> None:
    """Refuse dates and times that Python's types cannot hold.

    Raises:
        RecordError: Names the column.
    """
    if pa.types.is_date(array.type):
        _require_range(name, array, pa.int32(), _DATES, "the years 1 to 9999 of Python's dates")
    elif pa.types.is_timestamp(array.type):
        _require_range(name, array, pa.int64(), _TIMESTAMPS, "the years 1 to 9999 of Python's timestamps")


def _require_range(name: str, array: pa.Array, raw: pa.DataType, bounds: tuple[int, int], what: str) -> None:
    found = pc.min_max(array.cast(raw)).as_py()
    if found["min"] is not None and (found["min"] < bounds[0] or found["max"] > bounds[1]):
        raise RecordError(f'column "{name}" has a value outside of {what}')


def _flat(array: pa.Array) -> pa.Array:
    return array.flatten() if pa.types.is_list(array.type) else array


def _flat_type(arrow: pa.DataType) -> pa.DataType:
    return arrow.value_type if pa.types.is_list(arrow) else arrow
