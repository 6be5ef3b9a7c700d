"""Rows that are let pass again after some time, against a list of all that ever passed."""

from __future__ import annotations

import datetime as dt
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import ConfigurationError, RecordError
from etl.event_time import FOREVER
from etl.keyed import Deduplicate
from etl.operator import Output, SideOutput
from etl.operators import operator_for
from etl.schema import Schema
from etl.state import StatefulOperator
from etl.transformation import Location
from tests.unit.operators.keyed.stored import Subtasks

SCHEMA = Schema.declare({"k": "text", "at": "timestamptz", "id": "int8"})
BEGIN = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
BEGIN_US = 1_704_067_200_000_000
TTL = 10

Row = tuple[str | None, int, int]


def transformation(**changes: Any) -> Deduplicate:
    declared = {"ttl": timedelta(microseconds=TTL), "time": "at", **changes}
    return Deduplicate(Location("job.py", 1), "once", ("k",), **declared)


class ManualClock:
    def __init__(self) -> None:
        self.time = BEGIN

    def now(self) -> dt.datetime:
        return self.time


def subtasks_of(declared: Deduplicate, clock: Any = None, parallelism: int = 1) -> Subtasks:
    def make() -> StatefulOperator:
        made = operator_for(declared, [SCHEMA], declared.output_schema([SCHEMA]), clock)
        assert isinstance(made, StatefulOperator)
        return made

    return Subtasks(make, ["k"], parallelism)


def batch(rows: list[Row]) -> pa.RecordBatch:
    values = [{"k": key, "at": BEGIN + timedelta(microseconds=at), "id": number} for key, at, number in rows]
    return pa.RecordBatch.from_pylist(values, schema=SCHEMA.to_arrow())


def passed(emitted: list[Output]) -> list[int]:
    return [id_ for one in emitted if isinstance(one, pa.RecordBatch) for id_ in one.column("id").to_pylist()]


def late(emitted: list[Output]) -> list[int]:
    return [row["id"] for one in emitted if isinstance(one, SideOutput) for row in one.batch.to_pylist()]


STEPS = st.lists(
    st.one_of(
        st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 9), st.integers(0, 20)), max_size=6),
        st.integers(5, 25),
        st.sampled_from(["cut", "crash into 1", "crash into 3"]),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_a_row_passes_if_none_that_passed_lies_near_it_however_rows_and_watermarks_come(steps: list[Any]) -> None:
    subtasks = subtasks_of(transformation())
    undone, done = list[Any](), list[Any]()
    found, stored = list[int](), 0
    time, number = 0, 1
    for step in [*steps, "cut"]:
        if isinstance(step, list):
            rows = list[Row]()
            for key, on, behind in step:
                time += on
                rows.append((key, time - behind, number))
                number += 1
            emitted = subtasks.process(batch(rows))
            found += sorted(passed(emitted)) + [-one for one in sorted(late(emitted))]
            undone.append(rows)
        elif isinstance(step, int):
            assert subtasks.advance(BEGIN_US + time - step) == []
            undone.append(time - step)
        elif step == "cut":
            subtasks.cut()
            done, undone, stored = done + undone, [], len(found)
        else:
            subtasks.crash(int(step.rpartition(" ")[2]))
            undone = []
            del found[stored:]
    assert found == judged([*done, *undone])


def judged(steps: list[Any]) -> list[int]:
    """Of each batch the numbers of rows that pass, then those of late rows below 0."""
    watermark = -(10**9)
    everything, found = list[Row](), list[int]()
    for step in steps:
        if isinstance(step, int):
            watermark = max(watermark, step)
            continue
        too_late = list[int]()
        for row in step:
            if row[1] < watermark:
                too_late.append(-row[2])
            elif not any(one[0] == row[0] and abs(one[1] - row[1]) < TTL for one in everything):
                everything.append(row)
                found.append(row[2])
        found += too_late
    return found


