"""Key groups: the parts into which keyed state is cut, so that parallelism may change between runs.

A key is hashed to 64 bits, the same on every machine and in every version: the hash decides where state is stored.
The upper bits number its key group, of which there are :data:`KEY_GROUPS`, whatever the parallelism; a subtask owns a
range of them. Two keys may share a hash; nothing here or elsewhere takes equal hashes for equal keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from etl.errors import InternalError

KEY_GROUPS = 128
"""Number of key groups, and so the highest parallelism. A stored number: it never changes."""

Hashes = npt.NDArray[np.uint64]

_GROUP_SHIFT = np.uint64(64 - 7)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_NULL = np.uint64(0x6E756C6C)
_WORD_BYTES = 8
_LONG_BYTES = 256
"""Texts beyond this are digested one by one: a step for each word of the longest would be a step of all."""


def hash_keys(columns: Sequence[pa.Array]) -> Hashes:
    """One 64-bit hash a row, from all columns in their order; NULL is a value like any other.

    Integers of any width with the same value have the same hash, and so have 0.0 and -0.0, and all NaNs.

    Args:
        columns: At least one, of equal length, of any type but lists.
    """
    hashes = np.full(len(columns[0]), _GOLDEN, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            present = _present(column)
            of_column = np.zeros(len(column), dtype=np.uint64)
            for word in _words(column):
                of_column = _mixed(of_column * _GOLDEN ^ word)
            hashes = _mixed(hashes * _GOLDEN ^ np.where(present, of_column, _NULL))
    return hashes


def hash_within_groups(columns: Sequence[pa.Array], grouped_by: int) -> Hashes:
    """Like :func:`hash_keys` of all columns, but in the key group of the first ``grouped_by`` ones.

    So that what is remembered of a key under several names, like its windows, lies where the key's rows go.
    """
    if grouped_by == len(columns):
        return hash_keys(columns)
    within = (np.uint64(1) << _GROUP_SHIFT) - np.uint64(1)
    hashes: Hashes = (hash_keys(columns[:grouped_by]) & ~within) | (hash_keys(columns) & within)
    return hashes


def groups_of_hashes(hashes: Hashes) -> npt.NDArray[np.int64]:
    """The key group of each hash, 0 to :data:`KEY_GROUPS` - 1."""
    return (hashes >> _GROUP_SHIFT).astype(np.int64)


def groups_of_subtask(subtask: int, parallelism: int) -> range:
    """The key groups that one of several parallel subtasks owns."""
    return range(-(-subtask * KEY_GROUPS // parallelism), -(-(subtask + 1) * KEY_GROUPS // parallelism))


def subtasks_of_hashes(hashes: Hashes, parallelism: int) -> npt.NDArray[np.int64]:
    """The subtask that owns each hash's key group."""
    return groups_of_hashes(hashes) * parallelism // KEY_GROUPS


def _present(column: pa.Array) -> npt.NDArray[np.bool_]:
    if column.null_count == 0:
        return np.ones(len(column), dtype=np.bool_)
    return np.asarray(column.is_valid())


def _is_wordy(arrow: pa.DataType) -> bool:
    is_number = pa.types.is_integer(arrow) or pa.types.is_boolean(arrow) or pa.types.is_temporal(arrow)
    return bool(is_number and not pa.types.is_interval(arrow))


def _is_bytes(arrow: pa.DataType) -> bool:
    return bool(pa.types.is_string(arrow) or pa.types.is_binary(arrow))


def _words(column: pa.Array) -> list[Hashes]:
    """A column's values as words of 64 bits, what NULLs yield is not looked at."""
    arrow = column.type
    if _is_bytes(arrow):
        return [_hashed_bytes(column)]
    if pa.types.is_decimal128(arrow):
        halves = np.frombuffer(column.buffers()[1], dtype="<u8") if len(column) else np.zeros(0, dtype=np.uint64)
        rows = halves.reshape(-1, 2)[column.offset : column.offset + len(column)]
        return [rows[:, 0], rows[:, 1]]
    if pa.types.is_floating(arrow):
        values = np.array(column.cast(pa.float64()).fill_null(0.0)) + 0.0
        values[np.isnan(values)] = np.nan
        return [values.view(np.uint64)]
    if _is_wordy(arrow):
        return [np.array(_as_int64(column).fill_null(0)).view(np.uint64)]
    raise InternalError(f"values of Arrow type {arrow} cannot be keys")


def _as_int64(column: pa.Array) -> pa.Array:
    if pa.types.is_date32(column.type) or pa.types.is_time32(column.type):
        return column.cast(pa.int32()).cast(pa.int64())
    return column.cast(pa.int64())


def _hashed_bytes(column: pa.Array) -> Hashes:
    rows = len(column)
    _, offsets_buffer, data = column.buffers()
    if rows == 0:
        return np.zeros(0, dtype=np.uint64)
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32)[column.offset : column.offset + rows + 1].astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    content = (memoryview(data)[first:last].tobytes() if data is not None else b"") + bytes(_WORD_BYTES)
    starts, lengths = offsets[:-1] - first, np.diff(offsets)
    hashes = _mixed(lengths.astype(np.uint64) ^ _GOLDEN)
    for row in np.flatnonzero(lengths > _LONG_BYTES):
        digest = hashlib.blake2b(content[starts[row] : starts[row] + lengths[row]], digest_size=_WORD_BYTES)
        hashes[row] = int.from_bytes(digest.digest(), "little")
    short = np.where(lengths > _LONG_BYTES, 0, lengths)
    # A view of the bytes with a word at every byte: texts begin anywhere.
    words = np.ndarray((len(content) - _WORD_BYTES + 1,), dtype="<u8", buffer=content, strides=(1,))
    for done in range(0, int(short.max(initial=0)), _WORD_BYTES):
        open_rows = np.flatnonzero(short > done)
        word = words[starts[open_rows] + done]
        unused = np.maximum(_WORD_BYTES - (short[open_rows] - done), 0).astype(np.uint64) * np.uint64(8)
        hashes[open_rows] = _mixed(hashes[open_rows] * _GOLDEN ^ (word << unused))
    return hashes


def _mixed(words: Hashes) -> Hashes:
    """Every bit of the result depends on every bit given (the finaliser of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * _MULTIPLIERS[0]
    words = (words ^ (words >> np.uint64(27))) * _MULTIPLIERS[1]
    return words ^ (words >> np.uint64(31))
