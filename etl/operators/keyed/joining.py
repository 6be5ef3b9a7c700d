"""What the joins of two streams have in common: sides, late rows, and the columns of their results."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import pyarrow as pa

from etl.joins import SIDES, Join
from etl.operator import LATE, LATE_RIGHT, Output, SideOutput
from etl.operators.exact import placed
from etl.operators.keyed.columns import Flags
from etl.operators.keyed.join_rows import Columns, WaitingRows
from etl.operators.keyed.key_times import Numbers
from etl.operators.keyed.state import KeyedTables
from etl.operators.keyed.time_queue import Moments
from etl.schema import Schema
from etl.state import Fragment, StateCut, StatefulOperator

LEAST = -(1 << 63)
"""No moment is before it."""

_TAGS = (LATE, LATE_RIGHT)


class JoinOperator(StatefulOperator):
    """Keeps the rows of two inputs by key and time.

    Args:
        transformation: What was declared.
        inputs: Columns of both sides.
        output_schema: Columns of the results.
        sides: What keeps the rows of each.

    Attributes:
        uid: See :class:`~etl.state.StatefulOperator`.
        takes_late: By side, whether late rows are not only told as such, but taken as well.
        sides: Rows of the left and the right.
        watermark: How far event time has come.
    """

    takes_late: ClassVar[tuple[bool, bool]] = (False, False)

    def __init__(
        self,
        transformation: Join,
        inputs: Sequence[Schema],
        output_schema: Schema,
        sides: Sequence[WaitingRows],
    ) -> None:
        self.uid = transformation.uid
        self._transformation = transformation
        self._schema = output_schema.to_arrow()
        self.sides = tuple(sides)
        self._tables = KeyedTables(self.uid, {name: side.table for name, side in zip(SIDES, self.sides, strict=True)})
        self._left_names = inputs[0].names
        self._right_names = [field.name for field in transformation.right_values(inputs[1])]
        self._right_keys = dict(zip(transformation.keys, transformation.right_keys, strict=True))
        self.watermark = LEAST
        self._late_rows = 0

    def entry(self, number: int) -> Callable[[pa.RecordBatch], Iterable[Output]]:
        """What takes the rows of a side: late ones go out beside the results."""
        return partial(self._receive, number)

    def process(self, batch: pa.RecordBatch) -> Iterable[Output]:
        """Take rows of the left."""
        return self._receive(0, batch)

    def resume(self, watermark: int) -> None:
        """See :meth:`etl.state.StatefulOperator.resume`."""
        self.watermark = watermark

    def restore(self, fragments: Sequence[Fragment]) -> None:
        """See :meth:`etl.state.StatefulOperator.restore`."""
        self._tables.restore(fragments)

    def cut(self) -> StateCut:
        """See :meth:`etl.state.StatefulOperator.cut`."""
        late_rows, self._late_rows = self._late_rows, 0
        return self._tables.cut(None if self.watermark == LEAST else self.watermark, late_rows)

    def _receive(self, number: int, batch: pa.RecordBatch) -> Iterator[Output]:
        with placed(self._transformation):
            moments = self.sides[number].moments_of(batch)
            is_late = moments < self.watermark
            if is_late.any():
                late = batch.filter(pa.array(is_late))
                self._late_rows += len(late)
                yield SideOutput(_TAGS[number], late)
                if not self.takes_late[number]:
                    batch, moments = batch.filter(pa.array(~is_late)), moments[~is_late]
            if len(batch):
                yield from self._take(number, batch, moments)

    @abstractmethod
    def _take(self, number: int, batch: pa.RecordBatch, moments: Moments) -> Iterable[pa.RecordBatch]:
        """Rows of a side; no late ones, unless they are wanted."""

    def _result(self, left: Columns | None, right: Columns | None, rows: int) -> pa.RecordBatch:
        """Rows of results; the columns of a side that is not there are NULL, but its key is that of the other one."""
        columns = (
            left
            if left is not None
            else {own: right[other] for own, other in self._right_keys.items() if right is not None}
        )
        beside: Columns = right if right is not None else {}
        arrays = [columns.get(name) for name in self._left_names] + [beside.get(name) for name in self._right_names]
        return pa.RecordBatch.from_arrays(
            [
                pa.nulls(rows, field.type) if array is None else array
                for field, array in zip(self._schema, arrays, strict=True)
            ],
            schema=self._schema,
        )


def known_keys(keys: Sequence[pa.Array]) -> Flags:
    """Where a key has no NULL in it: only such ones are the same as any other."""
    known: Flags = np.logical_and.reduce([np.asarray(column.is_valid()) for column in keys])
    return known


def taken(batch: pa.RecordBatch, rows: Flags | Numbers) -> pa.RecordBatch:
    """Some rows of a batch, told by their places or by flags."""
    if rows.dtype == np.bool_:
        return batch if rows.all() else batch.filter(pa.array(rows))
    return batch.take(pa.array(rows))


def columns_of(batch: pa.RecordBatch) -> Mapping[str, pa.Array]:
    """The columns of a batch by name."""
    return dict(zip(batch.schema.names, batch.columns, strict=True))
