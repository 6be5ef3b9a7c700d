"""Bytes of a chunk of state: versioned, and the same for the same rows.

::

    4 bytes  "ETLS"
    1 byte   version of the format: 1
    8 bytes  length of the stream, little-endian
    rest     an Arrow IPC stream with one batch, compressed with zstd

Every version of this package reads what every earlier one has written; stored examples in the tests see to that.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa

from etl.errors import StateError

FORMAT = 1
_MAGIC = b"ETLS"
_HEADER_BYTES = 13
_OPTIONS = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V5, unify_dictionaries=False)


def encode_rows(rows: pa.RecordBatch) -> bytes:
    """Rows as bytes."""
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, rows.schema, options=_OPTIONS) as writer:
        writer.write_batch(rows)
    size = len(stream.getbuffer()).to_bytes(8, "little")
    return _MAGIC + bytes([FORMAT]) + size + bytes(pa.compress(stream.getvalue(), codec="zstd", asbytes=True))


def decode_rows(content: bytes) -> pa.RecordBatch:
    """Bytes as rows.

    Raises:
        StateError: The bytes are no chunk, or one of a newer version; the message says which, not whose it is.
    """
    (rows,) = decode_all([content])
    return rows


def decode_all(contents: Sequence[bytes]) -> list[pa.RecordBatch]:
    """The rows of some chunks, decompressed together: to begin takes longer than to decompress a small one.

    Raises:
        StateError: One of them is no chunk, or one of a newer version; the message does not say which one.
    """
    sizes = [_stream_bytes(content) for content in contents]
    try:
        # Frames of zstd one behind the other are a frame.
        frames = b"".join(memoryview(content)[_HEADER_BYTES:] for content in contents)
        streams = pa.decompress(frames, decompressed_size=sum(sizes), codec="zstd")
        ends = accumulate(sizes)
        return [_rows_of_stream(streams.slice(end - size, size)) for size, end in zip(sizes, ends, strict=True)]
    except (pa.ArrowException, OSError, StopIteration, OverflowError, ValueError) as error:
        raise StateError(f"it cannot be decoded: {error}") from error


def _stream_bytes(content: bytes) -> int:
    """What the header says of the length of the stream."""
    if content[:4] != _MAGIC:
        raise StateError("it does not begin like a chunk of state")
    if len(content) < _HEADER_BYTES:
        raise StateError("it ends within its header")
    if content[4] != FORMAT:
        raise StateError(f"its format is {content[4]}, this version of etl reads up to {FORMAT}: install a newer one")
    return int.from_bytes(content[5:_HEADER_BYTES], "little")


def _rows_of_stream(stream: pa.Buffer) -> pa.RecordBatch:
    with pa.ipc.open_stream(stream) as reader:
        return reader.read_next_batch()


def digest(*parts: str | int | bytes) -> bytes:
    """SHA-256 over parts, each with its length, so that no part can pass for a piece of its neighbour."""
    hashed = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode()
        hashed.update(len(content).to_bytes(8, "little"))
        hashed.update(content)
    return hashed.digest()
