"""Lookups against dictionaries that change: what is asked, what is remembered, and for how long."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.clock import SystemClock
from etl.errors import Finding, InternalError, RecordError
from etl.joins import JoinKind, LookupJoin
from etl.lookup import Found, Lookup, LookupContext, LookupReader
from etl.operators import operator_for
from etl.operators.keyed.lookup_join import LookupJoinOperator
from etl.schema import Schema
from etl.transformation import Location
from tests.support.joins import batch_of, rows_of

INPUT = Schema.declare({"n": "int4", "k": "text", "part": "float8"})
TABLE = Schema.declare({"name": "text", "part": "float8", "key": "text", "n": "int4"})


@dataclass(frozen=True)
class Dictionary(Lookup):
    """A table in memory."""

    rows: Mapping[Any, tuple[str | None, int]] = field(default_factory=dict)
    asked: list[list[Any]] = field(default_factory=list)

    @property
    def schema(self) -> Schema:
        return TABLE

    @property
    def key(self) -> tuple[str, ...]:
        return ("key", "part")

    def preflight(self, context: LookupContext) -> Sequence[Finding]:
        return ()

    def create_reader(self, context: LookupContext) -> LookupReader:
        return _Reader(self)


class _Reader(LookupReader):
    def __init__(self, dictionary: Dictionary) -> None:
        self._dictionary = dictionary

    def find(self, keys: pa.RecordBatch) -> Sequence[Found]:
        asked = rows_of(keys)
        assert len(set(asked)) == len(asked)
        self._dictionary.asked.append(sorted(asked))
        rows = self._dictionary.rows
        # in any order
        return [(place, rows[key]) for place, key in reversed(list(enumerate(asked))) if key in rows]

    def close(self) -> None:
        self._dictionary.asked.append(["closed"])


class Clock(SystemClock):
    now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s


def never(role: str) -> Any:
    raise AssertionError("nothing is connected")


class Stage:
    def __init__(self, how: JoinKind = JoinKind.LEFT, cache_rows: int = 100, ttl_s: float = 60.0) -> None:
        self.rows: dict[Any, tuple[str | None, int]] = {}
        self.dictionary = Dictionary(self.rows)
        self.clock = Clock()
        ttl = timedelta(seconds=ttl_s)
        join = LookupJoin(
            Location("jobs/named.py", 7), "named", self.dictionary, ("k", "part"), how, "_right", cache_rows, ttl
        )
        self.output = join.output_schema([INPUT])
        made = operator_for(join, [INPUT], self.output, lookups=lambda uid, _: LookupContext(uid, never, self.clock))
        assert isinstance(made, LookupJoinOperator)
        self.operator = made

    def give(self, *rows: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for batch in self.operator.process(batch_of(INPUT, rows)):
            assert isinstance(batch, pa.RecordBatch)
            assert batch.schema == self.output.to_arrow()
            batch.validate(full=True)
            found += rows_of(batch)
        return found

    def taken(self) -> list[list[Any]]:
        """What was asked since this was last called."""
        asked = list(self.dictionary.asked)
        self.dictionary.asked.clear()
        return asked


def test_keys_of_a_batch_are_asked_for_once_and_remembered() -> None:
    stage = Stage()
    stage.rows |= {("a", 0.5): ("Ada", 1), ("b", 0.5): (None, 2)}
    assert stage.output.names == ("n", "k", "part", "name", "n_right")
    rows = [(1, "a", 0.5), (2, "b", 0.5), (3, "a", 0.5), (4, "c", 0.5), (5, None, 0.5), (6, "a", None)]
    expected = [(*row, *found) for row, found in zip(rows, [("Ada", 1), (None, 2), ("Ada", 1), *[(None, None)] * 3],
                                                     strict=True)]  # fmt: skip
    assert stage.give(*rows) == expected
    assert stage.taken() == [[("a", 0.5), ("b", 0.5), ("c", 0.5)]]
    stage.rows[("c", 0.5)] = ("Cyd", 3)
    assert stage.give(*rows) == expected
    assert stage.taken() == []
    stage.operator.close()
    assert stage.taken() == [["closed"]]


def test_inner_join_leaves_out_what_is_not_there() -> None:
    stage = Stage(JoinKind.INNER)
    stage.rows[("a", 0.5)] = ("Ada", 1)
    assert stage.give((1, "b", 0.5), (2, "a", 0.5), (3, None, 0.5)) == [(2, "a", 0.5, "Ada", 1)]
    assert stage.give((1, "b", 0.5)) == []


def test_batch_of_nulls_asks_nothing() -> None:
    stage = Stage()
    assert stage.give((1, None, 0.5)) == [(1, None, 0.5, None, None)]
    assert stage.taken() == []


def test_what_is_too_old_is_asked_for_again() -> None:
    stage = Stage(ttl_s=10)
    stage.rows[("a", 0.5)] = ("Ada", 1)
    stage.give((1, "a", 0.5), (1, "b", 0.5))
    stage.clock.now_s += 9
    stage.give((1, "c", 0.5))
    stage.clock.now_s += 1
    del stage.rows[("a", 0.5)]
    stage.rows[("b", 0.5)] = ("Bob", 2)
    assert stage.give((1, "a", 0.5), (2, "b", 0.5), (3, "c", 0.5)) == [
        (1, "a", 0.5, None, None),
        (2, "b", 0.5, "Bob", 2),
        (3, "c", 0.5, None, None),
    ]
    assert stage.taken()[-1] == [("a", 0.5), ("b", 0.5)]


def test_nothing_is_remembered_for_no_time() -> None:
    stage = Stage(ttl_s=0)
    for _ in range(2):
        stage.give((1, "a", 0.5))
    assert stage.taken() == [[("a", 0.5)], [("a", 0.5)]]


@settings(deadline=None, max_examples=60)
@given(
    batches=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6), max_size=20),
    limit=st.integers(1, 8),
    ttl=st.integers(0, 5),
)
def test_keys_used_last_are_remembered(batches: list[list[int]], limit: int, ttl: int) -> None:
    """Against a model that forgets more than is needed at once, as the operator does."""
    stage = Stage(cache_rows=limit, ttl_s=ttl)
    remembered: OrderedDict[int, tuple[float, Any]] = OrderedDict()
    for number, keys in enumerate(batches):
        stage.clock.now_s += 1
        stage.rows[(str(number % 13), 0.5)] = (f"v{number}", number)
        missing = {key for key in keys if key not in remembered or stage.clock.now_s - remembered[key][0] >= ttl}
        for key in missing:
            remembered[key] = (stage.clock.now_s, stage.rows.get((str(key), 0.5), (None, None)))
        for key in keys:
            remembered.move_to_end(key)
        found = stage.give(*((key, str(key), 0.5) for key in keys))
        assert found == [(key, str(key), 0.5, *remembered[key][1]) for key in keys]
        assert stage.taken() == ([sorted((str(key), 0.5) for key in missing)] if missing else [])
        if len(remembered) > limit:
            # Within a batch all were used at the same time: what is left of it is read off.
            assert len(stage.operator._table) == limit - limit // 8
            kept = {int(key) for key in stage.operator._table.keys(stage.operator._table.live_ids())[0].to_pylist()}
            older = [key for key in remembered if key not in keys]
            forgotten = [key for key in remembered if key not in kept]
            assert set(older) <= set(forgotten) or set(forgotten) <= set(older)
            for key in forgotten:
                del remembered[key]


def test_value_that_is_not_of_its_type_is_told_with_the_place() -> None:
    stage = Stage()
    stage.rows[("a", 0.5)] = ("Ada", 1 << 40)
    with pytest.raises(RecordError, match=r'lookup join "named" at jobs/named.py:7: column "n": '):
        stage.give((1, "a", 0.5))


def test_without_a_database_nothing_is_looked_up() -> None:
    lookup = LookupJoin(
        Location("jobs/named.py", 7), "named", Dictionary(), ("k", "part"), JoinKind.LEFT, "_right", 1, timedelta(0)
    )
    with pytest.raises(InternalError, match="there is no database here to ask"):
        operator_for(lookup, [INPUT], lookup.output_schema([INPUT]))
