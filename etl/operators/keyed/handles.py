"""What a function sees of the state of a key: values, lists and dictionaries that know when they were changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, cast, overload

import numpy as np
import polars as pl
import pyarrow as pa

from etl.errors import RecordError
from etl.keyed_process import ListState, MapState, StateSpec, Timer
from etl.operators.exact import array_of_values
from etl.operators.keyed.columns import Ids, StateColumn
from etl.operators.keyed.normalising import normaliser, wrong_type
from etl.schema import PostgresType
from etl.transformation import Row


class Cursor:
    """What the function is working on.

    Attributes:
        id: Of the key.
        given: The row, or the timer.
        changed: Whether a state of the key was set.
    """

    __slots__ = ("changed", "given", "id")

    def __init__(self) -> None:
        self.id = -1
        self.given: Row | Timer = {}
        self.changed = False


class Held:
    """Python values of one type, brought into the form in which they come out of the store again.

    Args:
        name: What messages call the state.
        type_: Of the values.
    """

    def __init__(self, name: str, type_: PostgresType) -> None:
        self.name = name
        self.type = type_
        self._python_type, self._normalised = normaliser(type_)

    def kept(self, value: Any) -> Any:
        """What is kept of a value that is set.

        Raises:
            RecordError: It is not exactly of the type that belongs to the column type, or does not fit into it.
        """
        if value is None:
            return None
        try:
            if type(value) is not self._python_type:
                raise wrong_type(value, self._python_type, self.type)
            return self._normalised(value)
        except RecordError as error:
            raise RecordError(f'state "{self.name}": {error}') from error

    def array(self, values: Sequence[Any]) -> pa.Array:
        """Kept values as Arrow."""
        return array_of_values(self.name, values, self.type)


class PythonColumn(StateColumn):
    """One Python object for each id; None where there is nothing to remember."""

    def __init__(self, arrow: pa.DataType, declared: str) -> None:
        super().__init__(arrow, declared)
        self.values: list[Any] = []

    def _grow(self, room: int) -> None:
        self.values += [None] * (room - len(self.values))

    def put(self, ids: Ids, values: pa.Array) -> None:
        """See :meth:`StateColumn.put`."""
        for id_, value in zip(ids.tolist(), self.objects(values), strict=True):
            self.values[id_] = value

    def take(self, ids: Ids) -> pa.Array:
        """See :meth:`StateColumn.take`."""
        return self.array([self.values[id_] for id_ in ids.tolist()])

    @abstractmethod
    def array(self, values: Sequence[Any]) -> pa.Array:
        """Objects as they are stored."""

    def kept(self, value: Any) -> Any:
        """The object that is kept of a value, a list or a dictionary that a function gives; None where it is empty.

        Raises:
            RecordError: See :meth:`Held.kept`.
        """
        return value

    def objects(self, values: pa.Array) -> Sequence[Any]:
        """Objects from what was stored."""
        # polars and not pyarrow: times and zones come out as rows have them
        return cast(pl.Series, pl.from_arrow(values)).to_list()


class ValueColumn(PythonColumn):
    """A value for each id."""

    def __init__(self, held: Held) -> None:
        super().__init__(held.type.arrow, held.type.name)
        self.held = held

    def array(self, values: Sequence[Any]) -> pa.Array:
        """See :meth:`PythonColumn.array`."""
        return self.held.array(values)

    def kept(self, value: Any) -> Any:
        """See :meth:`PythonColumn.kept`."""
        return self.held.kept(value)


class ListColumn(PythonColumn):
    """A list for each id."""

    def __init__(self, held: Held) -> None:
        super().__init__(pa.list_(held.type.arrow), f"list of {held.type}")
        self.held = held

    def array(self, values: Sequence[list[Any] | None]) -> pa.Array:
        """See :meth:`PythonColumn.array`."""
        elements = self.held.array([element for value in values for element in value or ()])
        valid = [value is not None for value in values]
        return pa.ListArray.from_arrays(
            offsets_of(values), elements, mask=pa.array([not one for one in valid], pa.bool_())
        )

    def kept(self, value: Any) -> Any:
        """See :meth:`PythonColumn.kept`."""
        if not isinstance(value, list | tuple | None):
            raise RecordError(f'state "{self.held.name}": {type(value).__name__} is no list')
        return [self.held.kept(element) for element in value or ()] or None


class MapColumn(PythonColumn):
    """A dictionary for each id, stored in the order in which its keys came."""

    def __init__(self, held_key: Held, held: Held) -> None:
        entry = pa.struct([("key", held_key.type.arrow), ("value", held.type.arrow)])
        super().__init__(pa.list_(entry), f"map of {held_key.type} to {held.type}")
        self.held_key = held_key
        self.held = held

    def array(self, values: Sequence[dict[Any, Any] | None]) -> pa.Array:
        """See :meth:`PythonColumn.array`."""
        entries = [entry for value in values for entry in (value or {}).items()]
        keys = self.held_key.array([key for key, _ in entries])
        items = self.held.array([item for _, item in entries])
        pairs = pa.StructArray.from_arrays([keys, items], fields=list(self.arrow.value_type))
        mask = pa.array([value is None for value in values], pa.bool_())
        return pa.ListArray.from_arrays(offsets_of(values), pairs, type=self.arrow, mask=mask)

    def objects(self, values: pa.Array) -> Sequence[Any]:
        """See :meth:`PythonColumn.objects`."""
        found = super().objects(values)
        return [None if one is None else {pair["key"]: pair["value"] for pair in one} for one in found]

    def kept(self, value: Any) -> Any:
        """See :meth:`PythonColumn.kept`."""
        if not isinstance(value, Mapping | None):
            raise RecordError(f'state "{self.held.name}": {type(value).__name__} is no dictionary')
        return {self.kept_key(key): self.held.kept(item) for key, item in (value or {}).items()} or None

    def kept_key(self, key: Any) -> Any:
        """The object that is kept of a key of the dictionary.

        Raises:
            RecordError: It is None or NaN, or see :meth:`Held.kept`.
        """
        kept = self.held_key.kept(key)
        if kept is None or kept != kept:
            raise RecordError(f'state "{self.held.name}": {kept} is no key')
        return kept


def offsets_of(values: Sequence[Any]) -> pa.Array:
    """Where the elements of each of these lists begin when all are laid one behind the other, as Arrow has it."""
    lengths = [0, *(len(value or ()) for value in values)]
    return pa.array(np.cumsum(lengths), pa.int32())


class Handle(ABC):
    """One declared state of the key whose row the function is given.

    Attributes:
        column: Where it is kept.
    """

    column: PythonColumn

    def __init__(self, cursor: Cursor, column: PythonColumn) -> None:
        self._cursor = cursor
        self.column = column

    @abstractmethod
    def clear(self) -> None:
        """Forget what there is; a key with nothing left in any state is forgotten itself."""

    def _changed(self) -> None:
        self._cursor.changed = True


class ValueHandle(Handle):
    """A value, None until it is set."""

    column: ValueColumn

    def __init__(self, cursor: Cursor, column: ValueColumn) -> None:
        super().__init__(cursor, column)
        # What most functions do for each row: as few steps as can be. The list stays the same, and grows.
        self._values = column.values
        self._kept = column.held.kept

    @property
    def value(self) -> Any:
        """The value; of an array a copy: set it again to change it."""
        value = self._values[self._cursor.id]
        return list(value) if type(value) is list else value

    @value.setter
    def value(self, value: Any) -> None:
        cursor = self._cursor
        self._values[cursor.id] = self._kept(value)
        cursor.changed = True

    def clear(self) -> None:
        """See :meth:`Handle.clear`."""
        self.value = None


class ListHandle(Handle, Sequence[Any]):
    """A list that can be read like one, appended to, and set as a whole."""

    column: ListColumn

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._elements()[index]

    def __len__(self) -> int:
        return len(self._elements())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._elements())

    def __eq__(self, other: object) -> bool:
        return self._elements() == (other._elements() if isinstance(other, ListHandle) else other)

    __hash__ = None  # type: ignore[assignment] # as a list has none

    def append(self, element: Any) -> None:
        """Add an element at the end."""
        element = self.column.held.kept(element)
        elements = self.column.values[self._cursor.id]
        if elements is None:
            self.column.values[self._cursor.id] = [element]
        else:
            elements.append(element)
        self._changed()

    def set(self, elements: Sequence[Any]) -> None:
        """Have exactly these elements."""
        self.column.values[self._cursor.id] = [self.column.held.kept(one) for one in elements] or None
        self._changed()

    def clear(self) -> None:
        """See :meth:`Handle.clear`."""
        self.set(())

    def _elements(self) -> list[Any]:
        return self.column.values[self._cursor.id] or []


class MapHandle(Handle, MutableMapping[Any, Any]):
    """A dictionary."""

    column: MapColumn

    def __getitem__(self, key: Any) -> Any:
        return self._entries()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        key = self.column.kept_key(key)
        value = self.column.held.kept(value)
        entries = self.column.values[self._cursor.id]
        if entries is None:
            entries = self.column.values[self._cursor.id] = {}
        entries[key] = value
        self._changed()

    def __delitem__(self, key: Any) -> None:
        entries = self._entries()
        del entries[key]
        if not entries:
            self.column.values[self._cursor.id] = None
        self._changed()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def popitem(self) -> tuple[Any, Any]:
        """Remove the entry that came last, as a dict does, and return it."""
        entries = self._entries()
        if not entries:
            raise KeyError("the state has no entry")
        key = next(reversed(entries))
        return key, self.pop(key)

    def clear(self) -> None:
        """See :meth:`Handle.clear`."""
        self.column.values[self._cursor.id] = None
        self._changed()

    def _entries(self) -> dict[Any, Any]:
        return self.column.values[self._cursor.id] or {}


class KeyStates:
    """The states of a key by their names: what a function is given."""

    def __init__(self, handles: Mapping[str, Handle]) -> None:
        self.__dict__.update(handles)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self.__dict__:
            raise undeclared(self, name)
        raise RecordError(f'state "{name}" cannot be replaced: set state.{name}.value, or call a method of it')


def undeclared(states: KeyStates, name: str) -> RecordError:
    """The error for a state that is asked for and not there.

    No ``__getattr__`` raises it: a class with that method takes twice as long to look up what is there.
    """
    return RecordError(f'state "{name}" is not declared; declared are: {", ".join(vars(states))}')


def handle_for(name: str, spec: StateSpec, types: Sequence[PostgresType], cursor: Cursor) -> Handle:
    """A handle of a declared state, with a column of its own."""
    held = [Held(name, type_) for type_ in types]
    if isinstance(spec, MapState):
        return MapHandle(cursor, MapColumn(*held))
    if isinstance(spec, ListState):
        return ListHandle(cursor, ListColumn(*held))
    return ValueHandle(cursor, ValueColumn(*held))
