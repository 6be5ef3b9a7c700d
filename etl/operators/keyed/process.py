"""Python functions that remember something of each key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import GeneratorType, MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from etl.errors import EtlError, RecordError
from etl.keyed_process import Process
from etl.operators.calling import RAISED, failure, name_of
from etl.operators.exact import RowShape, batch_of_values, placed, rows_of
from etl.operators.keyed.columns import Ids, StateColumn
from etl.operators.keyed.evolution import Evolution
from etl.operators.keyed.grouping import first_rows, key_arrays, key_frame
from etl.operators.keyed.handles import Cursor, Handle, KeyStates, handle_for, undeclared
from etl.operators.keyed.key_index import NOT_FOUND
from etl.operators.keyed.spilling import state_of
from etl.operators.rows import ROWS_MAX
from etl.schema import Schema
from etl.state import Fragment, StateCut, StatefulOperator
from etl.transformation import Row

_NONE: Mapping[str, Any] = MappingProxyType({})


class ProcessOperator(StatefulOperator):
    """Calls a function with each row and the state of its key.

    Args:
        transformation: What was declared.
        input_schema: Columns of the rows.
        output_schema: Columns of the results.
        more: By name handles that the function is given beside those of the declared states.
        apart: By name columns that are stored with them, and do not keep a key from being forgotten.
        cursor: Of the handles.
    """

    def __init__(
        self,
        transformation: Process,
        input_schema: Schema,
        output_schema: Schema,
        more: Mapping[str, Handle] = _NONE,
        apart: Mapping[str, StateColumn] = _NONE,
        cursor: Cursor | None = None,
    ) -> None:
        self.uid = transformation.uid
        self._transformation = transformation
        self._keys = transformation.key_fields(input_schema)
        self._schema = output_schema
        self._shape = RowShape(output_schema)
        self._values_max = ROWS_MAX * len(output_schema)
        self._cursor = cursor or Cursor()
        types = transformation.state_types()
        declared = {
            name: handle_for(name, spec, types[name], self._cursor) for name, spec in transformation.states.items()
        }
        handles = {**declared, **more}
        self._seen = KeyStates(handles)
        self._changed: list[int] = []
        self._columns = {name: handle.column for name, handle in handles.items()}
        key_types = {field.name: field.type.arrow for field in self._keys}
        evolution = Evolution(transformation, {name: declared[name].column for name in transformation.states})
        self._state = state_of(transformation, key_types, {**self._columns, **apart}, evolution)
        self._function: Callable[..., Any] = transformation.function

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """What the function yields for each row, in batches of at most :data:`etl.operators.rows.ROWS_MAX` rows."""
        with placed(self._transformation):
            ids, new = self._ids(batch)
            for found in self._called(ids, rows_of(batch)):
                yield batch_of_values(found, self._schema)
            self._settle(new)

    def _ids(self, batch: pa.RecordBatch) -> tuple[Ids, Ids]:
        """The id of each row's key, and those that were given to new keys."""
        frame = key_frame(batch, self._keys)
        ids = self._state.find(key_arrays(frame, self._keys))
        unknown = np.flatnonzero(ids == NOT_FOUND)
        if not len(unknown):
            return ids, unknown
        some = frame[unknown]
        new = self._state.add(key_arrays(first_rows(some), self._keys)).ids
        ids[unknown] = self._state.find(key_arrays(some, self._keys))
        return ids, new

    def _called(self, ids: Ids, rows: Iterable[Row]) -> Iterator[list[Any]]:
        """The values of the rows that the function returns, see :func:`batch_of_values`.

        One ``try`` around all of them: this loop is what a job of such functions spends its time in.
        """
        cursor, seen, function, values = self._cursor, self._seen, self._function, self._shape.values
        found: list[Any] = []
        try:
            for cursor.id, cursor.given in zip(ids.tolist(), rows, strict=True):
                returned: Any = function(cursor.given, seen)
                if type(returned) is GeneratorType or self._has_rows(returned):
                    for one in returned:
                        # the values are taken at once: a generator may yield one dict again and again
                        found.extend(values(one))
                        if len(found) == self._values_max:
                            yield found
                            found = []
                if cursor.changed:
                    self._changed.append(cursor.id)
                    cursor.changed = False
        except EtlError:
            raise
        except RAISED as error:
            raise self._failure(error) from error
        yield found

    def _has_rows(self, returned: object) -> bool:
        if returned is None:
            return False
        if isinstance(returned, dict | str | bytes) or not isinstance(returned, Iterable):
            raise RecordError(
                f"{name_of(self._function)} returned {type(returned).__name__}, not rows; use yield, or a list"
            )
        return True

    def _failure(self, error: BaseException) -> EtlError:
        if isinstance(error, AttributeError) and error.obj is self._seen:
            return undeclared(self._seen, str(error.name))
        return failure(self._transformation, self._function, error, self._cursor.given)

    def restore(self, fragments: Sequence[Fragment]) -> None:
        """See :meth:`etl.state.StatefulOperator.restore`."""
        self._state.restore(fragments)

    def close(self) -> None:
        """See :meth:`etl.operator.Operator.close`."""
        self._state.close()

    def cut(self) -> StateCut:
        """See :meth:`etl.state.StatefulOperator.cut`."""
        with placed(self._transformation):
            return self._state.cut()

    def _settle(self, new: Ids) -> None:
        """Note what has changed, and forget keys of which nothing is remembered: some that are new, or have changed."""
        changed = np.array(self._changed, dtype=np.int64)
        self._changed.clear()
        self._state.touch(changed)
        empty = [*new.tolist(), *changed.tolist()]
        for column in self._columns.values():
            values = column.values
            empty = [id_ for id_ in empty if values[id_] is None]
        if empty:
            self._state.remove(np.unique(empty))
