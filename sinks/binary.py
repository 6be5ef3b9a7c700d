"""PostgreSQL's binary formats out of Arrow: COPY streams, and one array value a column."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pgpq
import psycopg
import pyarrow as pa
from pgpq import encoders
from pgpq import schema as pgpq_schema
from psycopg.adapt import Buffer, Dumper
from psycopg.pq import Format

from etl.errors import RecordError
from sinks.columns import Carrier, array_literals

ENCODED_ROWS = 8192
"""Rows that are encoded at once: meanwhile the server still has some to read from its socket."""

COPY_HEADER_BYTES = 19
FIELD_HEADER_BYTES = 6
ELEMENT_OID_AT = 8

# name → (OID of the type, OID of arrays of it); fixed in PostgreSQL's own catalog since these types exist.
_OIDS: Mapping[str, tuple[int, int]] = {
    "bool": (16, 1000),
    "bytea": (17, 1001),
    "int8": (20, 1016),
    "int2": (21, 1005),
    "int4": (23, 1007),
    "text": (25, 1009),
    "float4": (700, 1021),
    "float8": (701, 1022),
    "date": (1082, 1182),
    "time": (1083, 1183),
    "timestamp": (1114, 1115),
    "timestamptz": (1184, 1185),
    "numeric": (1700, 1231),
    "uuid": (2950, 2951),
}


class CopyEncoder:
    """Encodes converted batches into one binary COPY stream: ``stream`` …, ``end``."""

    def __init__(self, carriers: Sequence[Carrier]) -> None:
        schema = pa.schema([carrier.wire_field for carrier in carriers])
        builders = {carrier.name: _builder(carrier) for carrier in carriers}
        self._encoder = pgpq.ArrowToPostgresBinaryEncoder.new_with_encoders(schema, builders)
        self._started = False

    def stream(self, batch: pa.RecordBatch) -> Iterator[bytes]:
        """A batch in pieces, the stream's header before the first; the encoder keeps bytes until they are about 1 MiB.

        Raises:
            RecordError: A value has no binary form.
        """
        if not self._started:
            self._started = True
            yield bytes(self._encoder.write_header())
        for start in range(0, batch.num_rows, ENCODED_ROWS):
            yield _encoded(self._encoder, batch.slice(start, ENCODED_ROWS))

    def end(self) -> bytes:
        """What was kept, and the trailer."""
        return bytes(self._encoder.finish())


def _encoded(encoder: Any, batch: pa.RecordBatch) -> bytes:
    try:
        return bytes(encoder.write_batch(batch))
    except ValueError as error:
        raise RecordError(f"a value cannot be encoded: {error}") from None


def _builder(carrier: Carrier) -> Any:
    field = carrier.wire_field
    if carrier.home != "jsonb":
        return pgpq.ArrowToPostgresBinaryEncoder.infer_encoder(field)
    if not carrier.target.is_array:
        return encoders.StringEncoderBuilder.new_with_output(field, pgpq_schema.Jsonb())
    inner = encoders.StringEncoderBuilder.new_with_output(field.type.value_field, pgpq_schema.Jsonb())
    return encoders.ListEncoderBuilder.new_with_inner(field, inner)


class ArrayValue:
    """A whole column as one binary array parameter; subclasses fix the type's OID."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class _ArrayDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: ArrayValue) -> Buffer:
        return obj.data


_VALUES: Mapping[str, type[ArrayValue]] = {name: type(f"{name}Array", (ArrayValue,), {}) for name in _OIDS}
_DUMPERS = {
    _VALUES[name]: type(f"{name}ArrayDumper", (_ArrayDumper,), {"oid": array}) for name, (_, array) in _OIDS.items()
}


def register(cursor: psycopg.Cursor[Any]) -> None:
    """Teach a cursor to pass :class:`ArrayValue` parameters."""
    for value, dumper in _DUMPERS.items():
        cursor.adapters.register_dumper(value, dumper)


def parameter_type(carrier: Carrier) -> str:
    """Element type of the parameter that carries a column: what is not in the catalog's fixed part goes as text."""
    return "text" if carrier.target.is_array or carrier.home not in _OIDS else carrier.home


def array_parameter(carrier: Carrier, values: pa.Array) -> ArrayValue:
    """A converted column as one array parameter."""
    name = parameter_type(carrier)
    column = array_literals(carrier, values) if carrier.target.is_array else values
    # Out of bytes: pa.array imports pandas where it is installed, a quarter of a second.
    offsets = pa.Array.from_buffers(pa.int32(), 2, [None, pa.py_buffer(struct.pack("=2i", 0, len(column)))])
    one_row = pa.ListArray.from_arrays(offsets, column)
    batch = pa.record_batch([one_row], names=["a"])
    encoder = pgpq.ArrowToPostgresBinaryEncoder(batch.schema)
    stream = bytearray(encoder.write_header())
    stream += _encoded(encoder, batch)
    stream += encoder.finish()
    at = COPY_HEADER_BYTES + FIELD_HEADER_BYTES
    (size,) = struct.unpack_from("!i", stream, at - 4)
    # The encoder names the type of the Arrow values; the server insists on the parameter's own (timestamptz, uuid).
    struct.pack_into("!I", stream, at + ELEMENT_OID_AT, _OIDS[name][0])
    return _VALUES[name](bytes(memoryview(stream)[at : at + size]))
