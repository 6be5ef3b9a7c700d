"""What is due when, against a sorted list."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.operators.keyed.time_queue import TimeQueue

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(-50, 50))), st.tuples(st.just("take"), st.integers(-60, 60))
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_what_is_due_comes_in_the_order_of_moments_and_of_equal_ones_as_added(steps: list[tuple[str, object]]) -> None:
    queue, model, added = TimeQueue(), list[tuple[int, int]](), 0
    for _, given_ in steps:
        if isinstance(given_, list):
            ids = range(added, added + len(given_))
            added += len(given_)
            queue.add(np.array(given_, dtype=np.int64), np.array(ids, dtype=np.int64))
            model += zip(given_, ids, strict=True)
        else:
            assert isinstance(given_, int)
            moments, taken = queue.take(given_)
            due = sorted(pair for pair in model if pair[0] <= given_)
            model = [pair for pair in model if pair[0] > given_]
            assert list(zip(moments.tolist(), taken.tolist(), strict=True)) == due
        assert len(queue) == len(model)
        assert queue.earliest == min((moment for moment, _ in model), default=None)


def test_many_small_additions_make_few_runs() -> None:
    queue = TimeQueue()
    for number in range(1000):
        queue.add(np.array([number % 7]), np.array([number]))
    assert len(queue._runs) <= 10
    assert queue.take(0)[1].tolist() == list(range(0, 1000, 7))


def test_what_was_taken_is_not_held_in_memory() -> None:
    queue = TimeQueue()
    queue.add(np.arange(10_000), np.arange(10_000))
    queue.take(9_989)
    ((moments, ids),) = queue._runs
    assert (moments.base, ids.base) == (None, None)
    assert ids.tolist() == list(range(9_990, 10_000))
