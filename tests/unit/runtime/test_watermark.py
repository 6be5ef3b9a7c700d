"""Watermarks: what a source promises of its splits, and what a subtask makes of several inputs."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import StateError
from etl.event_time import FOREVER, EventTime
from etl.runtime.element import Watermark
from etl.runtime.watermark import STORED, InputWatermarks, SourceWatermarks, SplitTime

SECOND = 1_000_000


def batch(*seconds: int | None) -> pa.RecordBatch:
    moments = [None if one is None else one * SECOND for one in seconds]
    return pa.record_batch({"at": pa.array(moments, pa.timestamp("us", "UTC")), "n": pa.array(range(len(seconds)))})


def made(**declared: Any) -> SourceWatermarks:
    return SourceWatermarks(EventTime("at", **declared))


def shown(elements: Any) -> list[Any]:
    """Rows as lists of their seconds, watermarks as plain seconds."""
    return [
        (None if one.time is None else one.time / SECOND, one.idle) if isinstance(one, Watermark)
        else [None if moment is None else moment.timestamp() for moment in one["at"].to_pylist()]
        for one in elements
    ]  # fmt: skip


def test_watermark_follows_the_latest_row_less_the_promised_disorder() -> None:
    times = made(out_of_orderness=timedelta(seconds=5))
    times.assigned(["a"])
    assert shown(times.follow("a", batch(10, 20, 17), 0)) == [[10, 20, 17], (15, False)]
    assert shown(times.follow("a", batch(18, None), 0)) == [[18, None]]
    assert shown(times.follow("a", batch(30), 0)) == [[30], (25, False)]


def test_row_behind_the_watermark_has_it_before_itself() -> None:
    times = made(out_of_orderness=timedelta(seconds=5))
    times.assigned(["a"])
    assert shown(times.follow("a", batch(10, 40, 34, 36, 50, 40), 0)) == [
        [10, 40],
        (35, False),
        [34, 36, 50],
        (45, False),
        [40],
    ]


def test_split_that_waits_holds_the_watermark_back() -> None:
    times = made()
    times.assigned(["a", "b"])
    assert shown(times.follow("a", batch(10, 20), 0)) == [[10, 20]]
    assert shown(times.follow("b", batch(5), 0)) == [[5], (5, False)]
    assert times.ran_dry(lambda: 10**18) is None
    times.assigned(["a"])
    assert shown(times.follow("a", batch(21), 0)) == [[21], (21, False)]


def test_rows_that_move_no_watermark_leave_nothing_to_be_stored() -> None:
    times = made(future_skew=timedelta(seconds=10))
    times.assigned(["a", "b"])
    assert shown(times.follow("a", batch(None, 99), now=0)) == [[None, 99]]
    assert times.stored("a").added_to({}) == {STORED: {"latest": None, "watermark": None}}


def test_splits_in_sequence_are_one_stream() -> None:
    times = made(in_sequence=True)
    times.assigned(["a", "b"])
    assert shown(times.follow("a", batch(10), 0)) == [[10], (10, False)]
    assert shown(times.follow("b", batch(9), 0)) == [[9]]


def test_future_beyond_the_cap_moves_nothing() -> None:
    times = made(future_skew=timedelta(seconds=10))
    times.assigned(["a"])
    assert shown(times.follow("a", batch(5, 10_000, 6), 0)) == [[5, 10_000, 6], (6, False)]


def test_source_is_idle_after_a_while_and_wakes_up() -> None:
    times = made(idle_after=timedelta(seconds=60))
    times.assigned(["a"])
    list(times.follow("a", batch(10), 0))
    assert times.ran_dry(lambda: 59 * SECOND) is None
    assert times.ran_dry(lambda: 60 * SECOND) == Watermark(10 * SECOND, idle=True)
    assert times.ran_dry(lambda: 61 * SECOND) is None
    times.assigned(["a"])
    assert shown(times.follow("a", batch(10), 0)) == [(10, False), [10]]


def test_event_time_is_stored_with_positions_and_comes_back() -> None:
    times = made(out_of_orderness=timedelta(seconds=5))
    times.assigned(["a"])
    list(times.follow("a", batch(10, 100), 0))
    stored = times.stored("a").added_to({"offset": 7})
    assert stored == {
        "offset": 7,
        "event_time": {"latest": "1970-01-01T00:01:40.000000", "watermark": "1970-01-01T00:01:35.000000"},
    }
    time, position = SplitTime.taken_from("a", stored)
    assert position == {"offset": 7}
    again = made(out_of_orderness=timedelta(seconds=5))
    again.restore("a", time)
    assert again.watermark == 95 * SECOND
    again.assigned(["a"])
    assert shown(again.follow("a", batch(94, 96, 102), 0)) == [[94, 96, 102], (97, False)]


@pytest.mark.parametrize("stored", [7, {"latest": 7}, {"latest": "then"}, {"latest": "now"}, {"other": None}])
def test_stored_event_time_that_is_none_is_refused(stored: Any) -> None:
    with pytest.raises(StateError, match=r"^a: the stored event time"):
        SplitTime.taken_from("a", {"event_time": stored})


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(0, 30), st.booleans())
def test_lateness_depends_neither_on_batches_nor_on_restarts(
    chance: random.Random, promised_s: int, in_sequence: bool
) -> None:
    """A row is late or not by the order of reading alone: here with a window that closes as soon as it may."""
    splits = {name: [chance.randrange(0, 200) for _ in range(chance.randrange(1, 40))] for name in ("a", "b", "c")}
    declared = {"out_of_orderness": timedelta(seconds=promised_s), "in_sequence": in_sequence}

    def play(cut: bool) -> list[tuple[int, int | None]]:
        """Each row with the watermark before it, told by the operator that would judge it."""
        times = made(**declared)
        times.assigned(list(splits))
        found: list[tuple[int, int | None]] = []
        watermark: int | None = None
        for name, rows in splits.items():
            begin = 0
            while begin < len(rows):
                end = len(rows) if not cut else chance.randrange(begin + 1, len(rows) + 1)
                for element in times.follow(name, batch(*rows[begin:end]), 0):
                    if isinstance(element, Watermark):
                        watermark = element.time
                    else:
                        found += [(int(one.timestamp()), watermark) for one in element["at"].to_pylist()]
                begin = end
                if cut and chance.random() < 0.3:
                    stored = {one: times.stored(one) for one in splits}
                    times = made(**declared)
                    for one, time in stored.items():
                        times.restore(one, time)
                    times.assigned([one for one in splits if one >= name])
        return [(second, mark if mark is not None and second * SECOND < mark else None) for second, mark in found]

    assert play(cut=True) == play(cut=False)


def test_inputs_are_waited_for_unless_idle() -> None:
    inputs = InputWatermarks(3)
    assert inputs.advance(0, Watermark(10)) is None
    assert inputs.advance(1, Watermark(20)) is None
    assert inputs.advance(2, Watermark(5)) == Watermark(5)
    assert inputs.advance(2, Watermark(5, idle=True)) == Watermark(10)
    assert inputs.advance(2, Watermark(7)) is None
    assert inputs.advance(2, Watermark(30)) is None
    assert inputs.advance(0, Watermark(25)) == Watermark(20)
    assert inputs.advance(0, Watermark(25, idle=True)) is None
    assert inputs.advance(1, Watermark(20, idle=True)) == Watermark(30)
    assert inputs.advance(2, Watermark(30, idle=True)) == Watermark(30, idle=True)


def test_input_that_has_said_nothing_holds_everything_back() -> None:
    inputs = InputWatermarks(2)
    assert inputs.advance(0, Watermark(10)) is None
    assert inputs.advance(1, Watermark(None, idle=True)) == Watermark(10)


def test_restored_watermark_is_told_once_more_and_never_goes_back() -> None:
    inputs = InputWatermarks(2)
    inputs.resume(50)
    assert inputs.advance(0, Watermark(40)) == Watermark(50)
    assert inputs.advance(1, Watermark(50)) is None
    assert inputs.advance(0, Watermark(60)) is None
    assert inputs.advance(1, Watermark(60)) == Watermark(60)


def test_end_of_time_comes_only_when_all_inputs_have_come_to_it() -> None:
    inputs = InputWatermarks(2)
    assert inputs.advance(0, Watermark(10, idle=True)) is None
    assert inputs.advance(1, Watermark(5)) == Watermark(5)
    assert inputs.advance(1, Watermark(FOREVER)) is None
    assert inputs.advance(0, Watermark(20)) == Watermark(20)
    assert inputs.advance(0, Watermark(FOREVER)) == Watermark(FOREVER)
