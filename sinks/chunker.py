"""Merging small batches and cutting large ones."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa


class Chunker:
    """Makes batches of about one size, so that each statement carries about the same amount.

    Args:
        rows_max: Most rows of a chunk.
        size_bytes: A chunk is given out as soon as it has this size; none is larger than about twice that, unless a
            single row is.
    """

    def __init__(self, rows_max: int, size_bytes: int) -> None:
        self._rows_max = rows_max
        self._size_bytes = size_bytes
        self._kept: list[pa.RecordBatch] = []
        self._rows = 0
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Take a batch; yields the chunks that are full."""
        for piece in self._pieces(batch):
            if self._rows + piece.num_rows > self._rows_max:
                yield from self.rest()
            self._kept.append(piece)
            self._rows += piece.num_rows
            self._bytes += piece.nbytes
            if self._rows >= self._rows_max or self._bytes >= self._size_bytes:
                yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """What is left, if anything."""
        kept, self._kept, self._rows, self._bytes = self._kept, [], 0, 0
        if kept:
            yield kept[0] if len(kept) == 1 else pa.concat_batches(kept)

    def _pieces(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        rows = batch.num_rows
        fitting = self._rows_max
        if batch.nbytes > 2 * self._size_bytes:
            fitting = min(fitting, max(1, rows * self._size_bytes // batch.nbytes))
        for start in range(0, rows, fitting):
            yield batch.slice(start, min(fitting, rows - start))
