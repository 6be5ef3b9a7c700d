"""Python functions that remember something of each key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from etl.errors import EtlError, RecordError
from etl.keyed import Process
from etl.operators.calling import RAISED, failure, name_of
from etl.operators.exact import RowShape, batch_of_values, placed, rows_of
from etl.operators.keyed.columns import Ids
from etl.operators.keyed.grouping import first_rows, key_arrays, key_frame
from etl.operators.keyed.handles import Cursor, KeyStates, handle_for
from etl.operators.keyed.state import KeyedState
from etl.operators.rows import ROWS_MAX
from etl.schema import Schema
from etl.state import Fragment, StateCut, StatefulOperator
from etl.transformation import Row


class ProcessOperator(StatefulOperator):
    """Calls a function with each row and the state of its key."""

    def __init__(self, transformation: Process, input_schema: Schema, output_schema: Schema) -> None:
        self.uid = transformation.uid
        self._transformation = transformation
        self._keys = transformation.key_fields(input_schema)
        self._schema = output_schema
        self._shape = RowShape(output_schema)
        self._name = name_of(transformation.function)
        self._cursor = Cursor()
        types = transformation.state_types()
        handles = {
            name: handle_for(name, spec, types[name], self._cursor) for name, spec in transformation.states.items()
        }
        self._seen = KeyStates(handles)
        self._columns = {name: handle.column for name, handle in handles.items()}
        self._state = KeyedState(self.uid, {field.name: field.type.arrow for field in self._keys}, self._columns)
        self._function = transformation.function

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """What the function yields for each row, in batches of at most :data:`etl.operators.rows.ROWS_MAX` rows."""
        with placed(self._transformation):
            frame = key_frame(batch, self._keys)
            ids = self._state.add(key_arrays(first_rows(frame), self._keys)).ids
            found: list[tuple[Any, ...]] = []
            for returned in self._called(self._state.find(key_arrays(frame, self._keys)), rows_of(batch)):
                # the values are taken at once: a generator may yield one dict again and again
                found.append(self._shape.values(returned))
                if len(found) == ROWS_MAX:
                    yield batch_of_values(found, self._schema)
                    found = []
            self._settle(ids)
            yield batch_of_values(found, self._schema)

    def _called(self, ids: Ids, rows: Iterable[Row]) -> Iterator[Any]:
        """What the function returns for rows, one after the other.

        One ``try`` around all of them: this loop is what a job of such functions spends its time in.
        """
        row: Row = {}
        cursor, seen, function = self._cursor, self._seen, self._function
        try:
            for cursor.id, row in zip(ids.tolist(), rows, strict=True):
                returned: object = function(row, seen)
                if returned is not None:
                    yield from self._required_rows(returned)
        except EtlError:
            raise
        except RAISED as error:
            raise failure(self._transformation, function, error, row) from error

    def _required_rows(self, returned: object) -> Iterable[Any]:
        if isinstance(returned, dict | str | bytes) or not isinstance(returned, Iterable):
            raise RecordError(f"{self._name} returned {type(returned).__name__}, not rows; use yield, or a list")
        return returned

    def restore(self, fragments: Sequence[Fragment]) -> None:
        """See :meth:`etl.state.StatefulOperator.restore`."""
        self._state.restore(fragments)

    def cut(self) -> StateCut:
        """See :meth:`etl.state.StatefulOperator.cut`."""
        with placed(self._transformation):
            return self._state.cut()

    def _settle(self, ids: Ids) -> None:
        """Note what has changed, and forget keys of which nothing is remembered."""
        self._state.touch(np.array(sorted(self._cursor.changed), dtype=np.int64))
        self._cursor.changed.clear()
        values = [column.values for column in self._columns.values()]
        empty = [id_ for id_ in ids.tolist() if all(of_state[id_] is None for of_state in values)]
        if empty:
            self._state.remove(np.array(empty, dtype=np.int64))
