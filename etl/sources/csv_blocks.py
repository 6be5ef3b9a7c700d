"""Cut a file's bytes into blocks that end at record borders, without reading them byte by byte in Python.

Quotes decide: a line end is a record border exactly when an even number of quotes stands before it, counted from a
record's first byte. That holds for well-formed CSV only, so every block with quotes is also matched against the whole
grammar; what does not match goes to the slow reading, which names the place.
"""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

RECORD_BYTES_MAX = 16 << 20


def _constants(type_: pa.DataType, code: str, *values: int) -> Any:
    # Out of bytes: pa.array and pa.scalar import pandas where it is installed, a quarter of a second in every run.
    return pa.Array.from_buffers(
        type_, len(values), [None, pa.py_buffer(struct.pack(f"={len(values)}{code}", *values))]
    )


_LF, _CR, _QUOTE, _LOWEST_BIT, _NO_BIT = _constants(pa.uint8(), "B", *b'\n\r"', 1, 0)
_ONE, _TWO = _constants(pa.int64(), "q", 1, 2)
_WELL_FORMED = r'\A(?:(?:"(?:[^"]|"")*"|[^",\r\n]*)(?:,|\r?\n))*\z'


def complete_bytes(data: bytes) -> int:
    """Length of the longest part of ``data`` that ends at a record border; 0 when there is no border."""
    border = data.rfind(b"\n") + 1
    if b'"' not in data:
        return border
    odd = data.count(b'"', 0, border) % 2 == 1
    while border and odd:
        # The line end stands inside quotes: borders can only lie before the quote that opened them.
        quote = data.rfind(b'"', 0, border)
        next_border = data.rfind(b"\n", 0, quote) + 1
        odd = data.count(b'"', next_border, quote) % 2 == 1
        border = next_border
    return border


def is_well_formed(block: bytes) -> bool:
    """Whether a block that ends with a line end is CSV and free of NUL characters."""
    if b"\0" in block:
        return False
    if b'"' in block:
        return bool(pc.match_substring_regex(as_one_value(block), _WELL_FORMED)[0].as_py())
    return b"\r" not in block or block.count(b"\r") == block.count(b"\r\n")


def record_ends(block: bytes, *, blank_is_record: bool) -> Any:
    """Index after each record of a well-formed block that ends with a line end, as an Arrow array of int64."""
    octets = _octets(block)
    line_ends = pc.indices_nonzero(pc.equal(octets, _LF))
    if b'"' in block:
        quotes_before = pc.cumulative_sum(pc.equal(octets, _QUOTE).cast(pa.uint8()))
        line_ends = line_ends.filter(pc.equal(pc.bit_wise_and(quotes_before.take(line_ends), _LOWEST_BIT), _NO_BIT))
    ends = pc.add(line_ends.cast(pa.int64()), _ONE)
    return ends if blank_is_record or not len(ends) else _without_blank(octets, ends)


def as_one_value(block: bytes) -> Any:
    """An Arrow array whose one binary value is the block, without a copy."""
    offsets = pa.py_buffer(struct.pack("<qq", 0, len(block)))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(block)])


def _without_blank(octets: Any, ends: Any) -> Any:
    starts = pa.concat_arrays([_constants(pa.int64(), "q", 0), ends.slice(0, len(ends) - 1)])
    lengths = pc.subtract(ends, starts)
    only_crlf = pc.and_(pc.equal(lengths, _TWO), pc.equal(octets.take(starts), _CR))
    return ends.filter(pc.invert(pc.or_(pc.equal(lengths, _ONE), only_crlf)))


def _octets(block: bytes) -> Any:
    return pa.Array.from_buffers(pa.uint8(), len(block), [None, pa.py_buffer(block)])
