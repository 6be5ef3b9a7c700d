"""Keys and their numbers, against a dict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.operators.keyed import key_index
from etl.operators.keyed.key_index import KeyIndex

KEYS = st.tuples(
    st.one_of(st.none(), st.integers(-3, 40)), st.one_of(st.none(), st.text("ab\0ü", max_size=3), st.just("x" * 300))
)
TYPES = [pa.int64(), pa.string()]


def columns(keys: list[tuple[Any, ...]]) -> list[pa.Array]:
    return [pa.array([key[number] for key in keys], arrow) for number, arrow in enumerate(TYPES)]


@settings(deadline=None)
@given(st.lists(st.lists(KEYS, unique=True, max_size=30), max_size=8))
def test_every_key_keeps_the_number_it_got_first(batches: list[list[tuple[Any, ...]]]) -> None:
    index = KeyIndex(TYPES)
    expected: dict[tuple[Any, ...], int] = {}
    for batch in batches:
        before = len(expected)
        numbered = index.add(columns(batch))
        assert numbered.new.tolist() == [key not in expected for key in batch]
        for key in batch:
            expected.setdefault(key, len(expected))
        assert numbered.ids.tolist() == [expected[key] for key in batch]
        assert len(index) == len(expected) >= before
    found = [column.to_pylist() for column in index.keys(np.arange(len(expected)))]
    assert list(zip(*found, strict=True)) == list(expected)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 60), max_size=30)), max_size=40))
def test_removed_keys_are_new_again_and_ids_are_never_shared(steps: list[tuple[bool, set[int]]]) -> None:
    index = KeyIndex([pa.int64()])
    expected: dict[int, int] = {}
    for adds, keys in steps:
        if adds:
            numbered = index.add([pa.array(sorted(keys), pa.int64())])
            assert numbered.new.tolist() == [key not in expected for key in sorted(keys)]
            assert all(expected.get(key, id_) == id_ for key, id_ in zip(sorted(keys), numbered.ids, strict=True))
            expected |= dict(zip(sorted(keys), numbered.ids.tolist(), strict=True))
        else:
            gone = sorted(keys & expected.keys())
            index.remove(np.array([expected.pop(key) for key in gone], dtype=np.int64))
        assert len(set(expected.values())) == len(expected) == len(index)
        assert index.live_ids().tolist() == sorted(expected.values())
        assert index.keys(np.array(list(expected.values()), dtype=np.int64))[0].to_pylist() == list(expected)
        assert index.ids_end <= 61


def test_table_does_not_grow_when_keys_come_and_go() -> None:
    index = KeyIndex([pa.int64()])
    for first in range(0, 1_000_000, 10_000):
        index.remove(index.add([pa.array(range(first, first + 10_000))]).ids)
    assert (len(index), index.ids_end) == (0, 10_000)
    assert len(index._slots) <= 65_536


def test_equal_hashes_are_not_taken_for_equal_keys(monkeypatch: Any) -> None:
    monkeypatch.setattr(key_index, "hash_within_groups", lambda keys, _: np.full(len(keys[0]), 7, dtype=np.uint64))
    index = KeyIndex([pa.int64()])

    first = index.add([pa.array(range(50))])
    second = index.add([pa.array(range(40, 60))])

    assert first.ids.tolist() == list(range(50))
    assert second.ids.tolist() == list(range(40, 60))
    assert second.new.tolist() == [False] * 10 + [True] * 10


def test_table_grows_with_its_keys() -> None:
    index = KeyIndex([pa.int64()])
    for first in range(0, 100_000, 7_000):
        index.add([pa.array(range(first, first + 7_000))])
    again = index.add([pa.array(range(98_000))])
    assert not again.new.any()
    assert again.ids.tolist() == list(range(98_000))