def test_keys_that_nothing_can_come_near_to_any_more_leave_the_store() -> None:
    subtasks = subtasks_of(transformation(), parallelism=2)
    subtasks.process(batch([("a", 0, 0), ("a", 30, 1), ("b", 5, 2), ("c", 28, 3)]))
    subtasks.cut()
    assert subtasks.stored_keys() == 3
    subtasks.crash(3)
    subtasks.advance(BEGIN_US + 15)
    subtasks.cut()
    assert subtasks.stored_keys() == 2
    subtasks.advance(BEGIN_US + 38)
    subtasks.cut()
    assert subtasks.stored_keys() == 1
    subtasks.advance(FOREVER)
    subtasks.cut()
    assert (subtasks.stored_keys(), subtasks.summary.watermark) == (1, BEGIN_US + 38)
    subtasks.advance(BEGIN_US + 40)
    subtasks.cut()
    assert subtasks.stored_keys() == 0


def test_late_rows_are_counted_and_go_by_the_side() -> None:
    subtasks = subtasks_of(transformation())
    subtasks.advance(BEGIN_US + 20)
    emitted = subtasks.process(batch([("a", 19, 0), ("a", 20, 1)]))
    assert (passed(emitted), late(emitted)) == ([1], [0])
    subtasks.cut()
    assert (subtasks.summary.late_rows, subtasks.summary.watermark) == (1, BEGIN_US + 20)


def test_without_a_time_of_the_rows_the_clock_at_which_they_come_decides() -> None:
    clock = ManualClock()
    subtasks = subtasks_of(transformation(time=None), clock)
    found = list[list[int]]()
    for on in (0, TTL - 1, 1, 0, 1):
        clock.time += timedelta(microseconds=on)
        found.append(passed(subtasks.process(batch([("a", 0, 0), ("a", 0, 1)]))))
    assert found == [[0], [], [0], [], []]
    subtasks.cut()
    subtasks.crash(2)
    assert subtasks.due() == BEGIN_US + TTL
    subtasks.tick(BEGIN_US + 2 * TTL - 1)
    assert subtasks.due() == BEGIN_US + 2 * TTL
    subtasks.tick(BEGIN_US + 2 * TTL)
    subtasks.cut()
    assert (subtasks.due(), subtasks.stored_keys()) == (None, 0)


def test_row_at_the_end_of_time_is_remembered_for_ever_also_after_a_crash() -> None:
    subtasks = subtasks_of(transformation())
    infinity = pa.array([FOREVER], pa.timestamp("us", "UTC"))
    rows = pa.RecordBatch.from_arrays([pa.array(["a"]), infinity, pa.array([1])], schema=SCHEMA.to_arrow())
    assert passed(subtasks.process(rows)) == [1]
    subtasks.cut()
    subtasks.crash(1)
    assert subtasks.advance(BEGIN_US) == []
    assert passed(subtasks.process(rows)) == []
    assert passed(subtasks.process(batch([("a", 5, 2)]))) == [2]


def test_row_without_a_time_is_refused() -> None:
    rows = pa.RecordBatch.from_pylist([{"k": "a", "id": 5}], schema=SCHEMA.to_arrow())
    with pytest.raises(RecordError, match=r'deduplicate "once" at job.py:1: column "at" is NULL in the row'):
        subtasks_of(transformation()).process(rows)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"ttl": "1 day"}, "ttl='1 day' is no timedelta above 0"),
        ({"ttl": timedelta(-1)}, "is no timedelta above 0"),
        ({"ttl": timedelta.max}, "is no timedelta above 0 and up to 366000 days"),
        ({"ttl": None}, "time='at' is given, and nothing goes by it"),
        ({"keys_in_memory": 5}, "keys_in_memory is given, and keys whose time will come must be in memory"),
    ],
)
def test_mistakes_in_the_declaration_are_told(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        transformation(**changes).output_schema([SCHEMA])
    assert problem in str(caught.value)
