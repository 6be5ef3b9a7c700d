"""How each column of a stream reaches a column of a table: exactly, or refused by name.

A *carrier* says in which Arrow type a column's values are handed to the binary encoder, which checks run first, and
whether the encoder can write them in a COPY. Three rules decide what is refused before a run starts:

* the server must not change a value on its way in: it rounds numerics and timestamps to the column's precision and
  pads ``char(n)`` without a word, so those are refused;
* what can only fail loudly (an integer out of range, a text that is no enum label) is let through and becomes a
  :class:`~etl.errors.RecordError` at the row;
* everything else is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from etl.errors import RecordError
from etl.lazy import LazyModule
from etl.schema import PostgresType
from sinks.catalog import TargetColumn, TargetType

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

VARLENA_HEADER = 4
NUMERIC_SCALE_MASK = 0x7FF
MICROSECOND_DIGITS = 6

_INTEGER_DIGITS = {"int2": 5, "int4": 10, "int8": 19}
_WIRE: dict[str, pa.DataType] = {
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "bool": pa.bool_(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", tz="UTC"),
    "bytea": pa.binary(),
    "uuid": pa.binary(),
}
_TEXTS = frozenset({"text", "varchar", "json", "jsonb"})
_HOMES: dict[str, frozenset[str]] = {
    "int2": frozenset({"int2", "int4", "int8", "numeric", "float4", "float8"}),
    "int4": frozenset({"int2", "int4", "int8", "numeric", "float8"}),
    "int8": frozenset({"int2", "int4", "int8", "numeric"}),
    "float4": frozenset({"float4", "float8"}),
    "float8": frozenset({"float8"}),
    "numeric": frozenset({"numeric"}),
    "bool": frozenset({"bool"}),
    "text": _TEXTS | {"uuid", "citext", "enum"},
    "varchar": _TEXTS | {"uuid", "citext", "enum"},
    "uuid": frozenset({"uuid", "text", "varchar"}),
    "json": _TEXTS,
    "jsonb": _TEXTS,
    "date": frozenset({"date"}),
    "time": frozenset({"time"}),
    "timestamp": frozenset({"timestamp"}),
    "timestamptz": frozenset({"timestamptz"}),
    "bytea": frozenset({"bytea"}),
}
# The encoder labels the elements of an array by their Arrow type: timestamptz as timestamp, uuid as bytea, …
_MISLABELLED_ELEMENTS = frozenset({"timestamptz", "uuid", "varchar", "json", "citext", "enum"})
# The server's own limits in Arrow's units: 4714 BC to AD 294276 (timestamps) and 5874897 (dates). Beyond them lie the
# bit patterns of infinity, which a finite value must never turn into.
_BOUNDS: dict[str, tuple[int, int]] = {
    "date": (-2_440_588, 2_145_042_905),
    "timestamp": (-210_866_803_200_000_000, 2**63 - 1),
    "timestamptz": (-210_866_803_200_000_000, 2**63 - 1),
}


@dataclass(frozen=True, slots=True)
class Carrier:
    """How one column travels.

    Attributes:
        name: The column.
        stream: Its type in the stream.
        target: Its type in the table.
        home: Family of the target type: its catalog name, or ``enum``.
    """

    name: str
    stream: PostgresType
    target: TargetType
    home: str

    @property
    def copyable(self) -> bool:
        """Whether binary COPY can carry it; arrays of some types carry another element type's id and cannot."""
        return not self.target.is_array or self.home not in _MISLABELLED_ELEMENTS

    @property
    def wire(self) -> pa.DataType:
        """Arrow type of one value (of one element, for arrays) as the encoder gets it."""
        return _wire_type(self.stream, self.home)

    @property
    def wire_field(self) -> pa.Field:
        """The field of the encoder's schema."""
        return pa.field(self.name, pa.list_(self.wire) if self.target.is_array else self.wire)

    def convert(self, values: pa.Array) -> pa.Array:
        """Bring a column into its wire type and check every value.

        Raises:
            RecordError: A value does not fit; names the column and the value.
        """
        if not self.target.is_array:
            return self._convert(values)
        elements = self._convert(values.flatten())
        return pa.ListArray.from_arrays(_offsets(values), elements, mask=_mask(values))

    def _convert(self, values: pa.Array) -> pa.Array:
        values = self._to_wire(values)
        limit = self.target.modifier - VARLENA_HEADER
        if self.home == "varchar" and self.target.modifier >= VARLENA_HEADER:
            _refuse(self.name, values, pc.greater(pc.utf8_length(values), limit), f"is longer than {limit} characters")
        if self.home in _BOUNDS:
            self._check_bounds(values, *_BOUNDS[self.home])
        return values

    def _to_wire(self, values: pa.Array) -> pa.Array:
        if self.home == "uuid":
            return _uuid_bytes(self.name, values)
        if values.type == self.wire:
            return values
        try:
            return values.cast(self.wire, safe=True)
        except pa.ArrowInvalid as error:
            raise RecordError(f'column "{self.name}" ({self.target.shown}): {str(error).splitlines()[0]}') from None

    def _check_bounds(self, values: pa.Array, lowest: int, highest: int) -> None:
        numbers = values.view(pa.int32() if self.home == "date" else pa.int64())
        ends = pc.min_max(numbers).as_py()
        if ends["min"] is not None and (ends["min"] < lowest or ends["max"] > highest):
            number = ends["min"] if ends["min"] < lowest else ends["max"]
            raise RecordError(f'column "{self.name}": {self.home} value {number} (since 1970) is out of range')


