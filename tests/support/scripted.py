"""A source that plays a script: numbered rows in batches, with things to do in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from etl.schema import Schema
from etl.source import Position, Source, SourceContext, SourceReader, Split, SplitEnumerator

COLUMNS = Schema.declare({"id": "int8", "name": "text"})


def rows(start: int, count: int) -> pa.RecordBatch:
    """``count`` rows with ids from ``start`` on."""
    ids = range(start, start + count)
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "name": pa.array([f"n{i}" for i in ids])})


@dataclass(frozen=True, slots=True)
class Numbers(Source):
    """Rows ``first`` to ``first + count - 1`` in one split.

    Attributes:
        count: How many.
        first: The first id.
        batch_rows: Rows of a batch.
        before: Called with the id of the first row of each batch before it is returned; may raise.
    """

    count: int
    first: int = 0
    batch_rows: int = 2
    before: Callable[[int], None] = field(default=lambda _id: None)

    @property
    def schema(self) -> Schema:
        return COLUMNS

    def create_enumerator(self, context: SourceContext) -> SplitEnumerator:
        return _Enumerator(self)

    def create_reader(self, context: SourceContext) -> SourceReader:
        return _Reader(self)


class _Enumerator(SplitEnumerator):
    def __init__(self, source: Numbers) -> None:
        self._source = source

    def discover(self, known: Mapping[str, Position]) -> Sequence[Split]:
        position = known.get("numbers", {"next": 0})
        return [Split("numbers", position)] if position["next"] < self._source.count else []


class _Reader(SourceReader):
    def __init__(self, source: Numbers) -> None:
        self._source = source
        self._next: int | None = None
        self._reported: int | None = None

    def assign(self, splits: Sequence[Split]) -> None:
        for split in splits:
            assert split.position is not None
            self._next = self._reported = int(split.position["next"])

    def read_batch(self) -> pa.RecordBatch | None:
        if self._next is None or self._next >= self._source.count:
            return None
        first = self._source.first + self._next
        self._source.before(first)
        size = min(self._source.batch_rows, self._source.count - self._next)
        self._next += size
        return rows(first, size)

    def snapshot_positions(self) -> Mapping[str, Position]:
        if self._next == self._reported or self._next is None:
            return {}
        self._reported = self._next
        return {"numbers": {"next": self._next}}

    def close(self) -> None:
        return None
