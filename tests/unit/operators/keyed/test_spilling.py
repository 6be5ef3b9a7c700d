"""Operators with a bound on the keys in memory yield and store what they do without one."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from etl.codec import decode_rows, encode_rows
from etl.keyed import Aggregate, Deduplicate, Stateful
from etl.keyed_process import ListState, Process, StateSpec, ValueState
from etl.operator import Output
from etl.operators import operator_for
from etl.operators.keyed.reading import rows_of_state
from etl.schema import Schema
from etl.state import Fragment, StatefulOperator, ranks
from etl.transformation import Location, Row

SCHEMA = Schema.declare({"k": "text", "n": "int8"})
HERE = Location("job.py", 1)


def remembered(row: Row, state: Any) -> Iterable[Row]:
    state.seen.append(row["n"])
    state.total.value = (state.total.value or 0) + row["n"]
    if row["n"] % 7 == 0:
        state.seen.clear()
        state.total.clear()
    yield {"k": row["k"], "n": sum(state.seen)}


def declared(name: str, keys_in_memory: int | None) -> Stateful:
    match name:
        case "aggregate":
            expressions = (("total", pl.col("n").sum()), ("last", pl.col("n").last()))
            return Aggregate(HERE, "u", ("k",), expressions, keys_in_memory=keys_in_memory)
        case "process":
            states: dict[str, StateSpec] = {"seen": ListState("int8"), "total": ValueState("int8")}
            return Process(HERE, "u", ("k",), remembered, states, keys_in_memory=keys_in_memory)
        case _:
            return Deduplicate(HERE, "u", ("k",), keys_in_memory=keys_in_memory)


class Player:
    """An operator, the chains that a store would hold, and what it has emitted."""

    def __init__(self, transformation: Stateful) -> None:
        self.transformation = transformation
        self.chains: dict[int, list[Fragment]] = {}
        self.emitted: list[Any] = []
        self.begin()

    def begin(self) -> None:
        operator = operator_for(self.transformation, [SCHEMA], self.transformation.output_schema([SCHEMA]))
        assert isinstance(operator, StatefulOperator)
        self.operator = operator

    def take(self, rows: list[tuple[str, int]]) -> None:
        keys, numbers = zip(*rows, strict=True)
        batch = pa.RecordBatch.from_arrays([pa.array(keys), pa.array(numbers, pa.int64())], schema=SCHEMA.to_arrow())
        self.emitted += _rows(self.operator.process(batch))

    def cut(self) -> None:
        self.emitted += sorted(_rows(self.operator.flush()), key=lambda row: str(row["k"]))
        for fragment in self.operator.cut().fragments:
            if fragment.sequence == 0:
                self.chains[fragment.key_group] = []
            rows = decode_rows(encode_rows(fragment.rows))
            self.chains[fragment.key_group].append(Fragment(fragment.key_group, fragment.sequence, rows))

    def crash(self) -> None:
        self.operator.close()
        self.begin()
        for rank in ranks(one for chain in self.chains.values() for one in chain):
            self.operator.restore(rank)

    def state(self) -> list[dict[str, Any]]:
        fragments = [one for chain in self.chains.values() for one in chain]
        rows = [row for batch in rows_of_state("u", fragments) for row in batch.to_pylist()]
        return sorted(rows, key=lambda row: row["key:k"])


def _rows(emitted: Iterable[Output]) -> list[dict[str, Any]]:
    return [row for batch in emitted if isinstance(batch, pa.RecordBatch) for row in batch.to_pylist()]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["aggregate", "process", "deduplicate"])
def test_bound_on_keys_in_memory_changes_nothing(name: str, seed: int) -> None:
    chance = random.Random(seed)
    bounded, free = Player(declared(name, keys_in_memory=5)), Player(declared(name, keys_in_memory=None))
    for _ in range(25):
        rows = [(f"k{chance.randrange(60)}", chance.randrange(100)) for _ in range(chance.randrange(1, 30))]
        end = chance.random()
        for player in (bounded, free):
            player.take(rows)
            if end < 0.5:
                player.cut()
            elif end < 0.6:
                player.cut()
                player.crash()
    for player in (bounded, free):
        player.cut()
    assert bounded.emitted == free.emitted
    assert bounded.state() == free.state()
    assert len(bounded.state()) > 15
