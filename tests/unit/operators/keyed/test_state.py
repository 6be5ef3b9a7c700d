"""State by key against a dict: whatever is added, changed, removed, cut and restored."""

from __future__ import annotations

import sqlite3
import tempfile

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.codec import decode_rows, encode_rows
from etl.errors import TransientError
from etl.operators.keyed import spill
from etl.operators.keyed import state as module
from etl.operators.keyed.columns import ObjectColumn, PrimitiveColumn
from etl.operators.keyed.spill import SpilledRows
from etl.operators.keyed.spilling import SpillingState
from etl.operators.keyed.state import KeyedState
from etl.state import Fragment

STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("set"), st.dictionaries(st.integers(0, 50), st.one_of(st.none(), st.integers(0, 9)), max_size=20)
        ),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 50), max_size=20)),
        st.tuples(st.just("cut"), st.none()),
        st.tuples(st.just("crash"), st.none()),
    ),
    max_size=40,
)


class Keeper:
    """A state with two columns, and the chains that a store would hold."""

    def __init__(self, keys_in_memory: int | None = None) -> None:
        self.numbers = PrimitiveColumn(pa.int64())
        self.texts = ObjectColumn(pa.string())
        keys, columns = {"k": pa.int64()}, {"n": self.numbers, "t": self.texts}
        self.keys_in_memory = keys_in_memory
        if keys_in_memory is None:
            self.state = KeyedState("u", keys, columns)
        else:
            self.state = SpillingState("u", keys, columns, keys_in_memory)

    def set(self, values: dict[int, int | None]) -> list[bool]:
        keys = self.state.add([pa.array(values, pa.int64())])
        self.numbers.put(keys.ids, pa.array(values.values(), pa.int64()))
        texts = [None if value is None else f"t{value}" for value in values.values()]
        self.texts.put(keys.ids, pa.array(texts, pa.string()))
        self.state.touch(keys.ids)
        new: list[bool] = keys.new.tolist()
        return new

    def remove(self, keys: list[int]) -> None:
        self.state.remove(self.state.add([pa.array(keys, pa.int64())]).ids)


def cut_into(keeper: Keeper, chains: dict[int, list[Fragment]]) -> None:
    cut = keeper.state.cut()
    for fragment in cut.fragments:
        rows = decode_rows(encode_rows(fragment.rows))
        rows.validate(full=True)
        if fragment.sequence == 0:
            chains[fragment.key_group] = []
            assert not any(rows["removed"].to_pylist())
        chains[fragment.key_group].append(Fragment(fragment.key_group, fragment.sequence, rows))
        assert fragment.sequence == len(chains[fragment.key_group]) - 1
    assert cut.summary.chunks == sum(map(len, chains.values()))


def restored(chains: dict[int, list[Fragment]], keys_in_memory: int | None = None) -> Keeper:
    keeper = Keeper(keys_in_memory)
    for chain in chains.values():
        for fragment in chain:
            keeper.state.restore([fragment])
    return keeper


@pytest.mark.parametrize("chain_max, keys_in_memory", [(2, None), (128, None), (2, 3), (128, 10)])
@settings(deadline=None)
@given(steps=STEPS)
def test_state_is_that_of_a_dict(chain_max: int, keys_in_memory: int | None, steps: list[tuple[str, object]]) -> None:
    before, module.CHAIN_CHUNKS_MAX = module.CHAIN_CHUNKS_MAX, chain_max
    pages, spill.PAGE_ROWS = spill.PAGE_ROWS, 4
    try:
        keeper = Keeper(keys_in_memory)
        chains: dict[int, list[Fragment]] = {}
        expected: dict[int, int | None] = {}
        stored: dict[int, int | None] = {}
        for what, given_ in steps:
            if isinstance(given_, dict):
                assert keeper.set(given_) == [key not in expected for key in given_]
                expected |= given_
            elif isinstance(given_, set):
                gone = sorted(given_ & expected.keys())
                keeper.remove(gone)
                expected = {key: value for key, value in expected.items() if key not in gone}
            elif what == "cut":
                cut_into(keeper, chains)
                stored = dict(expected)
            else:
                keeper, expected = restored(chains, keys_in_memory), dict(stored)
            assert len(keeper.state) == len(expected)
        cut_into(keeper, chains)
        check(restored(chains), expected)
        check(keeper, expected)
    finally:
        module.CHAIN_CHUNKS_MAX = before
        spill.PAGE_ROWS = pages


