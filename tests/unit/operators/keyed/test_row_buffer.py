"""Rows that wait for event time, against a list; stored beside another table of the same operator."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.codec import decode_rows, encode_rows
from etl.key_group import groups_of_hashes, groups_of_subtask, hash_keys, subtasks_of_hashes
from etl.operators.keyed.columns import PrimitiveColumn
from etl.operators.keyed.reading import rows_of_state
from etl.operators.keyed.row_buffer import RowBuffer
from etl.operators.keyed.state import KeyedState, KeyedTables
from etl.operators.keyed.table import KeyedTable
from etl.schema import Schema
from etl.state import Fragment, ranks

SCHEMA = Schema.declare(
    {
        "at": "timestamptz",
        "k": "text",
        "f": "float8",
        "n": "int4",
        "amount": "numeric(12,2)",
        "tags": "text[]",
        "id": "uuid",
        "sequence": "int2",
    }
)
Row = tuple[Any, ...]


def moment(number: int) -> dt.datetime:
    return dt.datetime(2024, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=number)


MICROSECONDS = 1_704_067_200_000_000


def row(key: str | None, at: int, number: int) -> Row:
    """One with a NULL here and there, and a zero that must keep its sign."""
    amount = None if number % 3 == 0 else Decimal(number) / 4
    tags = None if number % 5 == 0 else [f"t{number}", None]
    return (moment(at), key, -0.0, number, amount, tags, f"00000000-0000-0000-0000-{number:012d}", number % 7)


def batch(rows: list[Row]) -> pa.RecordBatch:
    columns: list[Any] = list(zip(*rows, strict=True)) if rows else [[]] * len(SCHEMA)
    arrow = SCHEMA.to_arrow()
    arrays = [pa.array(values, field.type) for values, field in zip(columns, arrow, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow)


class Keeper:
    """A buffer, and beside it how many rows of each key ever came."""

    def __init__(self) -> None:
        self.buffer = RowBuffer(SCHEMA, ["k", "f"], "at")
        self.count = PrimitiveColumn(pa.int64())
        self.counts = KeyedTable({"k": pa.string(), "f": pa.float64()}, {"n": self.count})
        self.tables = KeyedTables("u", {"": self.counts, "rows": self.buffer.table})

    def add(self, rows: list[Row]) -> None:
        self.buffer.add(batch(rows))
        for one in rows:
            ids = self.counts.add([pa.array([one[1]], pa.string()), pa.array([one[2]])]).ids
            before = self.count.take(ids).to_pylist()[0] or 0
            self.count.put(ids, pa.array([before + 1]))
            self.counts.touch(ids)

    def take(self, before: int) -> list[Row]:
        ids = self.buffer.due(MICROSECONDS + before)
        found = self.buffer.rows(ids)
        found.validate(full=True)
        assert found.schema == SCHEMA.to_arrow()
        self.buffer.remove(ids)
        return [tuple(one.values()) for one in found.to_pylist()]

    def counted(self) -> dict[str | None, int]:
        ids = self.counts.live_ids()
        names = self.counts.keys(ids)[0].to_pylist()
        return dict(zip(names, self.count.take(ids).to_pylist(), strict=True))


def subtask_of(one: Row, parallelism: int) -> int:
    hashes = hash_keys([pa.array([one[1]], pa.string()), pa.array([one[2]])])
    return int(subtasks_of_hashes(hashes, parallelism)[0])


def cut_into(keeper: Keeper, chains: dict[int, list[Fragment]]) -> None:
    for fragment in keeper.tables.cut().fragments:
        rows = decode_rows(encode_rows(fragment.rows))
        if fragment.sequence == 0:
            chains[fragment.key_group] = []
            assert not any(rows["removed"].to_pylist())
        chains[fragment.key_group].append(Fragment(fragment.key_group, fragment.sequence, rows))
        assert fragment.sequence == len(chains[fragment.key_group]) - 1


def restored(chains: dict[int, list[Fragment]], parallelism: int) -> list[Keeper]:
    keepers = [Keeper() for _ in range(parallelism)]
    for number, keeper in enumerate(keepers):
        groups = groups_of_subtask(number, parallelism)
        for rank in ranks(one for chain in chains.values() for one in chain if one.key_group in groups):
            keeper.tables.restore(rank)
    return keepers


STEPS = st.lists(
    st.one_of(
        st.lists(st.tuples(st.sampled_from(["a", "b", "ü", None]), st.integers(0, 30)), max_size=8),
        st.integers(0, 40),
        st.sampled_from(["cut", "crash into 1", "crash into 2", "crash into 5"]),
    ),
    max_size=20,
)


def in_order(rows: list[Row]) -> list[Row]:
    """By time; of a key in the order they came, which the number tells."""
    return sorted(rows, key=lambda one: (one[0], str(one[1]), one[3]))


@settings(deadline=None, max_examples=150)
@given(STEPS)
def test_rows_come_out_as_they_came_once_and_in_the_order_of_time(steps: list[Any]) -> None:
    keepers, waiting, counts = [Keeper()], list[Row](), dict[str | None, int]()
    chains: dict[int, list[Fragment]] = {}
    stored: tuple[list[Row], dict[str | None, int], int] = ([], {}, 0)
    number = 0
    for step in [*steps, "cut", "crash into 3", 1000]:
        if isinstance(step, list):
            rows = [row(key, at, number + place) for place, (key, at) in enumerate(step)]
            number += len(rows)
            for index, keeper in enumerate(keepers):
                keeper.add([one for one in rows if subtask_of(one, len(keepers)) == index])
            waiting += rows
            for one in rows:
                counts[one[1]] = counts.get(one[1], 0) + 1
        elif isinstance(step, int):
            taken = [keeper.take(step) for keeper in keepers]
            for rows in taken:
                assert [one[0] for one in rows] == sorted(one[0] for one in rows)
                for key in {one[1] for one in rows}:
                    of_key = [one for one in rows if one[1] == key]
                    assert of_key == in_order(of_key)
            due = [one for one in waiting if one[0] < moment(step)]
            assert in_order([one for rows in taken for one in rows]) == in_order(due)
            waiting = [one for one in waiting if one[0] >= moment(step)]
        elif step == "cut":
            for keeper in keepers:
                cut_into(keeper, chains)
            stored = (list(waiting), dict(counts), number)
        else:
            keepers = restored(chains, int(step.rpartition(" ")[2]))
            waiting, counts, number = list(stored[0]), dict(stored[1]), stored[2]
        assert sum(len(keeper.buffer) for keeper in keepers) == len(waiting)
        assert {key: count for keeper in keepers for key, count in keeper.counted().items()} == counts


def test_rows_that_came_and_went_between_two_cuts_are_never_stored() -> None:
    keeper = Keeper()
    keeper.buffer.add(batch([row("a", 1, 1), row("b", 2, 2)]))
    assert [one[3] for one in keeper.take(5)] == [1, 2]
    assert keeper.tables.cut().fragments == ()


def test_row_that_was_stored_leaves_a_mark_when_it_is_gone() -> None:
    keeper, chains = Keeper(), dict[int, list[Fragment]]()
    keeper.add([row("a", 1, number) for number in range(40)] + [row("a", 3, 40)])
    cut_into(keeper, chains)
    assert len(keeper.take(1)) == 0
    keeper.take(2)
    keeper.add([row("a", 9, 41)])
    cut_into(keeper, chains)
    (again,) = restored(chains, 1)
    assert [one[3] for one in again.take(100)] == [40, 41]


def test_rows_lie_in_the_key_group_of_the_key() -> None:
    keeper = Keeper()
    keeper.buffer.add(batch([row(f"k{number}", 1, number) for number in range(500)]))
    for fragment in keeper.tables.cut().fragments:
        groups = groups_of_hashes(hash_keys([fragment.rows["key:k"], fragment.rows["key:f"]]))
        assert set(groups.tolist()) == {fragment.key_group}


def test_what_is_stored_can_be_read_without_the_operator() -> None:
    keeper, chains = Keeper(), dict[int, list[Fragment]]()
    keeper.add([row("a", 1, 1), row("a", 1, 2)])
    cut_into(keeper, chains)
    found = [
        one
        for rows in rows_of_state("u", [one for chain in chains.values() for one in chain])
        for one in rows.to_pylist()
    ]
    shown = [(one["key:k"], one["key:rows.sequence"], one["state:n"], one["state:rows.n"]) for one in found]
    assert sorted(shown, key=str) == [("a", 0, None, 1), ("a", 1, None, 2), ("a", None, 2, None)]


def test_tables_alone_are_stored_as_a_state_is() -> None:
    column, other = PrimitiveColumn(pa.int64()), PrimitiveColumn(pa.int64())
    table, state = KeyedTable({"k": pa.int64()}, {"n": column}), KeyedState("u", {"k": pa.int64()}, {"n": other})
    tables = KeyedTables("u", {"": table})
    for keyed, of in ((table, column), (state, other)):
        ids = keyed.add([pa.array(range(100), pa.int64())]).ids
        of.put(ids, pa.array(range(100), pa.int64()))
        keyed.touch(ids)
    assert [one.rows for one in tables.cut().fragments] == [one.rows for one in state.cut().fragments]


def test_only_what_is_due_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """An advance that nothing is due at touches no row, however many wait."""
    keeper = Keeper()
    keeper.buffer.add(batch([row(f"k{number}", 1000 + number, number) for number in range(100)]))
    looked_at = list[int]()
    take = PrimitiveColumn.take
    monkeypatch.setattr(
        PrimitiveColumn,
        "take",
        lambda self, ids: looked_at.append(len(ids)) or take(self, ids),  # type: ignore[func-returns-value]
    )
    assert keeper.take(1000) == []
    assert keeper.take(1001) == [row("k0", 1000, 0)]
    assert set(looked_at) == {0, 1}
    assert len(np.unique(keeper.buffer.table.live_ids())) == 99


def test_key_may_be_called_like_the_column_that_numbers_rows() -> None:
    buffer = RowBuffer(SCHEMA, ["sequence"], "at")
    rows = batch([row("a", 3, 1), row("b", 2, 1), row("c", 1, 2)])
    buffer.add(rows)
    assert buffer.rows(buffer.due(MICROSECONDS + 10)).to_pylist() == rows.to_pylist()[::-1]
    assert len(buffer) == 3
