"""What stands in for the sources and sinks of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from etl.sink import Committable, SinkWriter, rows_of
from etl.source import Position, SourceReader, Split, SplitEnumerator

SPLIT = "script"
"""The only split of a source. Its position is the number of batches read."""


class ScriptEnumerator(SplitEnumerator):
    """Finds the script."""

    def discover(self, known: Mapping[str, Position]) -> Sequence[Split]:
        """The one split, from where it was read to."""
        return [Split(SPLIT, known.get(SPLIT, {"next": 0}))]


class ScriptReader(SourceReader):
    """Reads the batches of a source.

    Args:
        batches: All of the script.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        self._batches = batches
        self._next = 0
        self._reported = 0

    @property
    def split_id(self) -> str:
        """The split of which the last batch was."""
        return SPLIT

    def touch(self) -> None:
        """Have the position stored again: what is stored with it has changed."""
        self._reported = -1

    def assign(self, splits: Sequence[Split]) -> None:
        """See :meth:`SourceReader.assign`."""
        for split in splits:
            assert split.position is not None
            self._next = self._reported = split.position["next"]

    def read_batch(self) -> pa.RecordBatch | None:
        """See :meth:`SourceReader.read_batch`."""
        if self._next == len(self._batches):
            return None
        self._next += 1
        return self._batches[self._next - 1]

    def snapshot_positions(self) -> Mapping[str, Position]:
        """See :meth:`SourceReader.snapshot_positions`."""
        if self._next == self._reported:
            return {}
        self._reported = self._next
        return {SPLIT: {"next": self._next}}

    def close(self) -> None:
        """See :meth:`SourceReader.close`."""


class CollectingWriter(SinkWriter):
    """Keeps what it is given.

    Attributes:
        staged: Batches of the unit that was closed last.
        open: Batches since then.
    """

    def __init__(self, uid: str) -> None:
        self._uid = uid
        self._rows = 0
        self.staged: list[pa.RecordBatch] = []
        self.open: list[pa.RecordBatch] = []

    @property
    def rows(self) -> int:
        """See :meth:`SinkWriter.rows`."""
        return self._rows

    def write(self, batch: pa.RecordBatch) -> None:
        """See :meth:`SinkWriter.write`."""
        self._rows += batch.num_rows
        self.open.append(batch)

    def prepare_commit(self, checkpoint_id: int) -> Committable | None:
        """See :meth:`SinkWriter.prepare_commit`."""
        self.staged, self.open = self.open, []
        if not self.staged:
            return None
        return Committable(self._uid, 0, checkpoint_id, 1, rows_of(self.staged), {})

    def close(self) -> None:
        """See :meth:`SinkWriter.close`."""
