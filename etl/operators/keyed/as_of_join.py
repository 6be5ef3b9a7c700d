"""Each row with the version of its key that was valid when it happened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from etl.event_time import FOREVER
from etl.joins import AsOfJoin
from etl.operators.exact import frame_of
from etl.operators.keyed.columns import Ids
from etl.operators.keyed.grouping import ROW, first_rows
from etl.operators.keyed.join_rows import WaitingRows, in_pieces
from etl.operators.keyed.joining import LEAST, JoinOperator, columns_of, known_keys, taken
from etl.operators.keyed.key_index import KeyIndex
from etl.operators.keyed.key_times import NONE, KeyNumbers, KeyTimes
from etl.operators.keyed.time_queue import Moments
from etl.schema import Schema


class AsOfJoinOperator(JoinOperator):
    """Rows of the left wait until all versions that began before them have come; versions stay until none needs them.

    A version that comes late is told as such, for rows may have gone out without it; those that follow get it.
    """

    takes_late = (False, True)

    def __init__(self, transformation: AsOfJoin, inputs: Sequence[Schema], output_schema: Schema) -> None:
        stored = transformation.keys
        self._left = WaitingRows(inputs[0], transformation.keys, stored, transformation.times[0])
        self._versions = Versions(inputs[1], transformation.right_keys, stored, transformation.times[1])
        super().__init__(transformation, inputs, output_schema, (self._left, self._versions))
        self._keeps_left = transformation.how.keeps[0]

    def advance(self, watermark: int) -> Iterator[pa.RecordBatch]:
        """Rows that happened before it go out with their versions, and versions that no later row can need go."""
        self.watermark = watermark
        ids = self._left.due(watermark if watermark == FOREVER else watermark - 1)
        for some in in_pieces(ids):
            yield self._results(some)
        self._left.remove(ids)
        self._versions.outdate(watermark)

    def _take(self, number: int, batch: pa.RecordBatch, moments: Moments) -> Iterable[pa.RecordBatch]:
        side = self.sides[number]
        known = known_keys(side.keys_of(batch))
        if known.any():
            side.add(taken(batch, known), moments[known])
        if number == 0 and self._keeps_left and not known.all():
            yield self._result(columns_of(taken(batch, ~known)), None, int((~known).sum()))

    def _results(self, ids: Ids) -> pa.RecordBatch:
        """Rows of the left in the order of time, each with its version, or alone if that is wanted."""
        rows = self._left.columns(ids)
        versions = self._versions.valid_at(self._left.keys_of(rows), self._left.moments_of(rows))
        found = versions != NONE
        if not self._keeps_left:
            ids, versions, found = ids[found], versions[found], found[found]
        valid = self._versions.columns(versions[found])
        places = pa.array(np.cumsum(found) - 1, mask=~found)
        beside = {name: column.take(places) for name, column in valid.items()}
        return self._result(self._left.columns(ids), beside, len(ids))


class Versions(WaitingRows):
    """What was valid from when on, by key.

    Args:
        schema: See :class:`WaitingRows`.
        keys: See there.
        stored_keys: See there.
        time: The column that says from when on a version is valid.
    """

    def __init__(self, schema: Schema, keys: Sequence[str], stored_keys: Sequence[str], time: str) -> None:
        super().__init__(schema, keys, stored_keys, time)
        # Keys have numbers of their own, since hashes may be shared, and stay: of each there is a version for ever.
        self._numbers = KeyIndex([schema[name].arrow for name in keys])
        self._times = KeyTimes()

    def valid_at(self, keys: Sequence[pa.Array], moments: Moments) -> Ids:
        """For each key the version at a moment: the latest one, of those that begin together the one that came last.

        Returns:
            :data:`etl.operators.keyed.key_times.NONE` where there is none.
        """
        self._note_restored()
        numbers = self._numbers.find(keys)
        # What has no number is so high that nothing has it.
        return self._times.latest(numbers.view(np.uint64), moments)

    def outdate(self, moment: int) -> None:
        """Forget the versions that are not valid any more at a moment, nor later."""
        begun = self.due(moment)
        if not len(begun):
            return
        numbers = np.unique(self._number(self.keys_of(self.columns(begun))))
        until = np.full(len(numbers), moment)
        valid = self._times.latest(numbers, until)
        for _, ids in list(self._times.within(numbers, np.full(len(numbers), LEAST), until)):
            self.remove(np.setdiff1d(ids, valid))

    def remove(self, ids: Ids) -> None:
        """See :meth:`WaitingRows.remove`."""
        self._times.remove(ids)
        super().remove(ids)

    def _note(self, ids: Ids, keys: Sequence[pa.Array], moments: Moments) -> None:
        super()._note(ids, keys, moments)
        self._times.add(self._number(keys), moments, ids)

    def _number(self, keys: Sequence[pa.Array]) -> KeyNumbers:
        numbers = self._numbers.find(keys)
        missing = pa.array(np.flatnonzero(numbers == NONE))
        if len(missing):
            new = pa.RecordBatch.from_arrays(
                [column.take(missing) for column in keys], [f"key_{number}" for number in range(len(keys))]
            )
            self._numbers.add(new.take(first_rows(frame_of(new))[ROW].to_arrow()).columns)
            numbers = self._numbers.find(keys)
        return numbers.view(np.uint64)
