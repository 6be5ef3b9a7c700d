"""State that was stored in another shape than its operator keeps now: what becomes of it when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from etl.errors import EtlError, StateError
from etl.keyed_process import Process, Upcaster
from etl.operators.calling import RAISED, name_of
from etl.operators.keyed.handles import Cursor, PythonColumn, handle_for
from etl.operators.keyed.table import STATE_PREFIX, state_field

CURE = (
    "say with process(…, upcast=[Upcaster({…}, function)]) how the one becomes the other, or give states up with"
    " process(…, forget=[…])"
)


class Evolution:
    """What the declaration of an operator says of former shapes of its state.

    Args:
        transformation: The declaration.
        columns: The columns of the state as it is now, by name.
    """

    def __init__(self, transformation: Process, columns: Mapping[str, PythonColumn]) -> None:
        self._uid = transformation.uid
        self._columns = columns
        self._forgotten = {STATE_PREFIX + name for name in transformation.forgotten}
        self._upcasters = [(upcaster, _columns_of(transformation, upcaster)) for upcaster in transformation.upcasters]

    def adapted(self, rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch | None:
        """Rows of another shape in the present one; None where nobody has said how.

        Args:
            rows: In the columns of a fragment.
            schema: Those of the operator.

        Raises:
            StateError: An upcaster raised, or returned what the state cannot hold.
        """
        present = _state_fields(schema)
        keys = len(schema) - len(present)
        if list(rows.schema)[:keys] != list(schema)[:keys]:
            return None
        former = _state_fields(rows.schema)
        for upcaster, columns in self._upcasters:
            if _same({field.name: field for field in _fields(columns)}, former):
                arrays = self._upcast(upcaster, columns, rows)
                break
        else:
            kept = {name for name, field in present.items() if name in former and field.equals(former[name], True)}
            if not former.keys() - kept <= self._forgotten - present.keys():
                return None
            arrays = [
                rows.column(name) if name in kept else pa.nulls(len(rows), present[name].type) for name in present
            ]
        return _without_empty(pa.RecordBatch.from_arrays([*rows.columns[:keys], *arrays], schema=schema), keys)

    def _upcast(self, upcaster: Upcaster, columns: Mapping[str, PythonColumn], rows: pa.RecordBatch) -> list[pa.Array]:
        former = [column.objects(rows.column(STATE_PREFIX + name)) for name, column in columns.items()]
        found: dict[str, list[Any]] = {name: [] for name in self._columns}
        for number, (removed, *values) in enumerate(zip(rows.column(0).to_pylist(), *former, strict=True)):
            present: Mapping[str, Any] = {}
            if not removed:
                present = self._called(upcaster, dict(zip(columns, values, strict=True)), rows, number)
            for name, kept in found.items():
                kept.append(present.get(name))
        return [column.array(found[name]) for name, column in self._columns.items()]

    def _called(
        self, upcaster: Upcaster, former: dict[str, Any], rows: pa.RecordBatch, number: int
    ) -> Mapping[str, Any]:
        try:
            returned: object = upcaster.function(former)
            if not isinstance(returned, Mapping):
                raise StateError(f"it returned {type(returned).__name__}, not states by name")
            unknown = sorted(str(name) for name in returned.keys() - self._columns.keys())
            if unknown:
                raise StateError(f"it returned states {', '.join(unknown)}, which are not declared")
            return {name: self._columns[name].kept(value) for name, value in returned.items()}
        except (EtlError, *RAISED) as error:
            told = str(error) if isinstance(error, EtlError) else f"{type(error).__name__}: {error}"
            key = {name.partition(":")[2]: rows.column(name)[number].as_py() for name in _key_names(rows.schema)}
            raise StateError(
                f'state of operator "{self._uid}": upcaster {name_of(upcaster.function)}, key {key}: {told}'
            ) from error


def _columns_of(transformation: Process, upcaster: Upcaster) -> dict[str, PythonColumn]:
    types = transformation.types_of(upcaster.state)
    return {name: handle_for(name, spec, types[name], Cursor()).column for name, spec in upcaster.state.items()}


def _fields(columns: Mapping[str, PythonColumn]) -> list[pa.Field]:
    return [state_field(name, column) for name, column in columns.items()]


def _state_fields(schema: pa.Schema) -> dict[str, pa.Field]:
    return {field.name: field for field in schema if field.name.startswith(STATE_PREFIX)}


def _key_names(schema: pa.Schema) -> list[str]:
    return [name for name in schema.names[1:] if not name.startswith(STATE_PREFIX)]


def _same(some: Mapping[str, pa.Field], others: Mapping[str, pa.Field]) -> bool:
    return some.keys() == others.keys() and all(field.equals(others[name], True) for name, field in some.items())


def _without_empty(rows: pa.RecordBatch, keys: int) -> pa.RecordBatch:
    """A key of which nothing is left is removed, as an operator would have it."""
    empty = np.logical_and.reduce([np.asarray(column.is_null()) for column in rows.columns[keys:]])
    removed = pa.array(np.asarray(rows.column(0)) | empty)
    return pa.RecordBatch.from_arrays([removed, *rows.columns[1:]], schema=rows.schema)
