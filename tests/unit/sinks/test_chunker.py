from __future__ import annotations

import pyarrow as pa
import pytest

from sinks.chunker import Chunker


def _batch(start: int, rows: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(range(start, start + rows), pa.int64())], names=["n"])


def _chunks(chunker: Chunker, *sizes: int) -> list[list[int]]:
    start, chunks = 0, []
    for rows in sizes:
        chunks += list(chunker.add(_batch(start, rows)))
        start += rows
    chunks += list(chunker.rest())
    return [chunk["n"].to_pylist() for chunk in chunks]


@pytest.mark.parametrize(
    ("rows_max", "size_bytes", "sizes", "expected"),
    [
        (10, 1 << 20, (3, 3, 3), [9]),
        (10, 1 << 20, (3, 3, 5), [6, 5]),
        (10, 1 << 20, (25,), [10, 10, 5]),
        (10, 1 << 20, (10, 10), [10, 10]),
        (100, 80, (4, 4, 4, 4), [12, 4]),
        (100, 80, (40,), [10, 10, 10, 10]),
        (100, 1, (3,), [1, 1, 1]),
        (10, 1 << 20, (0, 0), []),
    ],
)
def test_chunks_keep_order_and_bounds(
    rows_max: int, size_bytes: int, sizes: tuple[int, ...], expected: list[int]
) -> None:
    chunks = _chunks(Chunker(rows_max, size_bytes), *sizes)
    assert [len(chunk) for chunk in chunks] == expected
    assert [number for chunk in chunks for number in chunk] == list(range(sum(sizes)))


def test_rest_is_given_once() -> None:
    chunker = Chunker(10, 1 << 20)
    assert list(chunker.add(_batch(0, 2))) == []
    assert [chunk.num_rows for chunk in chunker.rest()] == [2]
    assert list(chunker.rest()) == []