def carrier_for(name: str, stream: PostgresType, target: TargetColumn) -> Carrier | str:
    """The carrier of a column, or the reason why there is none."""
    kind = target.type
    home = _home(kind)
    refusal = f"{stream} does not fit {kind.shown} exactly"
    if stream.is_array != kind.is_array or home not in _HOMES[stream.base]:
        return refusal
    if home == "numeric" and kind.modifier >= VARLENA_HEADER and _scale_of(kind) < _wire_type(stream, home).scale:
        return f"{refusal}: the server would round to {_scale_of(kind)} decimals"
    if home in {"timestamp", "timestamptz", "time"} and 0 <= kind.modifier < MICROSECOND_DIGITS:
        return f"{refusal}: the server would round to {kind.modifier} digits of a second"
    return Carrier(name, stream, kind, home)


def _scale_of(kind: TargetType) -> int:
    """The scale in a numeric's modifier: 11 bits, signed."""
    scale = (kind.modifier - VARLENA_HEADER) & NUMERIC_SCALE_MASK
    return scale - NUMERIC_SCALE_MASK - 1 if scale > NUMERIC_SCALE_MASK // 2 else scale


def _home(kind: TargetType) -> str:
    if kind.is_enum:
        return "enum"
    return kind.name if kind.is_builtin or kind.name == "citext" else f"{kind.name} (not built in)"


def _wire_type(stream: PostgresType, home: str) -> pa.DataType:
    if home == "numeric":
        digits = _INTEGER_DIGITS.get(stream.base)
        return pa.decimal128(digits, 0) if digits else stream.element.arrow
    return _WIRE.get(home, pa.string())


def _uuid_bytes(name: str, values: pa.Array) -> pa.Array:
    texts = pl.Series(values)
    plain = texts.str.replace_all("-", "", literal=True)
    decoded = plain.str.decode("hex", strict=False)
    sizes = texts.str.len_bytes()
    good = (decoded.bin.size() == 16) & ((sizes == 36) | (sizes == 32))
    bad = texts.is_not_null() & ~good.fill_null(value=False)
    if bad.any():
        raise RecordError(f'column "{name}": {_shown(texts.filter(bad)[0])} is not a uuid')
    return decoded.to_arrow().cast(pa.binary())


def _refuse(name: str, values: pa.Array, bad: pa.Array, why: str) -> None:
    if pc.any(bad).as_py():
        first = values.filter(bad)[0].as_py()
        raise RecordError(f'column "{name}": {_shown(first)} {why}')


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _offsets(values: pa.Array) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(values), 0)
    ends = pc.cumulative_sum(lengths.cast(pa.int32()))
    return pa.concat_arrays([pa.array([0], pa.int32()), ends])


def _mask(values: pa.Array) -> pa.Array | None:
    return values.is_null() if values.null_count else None


def array_literals(carrier: Carrier, values: pa.Array) -> pa.Array:
    """Converted arrays as PostgreSQL array literals, for element types that no binary array can name."""
    texts = _element_texts(carrier.home, values.flatten())
    escaped = pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), '"', '\\"')
    quoted = pc.fill_null(pc.binary_join_element_wise('"', escaped, '"', ""), "NULL")
    joined = pc.binary_join(pa.ListArray.from_arrays(_offsets(values), quoted, mask=_mask(values)), ",")
    return pc.binary_join_element_wise("{", joined, "}", "")


def _element_texts(home: str, elements: pa.Array) -> pa.Array:
    if home in {"uuid", "bytea"}:
        digits = pl.Series(elements).bin.encode("hex").to_arrow().cast(pa.string())
        return digits if home == "uuid" else pc.binary_join_element_wise("\\x", digits, "")
    if home == "timestamptz":
        plain = elements.cast(pa.timestamp("us")).cast(pa.string())
        return pc.binary_join_element_wise(plain, "+00", "")
    return elements.cast(pa.string())
