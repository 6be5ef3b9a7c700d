"""Schemas in PostgreSQL's own type names, and the Arrow types their values travel in.

============================  =========================  =====================================
PostgreSQL                    Arrow in a batch           note
============================  =========================  =====================================
int2, int4, int8              int16, int32, int64
float4, float8                float32, float64
numeric(p,s), p <= 38         decimal128(p, s)           exact; s may not exceed p
bool                          bool
text, varchar, varchar(n)     string
date                          date32
time                          time64[us]
timestamp                     timestamp[us]
timestamptz                   timestamp[us, UTC]
uuid                          string                     canonical lower-case text
jsonb, json                   string                     validated text
bytea                         binary
T[] of any of the above       list<T>                    one dimension, NULL elements allowed
============================  =========================  =====================================

Types that Arrow cannot carry exactly are refused by name here, before a run starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import pyarrow as pa

from etl.errors import ConfigurationError, Finding

NUMERIC_PRECISION_MAX = 38
IDENTIFIER_BYTES_MAX = 63

_SCALARS: dict[str, pa.DataType] = {
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "bool": pa.bool_(),
    "text": pa.string(),
    "varchar": pa.string(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", tz="UTC"),
    "uuid": pa.string(),
    "json": pa.string(),
    "jsonb": pa.string(),
    "bytea": pa.binary(),
}

_ALIASES: dict[str, str] = {
    "smallint": "int2",
    "integer": "int4",
    "int": "int4",
    "bigint": "int8",
    "real": "float4",
    "float": "float8",
    "double precision": "float8",
    "boolean": "bool",
    "decimal": "numeric",
    "character varying": "varchar",
    "string": "text",
    "timestamp without time zone": "timestamp",
    "timestamp with time zone": "timestamptz",
    "time without time zone": "time",
}

_TYPE = re.compile(r"(?P<base>[a-z][a-z0-9 ]*?)\s*(?:\(\s*(?P<args>[0-9,\s]+)\))?\s*(?P<array>\[\s*\])?")


@dataclass(frozen=True, slots=True)
class PostgresType:
    """A column type by its PostgreSQL name.

    Attributes:
        name: Canonical spelling, e.g. ``int8``, ``numeric(12,2)``, ``text[]``.
        arrow: The Arrow type in which a batch carries its values.
    """

    name: str
    arrow: pa.DataType

    @classmethod
    def parse(cls, text: str) -> PostgresType:
        """Read a declaration such as ``"numeric(12, 2)"`` or ``"bigint[]"``.

        Raises:
            ConfigurationError: The type is unknown or cannot be carried exactly; the message says which.
        """
        match = _TYPE.fullmatch(text.strip().lower())
        if match is None:
            raise ConfigurationError(f'"{text}" is not a column type')
        base = _ALIASES.get(match["base"], match["base"])
        arguments = [int(number) for number in (match["args"] or "").split(",") if number.strip()]
        scalar = _scalar(text, base, arguments)
        if match["array"] is None:
            return scalar
        return cls(f"{scalar.name}[]", pa.list_(scalar.arrow))

    @classmethod
    def from_arrow(cls, arrow: pa.DataType) -> PostgresType:
        """The PostgreSQL type that holds every value of an Arrow type exactly.

        Raises:
            ConfigurationError: No PostgreSQL type is an exact home; cast the column first.
        """
        if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
            element = cls.from_arrow(arrow.value_type)
            if element.is_array:
                raise ConfigurationError(
                    f"nested lists ({arrow}) have no column type; flatten them or make them JSON text"
                )
            return cls(f"{element.name}[]", pa.list_(element.arrow))
        if pa.types.is_decimal128(arrow):
            return cls.parse(f"numeric({arrow.precision},{arrow.scale})")
        if pa.types.is_timestamp(arrow):
            if arrow.unit == "ns":
                raise ConfigurationError("timestamps in ns do not fit PostgreSQL's microseconds; cast to 'us' first")
            return cls.parse("timestamptz" if arrow.tz else "timestamp")
        for accepts, name in _FROM_ARROW:
            if accepts(arrow):
                return cls.parse(name)
        raise ConfigurationError(f"Arrow type {arrow} has no exact PostgreSQL type; cast the column first")

    @property
    def is_array(self) -> bool:
        """Whether values are arrays."""
        return self.name.endswith("[]")

    @property
    def element(self) -> PostgresType:
        """The type of an array's elements; the type itself when it is no array."""
        return PostgresType.parse(self.name.removesuffix("[]"))

    @property
    def base(self) -> str:
        """The name without arguments and brackets: ``numeric`` for ``numeric(12,2)[]``."""
        return self.name.removesuffix("[]").partition("(")[0]

    def __str__(self) -> str:
        return self.name


