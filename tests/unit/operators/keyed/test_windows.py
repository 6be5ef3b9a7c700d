"""Windows against an oracle that takes one row after the other, whatever the batches, subtasks and restarts."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import RecordError, StateError
from etl.event_time import FOREVER
from etl.keyed import Emission
from etl.operators import operator_for
from etl.operators.keyed import windowed
from etl.schema import Schema
from etl.window import Session, Sliding, Tumbling
from etl.windowed import WindowAggregate
from tests.unit.operators.keyed.windowing import (
    MINUTE,
    NINETEEN_SEVENTY,
    SCHEMA,
    SESSION,
    SLIDING,
    TUMBLING,
    Oracle,
    Result,
    Row,
    Subtasks,
    batch_of,
    minutes,
    window_aggregate,
)

FIXED = st.one_of(
    st.builds(Tumbling, st.integers(1, 12).map(minutes), st.integers(-5, 5).map(minutes)),
    st.integers(1, 6).flatmap(
        lambda every: st.builds(
            Sliding,
            st.integers(every, 3 * every).map(minutes),
            st.just(minutes(every)),
            st.integers(-5, 5).map(minutes),
        )
    ),
)
TRANSFORMATIONS = st.one_of(
    st.builds(
        lambda window, emit, late: window_aggregate(window, emit=emit, late=late),
        FIXED,
        st.sampled_from([Emission.CLOSE, Emission.CHECKPOINT]),
        st.sampled_from([0, 0, 3, 11]),
    ),
    st.builds(window_aggregate, st.builds(Session, st.integers(1, 8).map(minutes))),
)
KEYS = st.one_of(st.none(), st.integers(0, 3))
NUMBERS = st.one_of(st.none(), st.integers(-(2**50), 2**50))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), st.lists(st.tuples(KEYS, st.integers(-20, 60), NUMBERS), min_size=1, max_size=12)),
        st.tuples(st.just("watermark"), st.integers(-20, 70)),
        st.tuples(st.just("flush"), st.none()),
        st.tuples(st.just("cut"), st.none()),
        st.tuples(st.just("restart"), st.integers(1, 3)),
        st.tuples(st.just("drain"), st.integers(1, 3)),
    ),
    max_size=14,
)


@settings(deadline=None, max_examples=100)
@given(transformation=TRANSFORMATIONS, steps=STEPS, parallelism=st.integers(1, 3), size=st.integers(1, 5))
def test_windows_are_those_of_one_row_after_the_other(
    transformation: WindowAggregate, steps: list[tuple[str, Any]], parallelism: int, size: int
) -> None:
    oracle, running = Oracle(transformation), Subtasks(transformation, parallelism)
    highest = -(10**6)
    number = 0
    for step, argument in [*steps, ("drain", 2), ("drain", 1)]:
        expected: list[Result] = []
        found: list[Result] = []
        if step == "rows":
            rows = [Row(key, at, n, number + place) for place, (key, at, n) in enumerate(argument)]
            number += len(rows)
            for row in rows:
                oracle.row(row)
            for first in range(0, len(rows), size):
                found += running.process(rows[first : first + size])
        elif step == "watermark":
            highest = max(highest, argument)
            expected, found = oracle.advance(highest), running.advance(highest)
        elif step == "drain":
            expected, found = oracle.advance(None), running.advance(None)
        if step in ("flush", "cut", "restart", "drain"):
            expected += oracle.flush()
            found += running.flush()
            if step != "flush":
                running.cut()
            if step in ("restart", "drain"):
                running.restart(argument)
        assert Counter(found) == Counter(expected)
    assert Counter(running.late) == Counter(row.id for row in oracle.late)
    assert running.late_rows == len(oracle.late)


PROMISED = st.lists(st.tuples(KEYS, st.integers(0, 6), st.integers(0, 12), NUMBERS), max_size=50)
"""Rows of a source: key, minutes since the latest one before, minutes by which the row comes late, number."""


@settings(deadline=None, max_examples=60)
@given(
    window=st.one_of(FIXED, st.builds(Session, st.integers(1, 8).map(minutes))),
    script=PROMISED,
    parallelism=st.integers(1, 4),
    data=st.data(),
)
def test_rows_that_keep_their_promise_come_to_the_windows_of_all_rows_at_once(
    window: Any, script: list[tuple[Any, ...]], parallelism: int, data: st.DataObject
) -> None:
    """Each window once, with all of its rows, whenever it is cut, restarted or drained: against no watermark at all."""
    rows: list[Row] = []
    running = Subtasks(window_aggregate(window), parallelism)
    found: list[Result] = []
    latest = 0
    while len(rows) < len(script):
        until = data.draw(st.integers(len(rows) + 1, len(script)))
        batch: list[Row] = []
        for key, later, behind, number in script[len(rows) : until]:
            latest += later
            batch.append(Row(key, latest - behind, number, len(rows) + len(batch)))
        rows += batch
        found += running.process(batch)
        found += running.advance(latest - 12)
        if data.draw(st.booleans()):
            found += running.flush()
            running.cut()
            running.restart(data.draw(st.integers(1, 4)))
    found += running.advance(None)

    everything = Oracle(window_aggregate(window))
    for row in rows:
        everything.row(row)
    assert Counter(found) == Counter(everything.advance(None))
    assert running.late == []


def ids_of_windows(found: list[Result]) -> list[tuple[int, int, int]]:
    return [(start, end, rows) for _, start, end, rows in found]


def rows_at(*moments: int, key: int = 1) -> list[Row]:
    return [Row(key, at, 1, number) for number, at in enumerate(moments)]


def test_windows_contain_their_start_and_not_their_end() -> None:
    running = Subtasks(window_aggregate(TUMBLING, rows=pl.len()))
    running.process(rows_at(0, 9, 10, -1, -10))
    assert ids_of_windows(running.advance(9)) == [(-10, 0, 2)]
    assert ids_of_windows(running.advance(10)) == [(0, 10, 2)]
    assert ids_of_windows(running.advance(100)) == [(10, 20, 1)]


def test_sliding_windows_have_a_row_in_each_that_contains_it() -> None:
    running = Subtasks(window_aggregate(SLIDING, rows=pl.len()))
    running.process(rows_at(8))
    assert ids_of_windows(running.advance(None)) == [(0, 10, 1), (4, 14, 1), (8, 18, 1)]


def test_rows_the_gap_apart_are_in_different_sessions() -> None:
    running = Subtasks(window_aggregate(SESSION, rows=pl.len()))
    running.process(rows_at(0, 4, 9, 13, 14))
    assert ids_of_windows(running.advance(8)) == []
    assert ids_of_windows(running.advance(9)) == [(0, 9, 2)]
    assert ids_of_windows(running.advance(None)) == [(9, 19, 3)]


def test_row_connects_sessions() -> None:
    running = Subtasks(window_aggregate(SESSION, rows=pl.len()))
    for moment in (10, 4, 16, 7, 13):
        running.process(rows_at(moment))
    assert ids_of_windows(running.advance(None)) == [(4, 21, 5)]


def test_session_goes_on_for_days() -> None:
    """What is remembered of it does not grow."""
    running = Subtasks(window_aggregate(SESSION, rows=pl.len()))
    for moment in range(0, 3000, 4):
        running.process(rows_at(moment))
        assert running.advance(moment) == []
        if moment % 100 == 0:
            running.flush()
            running.cut()
    running.cut()
    running.restart(1)
    running.cut()
    live = {row for chain in running.chains.values() for one in chain for row in one.rows.column("key:k").to_pylist()}
    assert live == {1}
    assert ids_of_windows(running.advance(3000 + 4)) == [(0, 2996 + 5, 750)]


def test_window_that_was_closed_on_purpose_stays_closed() -> None:
    running = Subtasks(window_aggregate(TUMBLING, rows=pl.len()))
    running.process(rows_at(3, 12))
    assert ids_of_windows(running.advance(None)) == [(0, 10, 1), (10, 20, 1)]
    running.flush()
    running.cut()
    running.restart(2)
    running.process(rows_at(19, 20))
    assert running.late == [0]
    assert ids_of_windows(running.advance(None)) == [(20, 30, 1)]


def test_late_rows_are_counted_since_the_last_cut() -> None:
    running = Subtasks(window_aggregate(TUMBLING, rows=pl.len()))
    running.advance(10)
    running.process(rows_at(0, 9, 10))
    running.cut()
    assert (running.late, running.late_rows) == ([0, 1], 2)
    running.cut()
    assert running.late_rows == 2


def test_rows_within_the_lateness_are_emitted_again_at_a_barrier_or_at_the_end_of_it() -> None:
    running = Subtasks(window_aggregate(TUMBLING, late=5, rows=pl.len()))
    running.process(rows_at(1))
    assert ids_of_windows(running.advance(10)) == [(0, 10, 1)]
    assert running.process(rows_at(2)) == []
    assert running.process(rows_at(3)) == []
    assert running.advance(12) == []
    assert ids_of_windows(running.flush()) == [(0, 10, 3)]
    assert running.flush() == []
    assert running.process(rows_at(4)) == []
    assert ids_of_windows(running.advance(15)) == [(0, 10, 4)]
    running.process(rows_at(5))
    assert running.late == [0]


def test_early_results_come_once_a_checkpoint() -> None:
    running = Subtasks(window_aggregate(TUMBLING, emit=Emission.CHECKPOINT, rows=pl.len()))
    running.process(rows_at(1, 11))
    assert ids_of_windows(running.flush()) == [(0, 10, 1), (10, 20, 1)]
    running.process(rows_at(2))
    assert ids_of_windows(running.advance(10)) == [(0, 10, 2)]
    assert running.flush() == []


def test_emission_and_lateness_may_change_from_run_to_run() -> None:
    running = Subtasks(window_aggregate(TUMBLING, rows=pl.len()))
    running.process(rows_at(1, 11))
    assert ids_of_windows(running.advance(10)) == [(0, 10, 1)]
    running.cut()
    running.transformation = window_aggregate(TUMBLING, emit=Emission.CHECKPOINT, late=5, rows=pl.len())
    running.restart(2)
    assert ids_of_windows([*running.advance(20), *running.flush(), *running.advance(25)]) == [(10, 20, 1)]
    running.process(rows_at(26))
    assert ids_of_windows(running.flush()) == [(20, 30, 1)]
    running.cut()
    running.transformation = window_aggregate(TUMBLING, rows=pl.len())
    running.restart(1)
    assert running.advance(30) == []  # its present result has gone out


def test_windows_closed_by_the_stored_watermark_are_emitted_by_who_had_not_closed_them() -> None:
    """In mode at-least-once subtasks may be cut at different watermarks; the highest one is stored."""
    running = Subtasks(window_aggregate(TUMBLING, rows=pl.len()))
    running.process(rows_at(1))
    running.cut()
    running.stored_watermark = 10 * MINUTE
    running.restart(1)
    assert ids_of_windows(running.flush()) == [(0, 10, 1)]


@pytest.mark.parametrize(
    "before, after, shown",
    [
        (TUMBLING, Tumbling(minutes(20)), "emitted (tumbling windows of 0:10:00)"),
        (TUMBLING, Tumbling(minutes(10), minutes(1)), "emitted (tumbling windows of 0:10:00 offset by 0:01:00)"),
        (TUMBLING, SLIDING, "emitted (sliding windows of 0:10:00 every 0:04:00)"),
        (SESSION, Session(minutes(6)), "first (sessions with a gap of 0:06:00)"),
        (SESSION, Tumbling(minutes(5)), "first (sessions with a gap of 0:05:00)"),
    ],
)
def test_other_windows_do_not_go_on_from_what_is_remembered(before: Any, after: Any, shown: str) -> None:
    running = Subtasks(window_aggregate(before, rows=pl.len()))
    running.process(rows_at(1))
    running.cut()
    running.transformation = window_aggregate(after, rows=pl.len())
    with pytest.raises(StateError) as caught:
        running.restart(1)
    assert shown in str(caught.value)


@pytest.mark.parametrize("window", [TUMBLING, SESSION])
def test_row_without_a_time_is_refused(window: Any) -> None:
    transformation = window_aggregate(window, rows=pl.len())
    running = operator_for(transformation, [SCHEMA], transformation.output_schema([SCHEMA]))
    with pytest.raises(RecordError) as caught:
        list(running.process(batch_of([(1, None, 1, 1)])))
    assert str(caught.value) == (
        'window aggregate "windows" at job.py:1: column "at" is NULL, and a row without a time is in no window; drop'
        ' such rows before with filter(pl.col("at").is_not_null())'
    )


@pytest.mark.parametrize("type_", ["timestamptz", "timestamp", "date"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_moment_that_is_none_is_refused(type_: str, sign: int) -> None:
    schema = Schema.declare({"k": "int4", "at": type_})
    arrow = schema["at"].arrow
    furthest = 2**31 - 1 if type_ == "date" else 2**63 - 1
    moments = pa.array([sign * furthest], pa.int32() if type_ == "date" else pa.int64()).view(arrow)
    transformation = window_aggregate(Tumbling(dt.timedelta(days=1)), rows=pl.len())
    running = operator_for(transformation, [schema], transformation.output_schema([schema]))
    with pytest.raises(RecordError, match='column "at" has infinity or a year beyond 100000, which is in no window'):
        list(
            running.process(pa.RecordBatch.from_arrays([pa.array([1], pa.int32()), moments], schema=schema.to_arrow()))
        )


@pytest.mark.parametrize(
    "window, borders",
    [
        (Tumbling(dt.timedelta(days=7), dt.timedelta(days=-3)), [(1, 8), (8, 15)]),
        (Sliding(dt.timedelta(days=2), dt.timedelta(days=1)), [(6, 8), (7, 9), (8, 10)]),
        (Session(dt.timedelta(days=1)), [(7, 8), (8, 9)]),
        (Session(dt.timedelta(days=2)), [(7, 10)]),
    ],
)
def test_windows_of_dates_are_of_dates(window: Any, borders: list[tuple[int, int]]) -> None:
    schema = Schema.declare({"k": "int4", "at": "date"})
    transformation = window_aggregate(window, rows=pl.len())
    output = transformation.output_schema([schema])
    running = operator_for(transformation, [schema], output)
    assert list(running.process(batch_of([(1, dt.date(2024, 1, 7)), (1, dt.date(2024, 1, 8))], schema))) == []
    (found,) = running.advance(FOREVER)
    assert isinstance(found, pa.RecordBatch)
    assert found.schema == output.to_arrow()
    assert [(row["window_start"].day, row["window_end"].day) for row in found.to_pylist()] == borders


def test_batch_with_rows_in_many_windows_is_worked_off_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windowed, "ASSIGNED_ROWS_MAX", 10)
    transformation = window_aggregate(SLIDING)
    running, oracle = Subtasks(transformation), Oracle(transformation)
    rows = [Row(number % 3, number, number, number) for number in range(50)]
    running.advance(20)
    oracle.advance(20)
    running.process(rows)
    for row in rows:
        oracle.row(row)
    assert Counter(running.advance(None)) == Counter(oracle.advance(None))
    assert running.late == [row.id for row in oracle.late]


def test_every_part_of_an_aggregation_can_be_absorbed_by_another_session() -> None:
    """Sums of decimals, texts, floats with NaN: as if all rows had come to one session from the start."""
    schema = Schema.declare(
        {"k": "int4", "at": "timestamptz", "d": "numeric(38,2)", "t": "text", "f": "float8", "b": "bool"}
    )
    expressions: dict[str, Any] = {
        f"{name}_{what}": getattr(pl.col(name), what)()
        for name, kinds in {
            "d": ("sum", "mean", "min", "max", "count"),
            "t": ("min", "max", "count"),
            "f": ("sum", "mean", "min", "max"),
            "b": ("sum", "max"),
        }.items()
        for what in kinds
    }
    expressions |= {"t_early": pl.col("t").sort_by("at").first(), "d_late": pl.col("d").sort_by("at").last()}
    values = [
        (Decimal("1e34"), "b", 1.5, True),
        (None, None, None, None),
        (Decimal("-1e34"), "ä", float("nan"), False),
        (Decimal("0.01"), "", -0.0, True),
        (Decimal("-7.77"), None, 0.0, None),
    ]
    rows = [(1, NINETEEN_SEVENTY + minutes(4 * number), *one) for number, one in enumerate(values)]
    (whole,) = drained(window_aggregate(Tumbling(minutes(60)), **expressions), schema, [rows])
    for order in (rows, rows[::-1], [rows[1], rows[3], rows[0], rows[4], rows[2]]):
        (session,) = drained(window_aggregate(SESSION, **expressions), schema, [[row] for row in order])
        assert (session.pop("window_start"), session.pop("window_end")) == (rows[0][1], rows[-1][1] + minutes(5))
        assert repr(session) == repr({name: value for name, value in whole.items() if name in session})


def drained(transformation: WindowAggregate, schema: Schema, batches: list[list[tuple[Any, ...]]]) -> list[Any]:
    running = operator_for(transformation, [schema], transformation.output_schema([schema]))
    for rows in batches:
        assert list(running.process(batch_of(rows, schema))) == []
    return [row for one in running.advance(FOREVER) if isinstance(one, pa.RecordBatch) for row in one.to_pylist()]
