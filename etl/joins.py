"""Joins, as inert data: of two streams by key and event time, and of a stream with a table that is asked for its rows.

Rows of both streams wait in state until event time says that nothing can come any more that would join with them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from enum import StrEnum
from typing import ClassVar

from etl.errors import ConfigurationError, Finding
from etl.keyed import Stateful
from etl.lookup import Lookup
from etl.operator import LATE_RIGHT
from etl.schema import Field, Schema, name_findings
from etl.transformation import Transformation

SIDES = ("left", "right")
"""The inputs of a join, in their order."""


class JoinKind(StrEnum):
    """Which rows come out that have no partner; the columns of the other side are NULL there."""

    INNER = "inner"
    """None."""
    LEFT = "left"
    """Those of the left."""
    RIGHT = "right"
    """Those of the right."""
    FULL = "full"
    """Those of both sides."""

    @property
    def keeps(self) -> tuple[bool, bool]:
        """For the left and the right, whether rows without a partner come out."""
        return (self in (JoinKind.LEFT, JoinKind.FULL), self in (JoinKind.RIGHT, JoinKind.FULL))


@dataclass(frozen=True, slots=True, eq=False)
class Join(Stateful):
    """Rows of two inputs with the same key, side by side; a key with a NULL in it is the same as no other.

    Attributes:
        right_keys: Columns that make the key on the right; ``keys`` are those on the left.
        times: For each input the column that says when a row happened.
        how: Which rows come out that have no partner.
        suffix: What is appended to names of the right that the left has too.
    """

    kinds: ClassVar[tuple[JoinKind, ...]] = tuple(JoinKind)

    right_keys: tuple[str, ...]
    times: tuple[str, ...]
    _: KW_ONLY
    how: JoinKind = JoinKind.INNER
    suffix: str = "_right"

    @property
    def event_time_columns(self) -> tuple[str, ...]:
        """One of each side."""
        return self.times

    @property
    def keys_of_inputs(self) -> tuple[tuple[str, ...], ...]:
        """Those of each side."""
        return (self.keys, self.right_keys)

    def side_schema(self, tag: str, inputs: Sequence[Schema]) -> Schema:
        """Late rows of either side have the columns that they had there."""
        return inputs[1] if tag == LATE_RIGHT else Stateful.side_schema(self, tag, inputs)

    def output_schema(self, inputs: Sequence[Schema]) -> Schema:
        """The columns of the left, then those of the right but its key, which is that of the left."""
        findings = [*self._key_findings(inputs), *self._time_findings(inputs), *self._own_findings()]
        if findings:
            raise ConfigurationError.from_findings(str(self), findings)
        added = [Field(self._right_name(field.name, inputs[0]), field.type) for field in self.right_values(inputs[1])]
        findings += clash_findings(self, inputs[0], added)
        if findings:
            raise ConfigurationError.from_findings(str(self), findings)
        return Schema((*inputs[0], *added))

    def right_values(self, right: Schema) -> tuple[Field, ...]:
        """The columns of the right that come out, in their order."""
        return tuple(field for field in right if field.name not in self.right_keys)

    def describe(self) -> str:
        """Kind, keys and times."""
        pairs = zip(self.keys, self.right_keys, strict=False)
        by = ", ".join(left if left == right else f"{left} = {right}" for left, right in pairs)
        return f"{self.how} {self.kind} by {by}: {self._condition()}"

    @abstractmethod
    def _condition(self) -> str:
        """What the times of partners must be."""

    @abstractmethod
    def _own_findings(self) -> Iterable[Finding]:
        """What is wrong with the arguments of this kind of join."""

    def _right_name(self, name: str, left: Schema) -> str:
        return f"{name}{self.suffix}" if name in left else name

    def _key_findings(self, inputs: Sequence[Schema]) -> Iterable[Finding]:
        found = [list(self.key_findings(keys, one)) for keys, one in zip(self.keys_of_inputs, inputs, strict=True)]
        for side, of_side in zip(SIDES, found, strict=True):
            for finding in of_side:
                yield self.finding(f"{side} side: {finding.problem}", finding.cure)
        if any(found):
            return
        if len(self.keys) != len(self.right_keys):
            problem = f"the left is keyed by {len(self.keys)} column(s), the right by {len(self.right_keys)}"
            yield self.finding(problem, "give both sides the same number of key columns, in the same order")
            return
        for left, right in zip(self.keys, self.right_keys, strict=True):
            types = (inputs[0][left], inputs[1][right])
            if types[0] != types[1]:
                problem = f'key column "{left}" is {types[0]}, "{right}" of the right is {types[1]}'
                yield self.finding(problem, "bring one of them to the type of the other with with_columns(…) before")

    def _time_findings(self, inputs: Sequence[Schema]) -> Iterable[Finding]:
        times: object = self.times
        if len(self.times) != 2 or not all(isinstance(name, str) for name in self.times):
            yield self.finding(f"time={times!r} is not two names of columns", 'e.g. time=("at", "paid_at")')
            return
        types = [one[name] for name, one in zip(self.times, inputs, strict=True) if name in one]
        if len(types) == 2 and types[0].base != types[1].base:
            problem = f'"{self.times[0]}" is {types[0]}, "{self.times[1]}" of the right is {types[1]}'
            yield self.finding(problem, "moments of different types cannot be compared: cast one of them before")


@dataclass(frozen=True, slots=True, eq=False)
class IntervalJoin(Join):
    """Pairs of rows with the same key of which the right one happened within a span around the left one.

    Attributes:
        lower: Least of the right's time less the left's, itself included.
        upper: Most of it, itself included.
    """

    kind = "interval join"

    lower: timedelta
    upper: timedelta

    def _condition(self) -> str:
        left, right = self.times
        return f"left.{left} {_signed(self.lower)} <= right.{right} <= left.{left} {_signed(self.upper)}"

    def _own_findings(self) -> Iterable[Finding]:
        yield from _kind_findings(self, self.how, self.kinds, self.suffix)
        bounds = {"lower": self.lower, "upper": self.upper}
        wrong = [name for name, bound in bounds.items() if not _is_a_span(bound)]
        for name in wrong:
            yield self.finding(f"{name}={bounds[name]!r} is no timedelta", "e.g. timedelta(hours=1)")
        if not wrong and self.lower > self.upper:
            problem = f"no time lies between lower={self.lower} and upper={self.upper}"
            yield self.finding(problem, "give a lower bound that is not above the upper one")


@dataclass(frozen=True, slots=True, eq=False)
class AsOfJoin(Join):
    """Each row of the left with the version of its key that was valid when it happened.

    A version is a row of the right; it is valid from its time on until the next one of its key begins.
    """

    kind = "as-of join"
    kinds = (JoinKind.INNER, JoinKind.LEFT)

    def _condition(self) -> str:
        return f"the latest right.{self.times[1]} <= left.{self.times[0]}"

    def _own_findings(self) -> Iterable[Finding]:
        return _kind_findings(self, self.how, self.kinds, self.suffix)


@dataclass(frozen=True, slots=True, eq=False)
class LookupJoin(Transformation):
    """Each row with the row of its key in a table elsewhere, as that is when it is asked for.

    Attributes:
        uid: Names the operator in messages and sessions; nothing is stored under it.
        lookup: The table.
        keys: Columns of the stream that make the key, in the lookup's order.
        how: ``inner`` or ``left``.
        suffix: What is appended to names of the lookup that the stream has too.
        cache_rows: How many keys are remembered.
        cache_ttl: For how long; zero asks for each batch.
    """

    kind = "lookup join"

    uid: str
    lookup: Lookup
    keys: tuple[str, ...]
    how: JoinKind
    suffix: str
    cache_rows: int
    cache_ttl: timedelta

    def output_schema(self, inputs: Sequence[Schema]) -> Schema:
        """The columns of the stream, then those of the table but its key, which is that of the stream."""
        findings = [*self._argument_findings(), *self._key_findings(inputs[0])]
        if findings:
            raise ConfigurationError.from_findings(str(self), findings)
        added = [
            Field(f"{field.name}{self.suffix}" if field.name in inputs[0] else field.name, field.type)
            for field in self.looked_up
        ]
        findings += clash_findings(self, inputs[0], added)
        if findings:
            raise ConfigurationError.from_findings(str(self), findings)
        return Schema((*inputs[0], *added))

    @property
    def looked_up(self) -> tuple[Field, ...]:
        """The columns of the table that come out, in their order."""
        return tuple(field for field in self.lookup.schema if field.name not in self.lookup.key)

    def describe(self) -> str:
        """Kind, keys, table and how long rows are remembered."""
        by = ", ".join(f"{own} = {key}" for own, key in zip(self.keys, self.lookup.key, strict=False))
        return f"{self.how} lookup join by {by} in {self.lookup.describe()}, remembered for {self.cache_ttl}"

    def _argument_findings(self) -> Iterable[Finding]:
        lookup: object = self.lookup
        if not isinstance(lookup, Lookup):
            yield self.finding(f"{type(lookup).__name__} is no lookup", 'e.g. PostgresLookup("customers", …)')
        yield from _kind_findings(self, self.how, AsOfJoin.kinds, self.suffix)
        if type(self.cache_rows) is not int or self.cache_rows < 1:
            yield self.finding(f"cache_rows={self.cache_rows!r} is no number of at least 1", "e.g. 100_000")
        if not _is_a_span(self.cache_ttl) or self.cache_ttl < timedelta(0):
            problem = f"cache_ttl={self.cache_ttl!r} is no timedelta of at least 0"
            yield self.finding(problem, "e.g. timedelta(minutes=10)")

    def _key_findings(self, schema: Schema) -> Iterable[Finding]:
        lookup: object = self.lookup
        if not isinstance(lookup, Lookup):
            return
        if len(self.keys) != len(lookup.key):
            problem = f"on={list(self.keys)} has {len(self.keys)} column(s), the key of the table {len(lookup.key)}"
            yield self.finding(problem, f"name one for each of: {', '.join(lookup.key)}")
            return
        for own, key in zip(self.keys, lookup.key, strict=True):
            if own not in schema:
                yield self.finding(f"column {own!r} of on= is not there", f"choose from: {schema}")
            elif schema[own] != lookup.schema[key]:
                problem = f'column "{own}" is {schema[own]}, "{key}" of the table is declared {lookup.schema[key]}'
                yield self.finding(problem, "bring one of them to the type of the other")

    def __str__(self) -> str:
        return f'{self.kind} "{self.uid}" at {self.location}'


def clash_findings(transformation: Transformation, left: Schema, added: Sequence[Field]) -> Iterable[Finding]:
    """What is wrong with the names of columns that are added to those of the left."""
    names = [*left.names, *(field.name for field in added)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problem = f'both sides have a column "{name}"'
        yield transformation.finding(problem, "give another suffix, or rename one with select(…) before")
    for field in added:
        for finding in name_findings(field.name):
            yield transformation.finding(f"{finding.subject}: {finding.problem}", finding.cure)


def _kind_findings(
    transformation: Transformation, how: object, kinds: Sequence[JoinKind], suffix: object
) -> Iterable[Finding]:
    if how not in kinds:
        shown = str(how) if isinstance(how, str) else how
        yield transformation.finding(f"how={shown!r} is unknown here", f"choose from {', '.join(kinds)}")
    if not isinstance(suffix, str):
        yield transformation.finding(f"suffix={suffix!r} is no text", 'e.g. suffix="_right"')


def _is_a_span(bound: object) -> bool:
    return isinstance(bound, timedelta)


def _signed(span: timedelta) -> str:
    return f"- {-span}" if span < timedelta(0) else f"+ {span}"
