"""Ids by key and time against a list; removed ids are given to others, as in a table of state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.operators.keyed import key_times
from etl.operators.keyed.key_times import NONE, KeyTimes

HIGHEST = (1 << 64) - 1


@dataclass(frozen=True)
class Entry:
    key: int
    moment: int
    number: int
    id: int


def keys_of(*keys: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(keys, dtype=np.uint64)


def moments_of(*moments: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(moments, dtype=np.int64)


KEYS = st.sampled_from([0, 1, 2, HIGHEST])


@settings(deadline=None, max_examples=150)
@given(
    steps=st.lists(
        st.one_of(
            st.lists(st.tuples(KEYS, st.integers(-5, 5)), min_size=1, max_size=8),
            st.sets(st.integers(0, 20), max_size=10),
        ),
        max_size=15,
    ),
    asked=st.lists(st.tuples(KEYS, st.integers(-6, 6), st.integers(-6, 6)), max_size=6),
    pairs_max=st.sampled_from([1, 3, 1000]),
)
def test_what_is_found_is_what_a_search_of_all_finds(
    steps: list[list[tuple[int, int]] | set[int]], asked: list[tuple[int, int, int]], pairs_max: int
) -> None:
    times, there, free, number = KeyTimes(), list[Entry](), list[int](), 0
    for step in steps:
        if isinstance(step, set):
            gone = [entry.id for entry in there if entry.id in step]
            times.remove(np.array(gone, dtype=np.int64))
            there = [entry for entry in there if entry.id not in step]
            free += gone
            continue
        added = []
        for key, moment in step:
            added.append(Entry(key, moment, number, free.pop() if free else number))
            number += 1
        there += added
        columns = (keys_of(*(e.key for e in added)), moments_of(*(e.moment for e in added)))
        times.add(*columns, np.array([e.id for e in added], dtype=np.int64))
    keys, first, last = keys_of(*(a[0] for a in asked)), *(moments_of(*(a[n] for a in asked)) for n in (1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_times, "PAIRS_MAX", pairs_max)
        pairs = [pair for rows, ids in times.within(keys, first, last) for pair in zip(rows, ids, strict=True)]
    assert sorted(pairs) == sorted(
        (row, entry.id)
        for row, (key, begin, end) in enumerate(asked)
        for entry in there
        if entry.key == key and begin <= entry.moment <= end
    )


def test_latest_is_the_last_one_of_the_highest_moment() -> None:
    times = KeyTimes()
    times.add(keys_of(1, 1, 2, 1), moments_of(5, 5, 1, 7), np.array([0, 1, 2, 3]))
    times.add(keys_of(1, 2), moments_of(4, 1), np.array([4, 5]))
    times.remove(np.array([0]))
    asked = [(1, 3), (1, 4), (1, 6), (1, 7), (2, 0), (2, 9), (3, 9)]
    found = times.latest(keys_of(*(key for key, _ in asked)), moments_of(*(moment for _, moment in asked)))
    assert found.tolist() == [NONE, 4, 1, 3, NONE, 5, NONE]
    assert KeyTimes().latest(keys_of(1), moments_of(1)).tolist() == [NONE]


def test_runs_stay_few_and_removed_ids_leave_them() -> None:
    times = KeyTimes()
    for number in range(1000):
        times.add(keys_of(number % 7), moments_of(number), np.array([number % 10]))
        if number >= 9:
            times.remove(np.array([(number + 1) % 10]))
    assert len(times._runs) < 12
    assert sum(len(run.ids) for run in times._runs) < 50
