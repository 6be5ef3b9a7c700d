"""Functions over rows that remember something of each key, as inert data; see :mod:`etl.operators.keyed.process`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from keyword import iskeyword
from typing import Any

from etl.errors import ConfigurationError, Finding
from etl.keyed import Stateful, ttl_findings, waiting_on_disk
from etl.schema import PostgresType, Schema
from etl.transformation import Row, declared_schema


@dataclass(frozen=True, slots=True)
class ValueState:
    """One value for each key; None until it is set.

    Attributes:
        type: Column type of the value, e.g. ``"numeric(12,2)"``.
    """

    type: str

    def __str__(self) -> str:
        return self.type


@dataclass(frozen=True, slots=True)
class ListState:
    """A list for each key; empty until something is appended.

    Attributes:
        type: Column type of an element.
    """

    type: str

    def __str__(self) -> str:
        return f"list of {self.type}"


@dataclass(frozen=True, slots=True)
class MapState:
    """A dictionary for each key; empty until something is set.

    Attributes:
        key: Column type of its keys, which are never None.
        value: Column type of its values.
    """

    key: str
    value: str

    def __str__(self) -> str:
        return f"map of {self.key} to {self.value}"


StateSpec = ValueState | ListState | MapState


@dataclass(frozen=True, slots=True)
class Upcaster:
    """How state that was stored in a former shape becomes state in the present one.

    It is needed until a checkpoint has been completed with it, and for as long as one may go back to a savepoint in the
    former shape.

    Attributes:
        state: The former shape, as it was declared then.
        function: From the former values of a key to the present ones, by the names of the states; those it leaves out
            are empty. It gets and returns None, a value, a list or a dictionary, must depend on nothing else, and is
            called when the state is read, for each row that was stored of a key.
    """

    state: Mapping[str, StateSpec]
    function: Callable[[dict[str, Any]], Mapping[str, Any]]


KeyFunction = Callable[[Row, Any], "Iterable[Mapping[str, Any]] | None"]
"""From a row and the state of its key to rows."""


@dataclass(frozen=True, slots=True)
class Timer:
    """A timer that has fired.

    Attributes:
        key: The columns of the key it was set for.
        moment: For which it was set, as rows have moments.
    """

    key: Mapping[str, Any]
    moment: Any


TimerFunction = Callable[[Timer, Any], "Iterable[Mapping[str, Any]] | None"]
"""From a timer and the state of its key to rows."""

ROWS_TABLE = "rows"
"""The rows that wait for their turn are stored under this name, beside the states."""

_HANDLES = {"on_timer": "timers", "on_clock_timer": "clock_timers"}


@dataclass(frozen=True, slots=True, eq=False)
class Process(Stateful):
    """Any number of rows for each row, by a Python function that remembers something of each key.

    Attributes:
        function: Called with each row.
        states: What is remembered, by name.
        declared: Columns it yields; the input's when None.
        time: The column of event time, where that matters.
        in_order: Whether the rows of a key are given to the function in the order of their times.
        on_timer: Called with timers of event time.
        on_clock_timer: Called with timers of the clock.
        ttl: A key that was not written for so long is forgotten: in event time where ``time`` is given, else by the
            clock.
        upcasters: What becomes of state in former shapes.
        forgotten: Names of former states that are given up.
    """

    kind = "process"

    function: KeyFunction
    states: Mapping[str, StateSpec]
    declared: Mapping[str, str] | None = None
    time: str | None = None
    in_order: bool = False
    on_timer: TimerFunction | None = None
    on_clock_timer: TimerFunction | None = None
    ttl: timedelta | None = None
    upcasters: Sequence[Upcaster] = ()
    forgotten: Sequence[str] = ()

    @property
    def goes_by_time(self) -> bool:
        """Whether it is more than a function that is called with one row after the other."""
        return self.in_order or any(one is not None for one in (self.on_timer, self.on_clock_timer, self.ttl))

    @property
    def event_time_columns(self) -> tuple[str, ...]:
        """See :class:`~etl.keyed.Stateful`."""
        return () if self.time is None else (self.time,)

    @property
    def unrepeatable(self) -> str | None:
        """See :class:`~etl.keyed.Stateful`."""
        if self.on_clock_timer is not None:
            return "fires timers by the clock"
        if self.ttl is not None and self.time is None:
            return "forgets by the clock"
        if self.on_timer is not None and not self.in_order:
            return "fires timers between rows in the order of their arrival"
        return None

    def side_schema(self, tag: str, inputs: Sequence[Schema]) -> Schema:
        """See :class:`~etl.keyed.Stateful`."""
        if not self.in_order:
            raise self.refusal("no row is late for it: it gets each one when it comes", "add in_order=True")
        # not super(): a dataclass with slots is another class than the one that is being defined here
        return Stateful.side_schema(self, tag, inputs)

    def output_schema(self, inputs: Sequence[Schema]) -> Schema:
        """The declared columns, or the input's."""
        findings = [*self._findings(), *self._evolution_findings()]
        if findings:
            raise ConfigurationError.from_findings(str(self), findings)
        for find in (lambda: self.key_fields(inputs[0]), self.state_types):
            try:
                find()
            except ConfigurationError as error:
                findings += error.findings
        if findings:
            raise ConfigurationError.from_findings(str(self), findings)
        return declared_schema(self, self.declared) or inputs[0]

    def state_types(self) -> dict[str, tuple[PostgresType, ...]]:
        """By name of a state, the types of what it holds: one, or two for a map.

        Raises:
            ConfigurationError: Lists every state that cannot be kept.
        """
        return self.types_of(self.states)

    def types_of(self, states: Mapping[str, StateSpec]) -> dict[str, tuple[PostgresType, ...]]:
        """The same of states that are declared elsewhere."""
        findings: list[Finding] = []
        types: dict[str, tuple[PostgresType, ...]] = {}
        for name, spec in states.items():
            texts = (spec.key, spec.value) if isinstance(spec, MapState) else (spec.type,)
            try:
                types[name] = tuple(PostgresType.parse(text) for text in texts)
            except ConfigurationError as error:
                findings.append(self.finding(f'state "{name}": {error}', "change its declared type"))
                continue
            if not isinstance(spec, ValueState) and any(type_.is_array for type_ in types[name]):
                findings.append(self.finding(f'state "{name}" would hold arrays of arrays', "keep it as jsonb text"))
        if findings:
            raise ConfigurationError.from_findings(str(self), findings)
        return types

    def _findings(self) -> Iterable[Finding]:
        function: object = self.function
        if not callable(function):
            yield self.finding(f"{type(function).__name__} is not a function", "give fn(row, state)")
        states: object = self.states
        if not isinstance(states, Mapping) or not states:
            yield self.finding("it declares no state", 'add state={"last": ValueState("int8")}, or use flat_map')
            return
        yield from self._time_findings()
        yield from self._states_findings(states)

    def _states_findings(self, states: Mapping[str, object]) -> Iterable[Finding]:
        for name, spec in states.items():
            if not str(name).isidentifier() or str(name).startswith("_") or iskeyword(str(name)):
                yield self.finding(f"state {name!r} is no name of an attribute", "choose another name")
            texts = [getattr(spec, part, "") for part in ("type", "key", "value")]
            if not isinstance(spec, ValueState | ListState | MapState) or not all(
                isinstance(one, str) for one in texts
            ):
                cure = 'give ValueState("int8"), ListState("int8") or MapState("text", "int8")'
                yield self.finding(f'state "{name}" is {spec!r}', cure)

    def _evolution_findings(self) -> Iterable[Finding]:
        if self.goes_by_time and (self.upcasters or self.forgotten):
            cure = "give the changed operator a new uid, and the old one to Job(…, forget=[…])"
            yield self.finding("upcast or forget is given, and state that goes by time keeps its shape", cure)
        for name in self.forgotten:
            if name in self.states:
                yield self.finding(f'it is to forget state "{name}", which it has', "remove one of the two")
        for one in self.upcasters:
            upcaster: object = one
            if not isinstance(upcaster, Upcaster) or not callable(upcaster.function):
                yield self.finding(f"{upcaster!r} is no Upcaster", "give upcast=[Upcaster({…}, function)]")
                continue
            findings = list(self._states_findings(upcaster.state))
            try:
                self.types_of({} if findings else upcaster.state)
            except ConfigurationError as error:
                findings += error.findings
            yield from findings
        shapes = [dict(one.state) for one in self.upcasters if isinstance(one, Upcaster)]
        if any(shapes.count(shape) > 1 for shape in shapes):
            yield self.finding("two upcasters are for one shape", "give one for each")

    def _time_findings(self) -> Iterable[Finding]:
        for name, handle in _HANDLES.items():
            on_timer: object = getattr(self, name)
            if on_timer is not None and not callable(on_timer):
                yield self.finding(f"{name}={on_timer!r} is not a function", "give fn(timer, state)")
            if on_timer is not None and handle in self.states:
                yield self.finding(f'state "{handle}" has the name of the timers', "choose another name")
        for name in ("in_order", "on_timer") if self.time is None else ():
            if getattr(self, name):
                cure = 'add time="at", the column that says when a row happened'
                yield self.finding(f"{name} needs the time of the rows", cure)
        if self.time is not None and not self.goes_by_time:
            problem = f"time={self.time!r} is given, and nothing goes by it"
            yield self.finding(problem, "add in_order=True, on_timer or ttl, or remove it")
        yield from ttl_findings(self, self.ttl)
        if self.ttl is None and self.goes_by_time and self.keys_in_memory is not None:
            yield waiting_on_disk(self)
        taken = [one for one in self.keys if isinstance(one, str) and one.startswith(f"{ROWS_TABLE}.")]
        for key in taken if self.in_order else ():
            problem = f'key column "{key}" begins like the names of the rows that are kept'
            yield self.finding(problem, "rename it with select(…) before")

    def describe(self) -> str:
        """Function, key and states."""
        function = getattr(self.function, "__qualname__", type(self.function).__name__)
        kept = ", ".join(f"{name} {spec}" for name, spec in self.states.items())
        return f"process by {', '.join(self.keys)} {function}, keeping {kept}{self._described_times()}"

    def _described_times(self) -> str:
        told = [f"in the order of {self.time}"] if self.in_order else []
        told += [
            f"{name} {getattr(function, '__qualname__', type(function).__name__)}"
            for name in _HANDLES
            if (function := getattr(self, name)) is not None
        ]
        told += (
            [] if self.ttl is None else [f"for {self.ttl} {'by the clock' if self.time is None else 'of ' + self.time}"]
        )
        return "".join(f", {one}" for one in told)
