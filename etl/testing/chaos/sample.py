"""A source cut down to its first rows, in small batches, so that a short run still has several checkpoints.

Works with every source that can be read again: a position is the source's own position before a batch and how many
rows of what comes from there were handed out. Where batches end may change from run to run; the rows do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from etl.errors import Finding, InternalError
from etl.schema import Schema
from etl.source import Position, Progress, Source, SourceContext, SourceReader, Split, SplitEnumerator

BATCHES = 8
"""In about so many batches the rows are to come."""


@dataclass(frozen=True, slots=True)
class Sample:
    """How much of each source is read.

    Attributes:
        rows_max: Rows at most, all splits together.
        batch_rows: Rows of a batch at most.
    """

    rows_max: int
    batch_rows: int

    @classmethod
    def of(cls, rows_max: int) -> Sample:
        """The first rows, as long as nobody knows whether there are so many."""
        return cls(rows_max, -(-rows_max // BATCHES))

    def of_rows(self, rows: int) -> Sample:
        """The same rows, when it is known how many come from a source."""
        return Sample(self.rows_max, min(self.batch_rows, max(1, -(-rows // BATCHES))))


class SampledSource(Source):
    """The first rows of a source, in its reading order.

    Args:
        source: What is read.
        sample: How much of it.
    """

    def __init__(self, source: Source, sample: Sample) -> None:
        self._source = source
        self._sample = sample

    @property
    def schema(self) -> Schema:
        """The source's."""
        return self._source.schema

    def preflight(self, context: SourceContext) -> Sequence[Finding]:
        """The source's."""
        return self._source.preflight(context)

    def describe(self) -> str:
        """The source, and how much of it."""
        return f"the first {self._sample.rows_max} rows of {self._source.describe()}"

    def create_enumerator(self, context: SourceContext) -> SplitEnumerator:
        """Lists the source's splits, as long as rows are wanted."""
        return _Enumerator(self._source.create_enumerator(context), self._sample.rows_max)

    def create_reader(self, context: SourceContext) -> SourceReader:
        """Reads with the source's reader."""
        return _Reader(self._source.create_reader(context), self._sample)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the next read of a split starts.

    Attributes:
        before: The source's position, None at the beginning.
        skip: Rows from there that were handed out already.
        given: Rows of the split that were handed out in all.
    """

    before: Position | None = None
    skip: int = 0
    given: int = 0

    @classmethod
    def of(cls, position: Position | None) -> _Place:
        return cls() if position is None else cls(position["before"], position["skip"], position["given"])

    def to_json(self) -> dict[str, Any]:
        before = None if self.before is None else dict(self.before)
        return {"before": before, "skip": self.skip, "given": self.given}


class _Enumerator(SplitEnumerator):
    def __init__(self, splits: SplitEnumerator, rows_max: int) -> None:
        self._splits = splits
        self._rows_max = rows_max

    def discover(self, known: Mapping[str, Position]) -> Sequence[Split]:
        places = {split_id: _Place.of(position) for split_id, position in known.items()}
        given = sum(place.given for place in places.values())
        if given >= self._rows_max:
            return []
        found = self._splits.discover({name: one.before for name, one in places.items() if one.before is not None})
        # The reader is told how many rows came from splits that it will not see again.
        return [Split(split.id, {**self._place(places, split).to_json(), "given_by_all": given}) for split in found]

    def _place(self, places: Mapping[str, _Place], split: Split) -> _Place:
        return places.get(split.id) or _Place(split.position)


class _Reader(SourceReader):
    def __init__(self, reader: SourceReader, sample: Sample) -> None:
        self._reader = reader
        self._rows_max = sample.rows_max
        self._batch_rows = sample.batch_rows
        self._given = 0
        self._order: list[str] = []
        self._places: dict[str, _Place] = {}
        self._moved: dict[str, _Place] = {}
        self._current = _Current()

    def assign(self, splits: Sequence[Split]) -> None:
        for split in splits:
            assert split.position is not None
            self._given = max(self._given, int(split.position["given_by_all"]))
            self._places[split.id] = _Place.of(split.position)
            self._order.append(split.id)
        self._reader.assign([Split(split.id, self._places[split.id].before) for split in splits])

    def read_batch(self) -> pa.RecordBatch | None:
        while self._given < self._rows_max:
            if self._current.rest and (piece := self._take()) is not None:
                return piece
            batch = self._reader.read_batch()
            if batch is None:
                return None
            self._begin(batch)
        return None

    @property
    def split_id(self) -> str:
        return self._current.split_id

    def _begin(self, batch: pa.RecordBatch) -> None:
        after = self._reader.snapshot_positions()
        if not after:
            raise InternalError("the source returned rows and no position moved: they would be read again")
        # Splits are read one after the other: the last that moved is the one that the batch came from.
        split_id = max(after, key=self._order.index)
        for other in after.keys() - {split_id}:
            self._moved[other] = self._places[other] = _Place(after[other], 0, self._places[other].given)
        self._current = _Current(batch, split_id, after[split_id])

    def _take(self) -> pa.RecordBatch | None:
        """Some of the rows; None when the batch held only such as were handed out by a former run."""
        current, place = self._current, self._places[self._current.split_id]
        skipped = min(max(place.skip - current.used, 0), current.rest)
        current.used += skipped
        size = min(self._batch_rows, self._rows_max - self._given, current.rest)
        piece = current.batch.slice(current.used, size)
        current.used += size
        self._given += size
        given = place.given + size
        if current.rest:
            place = _Place(place.before, current.used, given)
        else:
            place = _Place(current.after, max(place.skip - current.used, 0), given)
        self._places[current.split_id] = place
        if size:
            self._moved[current.split_id] = place
        return piece if size else None

    def snapshot_positions(self) -> Mapping[str, Position]:
        moved, self._moved = self._moved, {}
        return {split_id: place.to_json() for split_id, place in moved.items()}

    def progress(self) -> Progress:
        return self._reader.progress()

    def close(self) -> None:
        self._reader.close()


class _Current:
    """The batch that is being handed out."""

    def __init__(self, batch: pa.RecordBatch | None = None, split_id: str = "", after: Position | None = None) -> None:
        self.batch: pa.RecordBatch = batch
        self.split_id = split_id
        self.after = after
        self.used = 0

    @property
    def rest(self) -> int:
        """Rows of it that are still to be handed out."""
        return 0 if self.batch is None else self.batch.num_rows - self.used
