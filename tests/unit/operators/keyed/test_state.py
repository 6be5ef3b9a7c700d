"""State by key against a dict: whatever is added, changed, removed, cut and restored."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.codec import decode_rows, encode_rows
from etl.operators.keyed import state as module
from etl.operators.keyed.columns import ObjectColumn, PrimitiveColumn
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

    def __init__(self) -> None:
        self.numbers = PrimitiveColumn(pa.int64())
        self.texts = ObjectColumn(pa.string())
        self.state = KeyedState("u", {"k": pa.int64()}, {"n": self.numbers, "t": self.texts})

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


def restored(chains: dict[int, list[Fragment]]) -> Keeper:
    keeper = Keeper()
    for chain in chains.values():
        for fragment in chain:
            keeper.state.restore([fragment])
    return keeper


@pytest.mark.parametrize("chain_max", [2, 128])
@settings(deadline=None)
@given(steps=STEPS)
def test_state_is_that_of_a_dict(chain_max: int, steps: list[tuple[str, object]]) -> None:
    before, module.CHAIN_CHUNKS_MAX = module.CHAIN_CHUNKS_MAX, chain_max
    try:
        keeper = Keeper()
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
                keeper, expected = restored(chains), dict(stored)
            assert len(keeper.state) == len(expected)
        cut_into(keeper, chains)
        check(restored(chains), expected)
        check(keeper, expected)
    finally:
        module.CHAIN_CHUNKS_MAX = before


def check(keeper: Keeper, expected: dict[int, int | None]) -> None:
    assert len(keeper.state) == len(expected)
    keys = keeper.state.add([pa.array(expected, pa.int64())])
    assert not keys.new.any()
    assert keeper.numbers.take(keys.ids).to_pylist() == list(expected.values())
    texts = [None if value is None else f"t{value}" for value in expected.values()]
    assert keeper.texts.take(keys.ids).to_pylist() == texts


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