_FROM_ARROW = (
    (pa.types.is_boolean, "bool"),
    (lambda t: pa.types.is_int8(t) or pa.types.is_int16(t) or pa.types.is_uint8(t), "int2"),
    (lambda t: pa.types.is_int32(t) or pa.types.is_uint16(t), "int4"),
    (lambda t: pa.types.is_int64(t) or pa.types.is_uint32(t), "int8"),
    (pa.types.is_uint64, "numeric(20,0)"),
    (lambda t: pa.types.is_float32(t) or pa.types.is_float16(t), "float4"),
    (pa.types.is_float64, "float8"),
    (lambda t: pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_string_view(t), "text"),
    (lambda t: pa.types.is_binary(t) or pa.types.is_large_binary(t) or pa.types.is_binary_view(t), "bytea"),
    (pa.types.is_date32, "date"),
    (lambda t: pa.types.is_time32(t) or (pa.types.is_time64(t) and t.unit == "us"), "time"),
)


def _scalar(text: str, base: str, arguments: list[int]) -> PostgresType:
    if base == "numeric":
        return _numeric(text, arguments)
    if base not in _SCALARS:
        known = ", ".join(sorted([*_SCALARS, "numeric(p,s)"]))
        raise ConfigurationError(f'column type "{text}" is not supported; known types: {known}, and arrays of them')
    if base == "varchar" and len(arguments) == 1:
        return PostgresType(f"varchar({arguments[0]})", pa.string())
    if arguments:
        raise ConfigurationError(f'column type "{text}" takes no arguments here; declare "{base}"')
    return PostgresType(base, _SCALARS[base])


def _numeric(text: str, arguments: list[int]) -> PostgresType:
    if not arguments:
        raise ConfigurationError(f'"{text}" has no bounds; declare numeric(precision,scale) with precision <= 38')
    precision, scale = arguments[0], arguments[1] if len(arguments) > 1 else 0
    if len(arguments) > 2 or not 1 <= precision <= NUMERIC_PRECISION_MAX or scale > precision:
        raise ConfigurationError(f'"{text}" is out of bounds; 1 <= precision <= 38 and scale <= precision')
    return PostgresType(f"numeric({precision},{scale})", pa.decimal128(precision, scale))


@dataclass(frozen=True, slots=True)
class Field:
    """One named column."""

    name: str
    type: PostgresType


@dataclass(frozen=True, slots=True)
class Schema:
    """The ordered columns of a stream, known before the run."""

    fields: tuple[Field, ...]

    @classmethod
    def declare(cls, columns: Mapping[str, str]) -> Self:
        """Build a schema from ``{"column": "type"}``.

        Raises:
            ConfigurationError: Lists every bad name and type at once.
        """
        findings: list[Finding] = []
        fields: list[Field] = []
        for name, text in columns.items():
            findings += name_findings(name)
            try:
                fields.append(Field(name, PostgresType.parse(text)))
            except ConfigurationError as error:
                findings.append(Finding(f'column "{name}"', str(error), "change its declared type"))
        if not columns:
            findings.append(Finding("schema", "it has no columns", "declare at least one"))
        if findings:
            raise ConfigurationError.from_findings("schema", findings)
        return cls(tuple(fields))

    @classmethod
    def from_arrow(cls, arrow: pa.Schema, *, inherit: Schema | None = None) -> Self:
        """The schema of Arrow columns; a column keeps its declared type where name and Arrow type are unchanged.

        Strings in all three Arrow layouts (string, large_string, string_view) count as unchanged, and so do
        binaries and lists, because polars hands back other layouts than it was given.
        """
        declared = {field.name: field.type for field in inherit} if inherit else {}
        fields = []
        for column in arrow:
            derived = PostgresType.from_arrow(column.type)
            before = declared.get(column.name)
            kept = before if before is not None and before.arrow == derived.arrow else derived
            fields.append(Field(column.name, kept))
        return cls(tuple(fields))

    def to_arrow(self) -> pa.Schema:
        """The Arrow schema in which batches of this stream travel."""
        return pa.schema([pa.field(field.name, field.type.arrow) for field in self.fields])

    @property
    def names(self) -> tuple[str, ...]:
        """Column names in order."""
        return tuple(field.name for field in self.fields)

    def __getitem__(self, name: str) -> PostgresType:
        for field in self.fields:
            if field.name == name:
                return field.type
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {field.type}" for field in self.fields)


def name_findings(name: str) -> list[Finding]:
    """What is wrong with the name of a column: empty, too long for the server, or with a NUL character."""
    size_bytes = len(name.encode())
    if not 1 <= size_bytes <= IDENTIFIER_BYTES_MAX:
        problem = f"the name has {size_bytes} bytes, PostgreSQL allows 1 to {IDENTIFIER_BYTES_MAX}"
        return [Finding(f'column "{name}"', problem, "choose a shorter name")]
    if "\0" in name:
        return [Finding(f"column {name!r}", "the name contains a NUL character", "choose another name")]
    return []