def check(keeper: Keeper, expected: dict[int, int | None]) -> None:
    assert len(keeper.state) == len(expected)
    keys = keeper.state.add([pa.array(expected, pa.int64())])
    assert not keys.new.any()
    assert keeper.numbers.take(keys.ids).to_pylist() == list(expected.values())
    texts = [None if value is None else f"t{value}" for value in expected.values()]
    assert keeper.texts.take(keys.ids).to_pylist() == texts


def test_only_so_many_keys_stay_in_memory() -> None:
    keeper = Keeper(keys_in_memory=100)
    assert isinstance(keeper.state, SpillingState)
    chains: dict[int, list[Fragment]] = {}
    for first in range(0, 2000, 200):
        keeper.set({key: key for key in range(first, first + 200)})
        cut_into(keeper, chains)
    assert (len(keeper.state), keeper.state.keys_on_disk) == (2000, 1925)
    assert not keeper.state.add([pa.array(range(0, 2000, 7), pa.int64())]).new.any()
    assert keeper.state.keys_on_disk < 1925 - 200
    cut_into(keeper, chains)
    assert keeper.state.keys_on_disk == 1925
    check(restored(chains), {key: key for key in range(2000)})
    check(restored(chains, 50), {key: key for key in range(2000)})


def test_keys_used_last_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper(keys_in_memory=4)
    assert isinstance(keeper.state, SpillingState)
    keeper.set({1: 1, 2: 2, 3: 3, 4: 4})
    keeper.state.cut()
    keeper.set({1: 10, 5: 5, 6: 6})
    keeper.state.cut()
    monkeypatch.setattr(keeper.state._spilled, "take", lambda _: pytest.fail("looked at the disk"))
    monkeypatch.setattr(SpilledRows, "__len__", lambda _: 0)
    assert not keeper.state.add([pa.array([1, 5, 6], pa.int64())]).new.any()


def test_a_disk_that_is_full_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = spill._nameless_database

    def small() -> sqlite3.Connection:
        connection = opened()
        connection.execute("PRAGMA max_page_count = 10")
        return connection

    monkeypatch.setattr(spill, "_nameless_database", small)
    keeper = Keeper(keys_in_memory=1)
    keeper.set({key: key for key in range(20_000)})
    with pytest.raises(TransientError) as raised:
        keeper.state.cut()
    assert str(raised.value) == (
        f"state beyond keys_in_memory cannot be kept in {tempfile.gettempdir()}: database or disk is full; make room"
        " there, or set TMPDIR to another directory"
    )


def test_a_returned_key_begins_with_nothing() -> None:
    keeper = Keeper()
    keeper.set({1: 5})
    keeper.remove([1])
    keys = keeper.state.add([pa.array([1], pa.int64())])
    assert keys.new.tolist() == [True]
    assert keeper.numbers.take(keys.ids).to_pylist() == [None]


def test_the_same_state_yields_the_same_bytes() -> None:
    one, other = Keeper(), Keeper()
    one.set({1: 5, 2: None, 3: 7})
    other.set({3: 1, 9: 9})
    other.set({2: 4, 1: 5})
    other.remove([9])
    other.set({3: 7, 2: None})
    assert [encode_rows(one_.rows) for one_ in one.state.cut().fragments] == [
        encode_rows(one_.rows) for one_ in other.state.cut().fragments if one_.rows.num_rows
    ]
