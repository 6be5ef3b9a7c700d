"""Functions that go by time, against a simulation that knows nothing of batches, watermarks in between, or restarts."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import ConfigurationError, InternalError, RecordError
from etl.event_time import FOREVER
from etl.keyed_process import Process, Timer, ValueState
from etl.operator import Output, SideOutput
from etl.operators import operator_for
from etl.schema import Schema
from etl.state import StatefulOperator
from etl.transformation import Location
from tests.unit.operators.keyed.stored import Subtasks

SCHEMA = Schema.declare({"k": "text", "at": "timestamptz", "does": "text", "span": "int8", "id": "int8"})
OUTPUT = {"k": "text", "at": "timestamptz", "what": "text", "count": "int8"}
BEGIN = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
BEGIN_US = 1_704_067_200_000_000
TTL = 12


def moment(number: int) -> dt.datetime:
    return BEGIN + timedelta(microseconds=number)


def number_of(at: dt.datetime) -> int:
    return (at - BEGIN) // timedelta(microseconds=1)


def on_row(row: dict[str, Any], state: Any) -> Iterator[dict[str, Any]]:
    """Everything that can be done: count, set and cancel timers, forget."""
    other = row["at"] + timedelta(microseconds=row["span"])
    match row["does"]:
        case "count":
            state.count.value = (state.count.value or 0) + 1
        case "set":
            state.timers.set(other)
            state.timers.set(other)
        case "cancel":
            state.timers.cancel(other)
        case "clear":
            state.timers.clear()
        case "forget":
            state.count.clear()
    yield {"k": row["k"], "at": row["at"], "what": f"row {row['id']}", "count": state.count.value}


def on_timer(timer: Timer, state: Any) -> Iterator[dict[str, Any]]:
    """Every third moment sets a timer for a later one, for some moments again and again; every fourth counts."""
    number = number_of(timer.moment)
    yield {"k": timer.key["k"], "at": timer.moment, "what": "timer", "count": state.count.value}
    if number % 3 == 0:
        state.timers.set(timer.moment + timedelta(microseconds=9 if number % 2 else 5))
    if number % 4 == 0:
        state.count.value = (state.count.value or 0) + 1


def transformation(**changes: Any) -> Process:
    declared = {
        "time": "at",
        "in_order": True,
        "on_timer": on_timer,
        "on_clock_timer": None,
        "ttl": timedelta(microseconds=TTL),
        "function": on_row,
        "declared": OUTPUT,
        "states": {"count": ValueState("int8")},
        **changes,
    }
    return Process(Location("job.py", 1), "timed", ("k",), **declared)


class ManualClock:
    def __init__(self) -> None:
        self.time = BEGIN

    def now(self) -> dt.datetime:
        return self.time


def maker(process: Process, clock: Any = None) -> Any:
    def make() -> StatefulOperator:
        made = operator_for(process, [SCHEMA], process.output_schema([SCHEMA]), clock)
        assert isinstance(made, StatefulOperator)
        return made

    return make


Row = tuple[str | None, int, str, int, int]
Result = tuple[str | None, int, str, int | None]


def batch(rows: list[Row]) -> pa.RecordBatch:
    arrow = SCHEMA.to_arrow()
    values = [(key, moment(at), does, span, number) for key, at, does, span, number in rows]
    columns: list[Any] = list(zip(*values, strict=True)) if values else [[]] * len(arrow)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, one.type) for column, one in zip(columns, arrow, strict=True)], schema=arrow
    )


@dataclass
class Key:
    count: int | None = None
    written: int | None = None
    timers: set[int] = field(default_factory=set)


class Simulation:
    """One key after the other, one call after the other, in plain Python."""

    def __init__(self, ttl: int | None) -> None:
        self.ttl = ttl
        self.keys: dict[str | None, Key] = {}
        self.found: list[Result] = []

    def begin(self, key: str | None, now: int) -> Key:
        state = self.keys.setdefault(key, Key())
        if self.ttl is not None and state.written is not None and now - state.written >= self.ttl:
            state.count, state.written = None, None
        return state

    def write(self, state: Key, count: int | None, now: int) -> None:
        state.count = count
        state.written = now if state.written is None else max(state.written, now)

    def row(self, row: Row, now: int) -> None:
        key, at, does, span, number = row
        state = self.begin(key, now)
        if does == "count":
            self.write(state, (state.count or 0) + 1, now)
        elif does == "set":
            state.timers.add(at + span)
        elif does == "cancel":
            state.timers.discard(at + span)
        elif does == "clear":
            state.timers.clear()
        elif does == "forget":
            self.write(state, None, now)
        self.found.append((key, at, f"row {number}", state.count))

    def timer(self, key: str | None, at: int, now: int) -> None:
        state = self.begin(key, now)
        state.timers.remove(at)
        self.found.append((key, at, "timer", state.count))
        if at % 3 == 0:
            state.timers.add(at + (9 if at % 2 else 5))
        if at % 4 == 0:
            self.write(state, (state.count or 0) + 1, now)

    def in_order(self, rows: list[Row], watermark: int | None) -> None:
        """Everything that a watermark lets happen, None for all there is; ``rows`` as they came."""
        for key in {row[0] for row in rows}:
            mine = sorted((row for row in rows if row[0] == key), key=lambda row: row[1])
            now = -(10**9)
            self.keys.setdefault(key, Key())
            for row in mine:
                if watermark is not None and row[1] >= watermark:
                    break
                now = self.timers_until(key, row[1], now)
                now = row[1]
                self.row(row, now)
            self.timers_until(key, 10**9 if watermark is None else watermark, now)

    def as_they_come(self, steps: list[Any]) -> None:
        """Rows as they came, watermarks between them, None for the end of time."""
        watermark = -(10**9)
        for step in steps:
            if isinstance(step, list):
                for row in step:
                    self.row(row, max(row[1], watermark))
            else:
                for key in self.keys:
                    self.timers_until(key, 10**9 if step is None else step, watermark)
                watermark = watermark if step is None else step

    def timers_until(self, key: str | None, until: int, now: int) -> int:
        while due := [one for one in self.keys[key].timers if one <= until]:
            now = max(now, min(due))
            self.timer(key, min(due), now)
        return now


def results(emitted: list[Output]) -> list[Result]:
    rows = [row for one in emitted if isinstance(one, pa.RecordBatch) for row in one.to_pylist()]
    return [(row["k"], number_of(row["at"]), row["what"], row["count"]) for row in rows]


def late(emitted: list[Output]) -> list[int]:
    return [row["id"] for one in emitted if isinstance(one, SideOutput) for row in one.batch.to_pylist()]


def by_key(found: list[Result]) -> dict[str | None, list[Result]]:
    return {key: [one for one in found if one[0] == key] for key in {one[0] for one in found}}


BOUND = 6
ROWS = st.tuples(
    st.sampled_from(["a", "b", "c", None]),
    st.integers(0, 4),
    st.integers(0, BOUND),
    st.sampled_from(["count", "set", "cancel", "clear", "forget", "set", "count"]),
    st.integers(-5, 25),
)
"""Key, by how much time goes on, how much too late the row comes, what it does, and for which moment from its own."""
STEPS = st.lists(
    st.one_of(
        st.lists(ROWS, max_size=6),
        st.sampled_from(["advance", "cut", "crash into 1", "crash into 2", "crash into 3"]),
    ),
    max_size=25,
)


@pytest.mark.parametrize("ttl", [None, TTL])
@settings(deadline=None, max_examples=150)
@given(steps=STEPS, drained=st.booleans())
def test_in_order_nothing_depends_on_batches_arrival_and_restarts(
    ttl: int | None, steps: list[Any], drained: bool
) -> None:
    process = transformation(ttl=None if ttl is None else timedelta(microseconds=ttl))
    subtasks = Subtasks(maker(process), ["k"])
    arrived, found = list[Row](), list[Result]()
    stored: tuple[int, int, int, int] = (0, 0, 0, 0)
    time = watermark = 0
    for step in [*steps, "advance"]:
        if isinstance(step, list):
            rows = list[Row]()
            for key, on, behind, does, span in step:
                time += on
                rows.append((key, max(time - behind, watermark), does, span, len(arrived) + len(rows)))
            arrived += rows
            emitted = subtasks.process(batch(rows))
            assert late(emitted) == []
            found += results(emitted)
        elif step == "advance":
            watermark = max(watermark, time - BOUND)
            found += results(subtasks.advance(BEGIN_US + watermark))
        elif step == "cut":
            subtasks.cut()
            stored = (len(arrived), len(found), time, watermark)
        else:
            subtasks.crash(int(step.rpartition(" ")[2]))
            del arrived[stored[0] :], found[stored[1] :]
            time, watermark = stored[2:]
    if drained:
        found += results(subtasks.advance(FOREVER))
    simulation = Simulation(ttl)
    simulation.in_order(arrived, None if drained else watermark)
    assert by_key(found) == by_key(simulation.found)


@settings(deadline=None, max_examples=150)
@given(steps=STEPS, ttl=st.sampled_from([None, TTL]))
def test_as_rows_come_timers_fire_when_the_watermark_does(steps: list[Any], ttl: int | None) -> None:
    """Rows out of order and late ones are given to the function at once; a time to live goes by time all the same."""
    process = transformation(in_order=False, ttl=None if ttl is None else timedelta(microseconds=ttl))
    subtasks = Subtasks(maker(process), ["k"])
    undone = list[Any]()
    found, stored = list[Result](), 0
    time = count = 0
    watermark: int | None = None
    done: list[Any] = []
    for step in [*steps, "advance", "drain"]:
        if isinstance(step, list):
            rows = list[Row]()
            for key, on, behind, does, span in step:
                time += on
                rows.append((key, time - 3 * behind, does, span, count))
                count += 1
            found += results(subtasks.process(batch(rows)))
            undone.append(rows)
        elif step == "advance":
            watermark = time - BOUND
            found += results(subtasks.advance(BEGIN_US + watermark))
            undone.append(watermark)
        elif step == "drain":
            found += results(subtasks.advance(FOREVER))
            undone.append(None)
        elif step == "cut":
            subtasks.cut()
            done += undone
            undone, stored = [], len(found)
        else:
            subtasks.crash(int(step.rpartition(" ")[2]))
            del found[stored:]
            undone = []
    simulation = Simulation(ttl)
    simulation.as_they_come([*done, *undone])
    assert by_key(found) == by_key(simulation.found)


def test_rows_behind_the_watermark_are_late_and_counted() -> None:
    subtasks = Subtasks(maker(transformation()), ["k"], 2)
    subtasks.process(batch([("a", 10, "count", 0, 0), ("b", 20, "count", 0, 1)]))
    subtasks.advance(BEGIN_US + 10)
    emitted = subtasks.process(batch([("a", 9, "count", 0, 2), ("a", 10, "count", 0, 3), ("b", 0, "count", 0, 4)]))
    assert (sorted(late(emitted)), results(emitted)) == ([2, 4], [])
    subtasks.cut()
    assert (subtasks.summary.late_rows, subtasks.summary.watermark) == (2, BEGIN_US + 10)
    subtasks.cut()
    assert subtasks.summary.late_rows == 0
    subtasks.crash(3)
    assert late(subtasks.process(batch([("b", 9, "count", 0, 5)]))) == [5]


def test_a_timer_comes_before_the_rows_of_its_moment_and_after_those_before_it() -> None:
    subtasks = Subtasks(maker(transformation()), ["k"])
    rows: list[Row] = [("a", 10, "set", 5, 0), ("a", 15, "count", 0, 1), ("a", 14, "count", 0, 2)]
    subtasks.process(batch(rows))
    assert [one[2] for one in results(subtasks.advance(BEGIN_US + 15))] == ["row 0", "row 2", "timer"]
    assert [one[2] for one in results(subtasks.advance(BEGIN_US + 16))] == ["row 1"]


def test_timers_of_a_moment_fire_in_an_order_that_stays() -> None:
    names = [f"k{number}" for number in range(40)]
    orders = list[list[str | None]]()
    for arrived in (names, names[::-1]):
        subtasks = Subtasks(maker(transformation(in_order=False)), ["k"])
        for name in arrived:
            subtasks.process(batch([(name, 1, "set", 10, 0)]))
        subtasks.process(batch([("k7", 1, "set", 9, 1)]))
        orders.append([one[0] for one in results(subtasks.advance(BEGIN_US + 11))])
    assert orders[0] == orders[1]
    assert orders[0][0] == "k7"
    assert sorted(orders[0][1:], key=str) == sorted(names)


def test_after_a_drain_the_watermark_is_the_last_moment_that_came() -> None:
    subtasks = Subtasks(maker(transformation(ttl=None)), ["k"])
    subtasks.process(batch([("a", 10, "set", 7, 0), ("b", 12, "set", 30, 1), ("b", 13, "cancel", 29, 2)]))
    subtasks.advance(BEGIN_US + 5)
    assert [one[2] for one in results(subtasks.advance(FOREVER))] == ["row 0", "row 1", "row 2", "timer"]
    subtasks.cut()
    assert (subtasks.summary.watermark, subtasks.stored_keys()) == (BEGIN_US + 17, 0)


def test_a_drain_that_has_nothing_to_close_leaves_the_watermark() -> None:
    subtasks = Subtasks(maker(transformation()), ["k"])
    subtasks.advance(FOREVER)
    subtasks.cut()
    assert subtasks.summary.watermark is None
    subtasks.advance(BEGIN_US + 5)
    subtasks.advance(FOREVER)
    subtasks.cut()
    assert subtasks.summary.watermark == BEGIN_US + 5


def test_timers_that_set_their_successors_for_ever_are_told_at_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(timer: Timer, state: Any) -> None:
        state.timers.set(timer.moment + timedelta(seconds=1))

    monkeypatch.setattr("etl.operators.keyed.timers.SUCCESSORS_MAX", 100)
    subtasks = Subtasks(maker(transformation(on_timer=again)), ["k"])
    subtasks.process(batch([("a", 10, "set", 1, 0)]))
    subtasks.advance(BEGIN_US + 1_000_000 * 500)
    with pytest.raises(
        RecordError, match=r'process "timed" at job.py:1: all timers fire .* 100 were set by such as fired'
    ):
        subtasks.advance(FOREVER)


def test_a_key_with_a_timer_is_not_forgotten_and_one_without_anything_is() -> None:
    subtasks = Subtasks(maker(transformation()), ["k"])
    subtasks.process(batch([("a", 1, "set", 10, 0), ("b", 1, "clear", 0, 1)]))
    subtasks.advance(BEGIN_US + 5)
    subtasks.cut()
    assert subtasks.stored_keys() == 1
    subtasks.advance(BEGIN_US + 11)
    subtasks.cut()
    assert subtasks.stored_keys() == 0


def test_state_is_there_until_the_very_moment_its_time_is_over() -> None:
    for span, count in ((TTL - 1, 2), (TTL, 1)):
        subtasks = Subtasks(maker(transformation(on_timer=None)), ["k"])
        subtasks.process(batch([("a", 100, "count", 0, 0), ("a", 100 + span, "count", 0, 1)]))
        assert [one[3] for one in results(subtasks.advance(BEGIN_US + 1000))] == [1, count]


def test_what_has_outlived_its_time_leaves_the_store_without_being_asked_for() -> None:
    subtasks = Subtasks(maker(transformation(on_timer=None)), ["k"])
    subtasks.process(batch([(f"k{number}", number, "count", 0, number) for number in range(40)]))
    subtasks.advance(BEGIN_US + 40)
    subtasks.cut()
    assert subtasks.stored_keys() == TTL - 1
    subtasks.crash(2)
    subtasks.advance(BEGIN_US + 45)
    subtasks.cut()
    assert subtasks.stored_keys() == TTL - 6
    subtasks.advance(BEGIN_US + 100)
    subtasks.cut()
    assert subtasks.stored_keys() == 0


def on_clock_timer(timer: Timer, state: Any) -> Iterator[dict[str, Any]]:
    yield {"k": timer.key["k"], "at": timer.moment, "what": "clock", "count": state.count.value}
    if state.count.value:
        state.count.value -= 1
        state.clock_timers.set(timer.moment + timedelta(microseconds=5))


def by_clock(row: dict[str, Any], state: Any) -> None:
    state.clock_timers.set(row["at"])
    state.count.value = row["span"] or None


def test_timers_of_the_clock_fire_at_their_moment_and_at_once_where_a_later_run_comes_after_it() -> None:
    process = transformation(
        time=None, in_order=False, on_timer=None, ttl=None, on_clock_timer=on_clock_timer, function=by_clock
    )
    subtasks = Subtasks(maker(process), ["k"])
    assert subtasks.due() is None
    subtasks.process(batch([("a", 50, "", 2, 0), ("b", 70, "", 0, 0)]))
    assert subtasks.due() == BEGIN_US + 50
    assert results(subtasks.tick(BEGIN_US + 49)) == []
    assert results(subtasks.tick(BEGIN_US + 50)) == [("a", 50, "clock", 2)]
    assert subtasks.due() == BEGIN_US + 55
    subtasks.cut()
    subtasks.crash(3)
    assert subtasks.due() == BEGIN_US + 55
    assert sorted(results(subtasks.tick(BEGIN_US + 100)), key=str) == [
        ("a", 55, "clock", 1),
        ("a", 60, "clock", 0),
        ("b", 70, "clock", None),
    ]
    assert subtasks.due() is None


def test_without_a_time_of_the_rows_the_clock_decides_what_has_outlived_its_time() -> None:
    clock = ManualClock()
    process = transformation(time=None, in_order=False, on_timer=None, ttl=timedelta(microseconds=TTL))
    subtasks = Subtasks(maker(process, clock), ["k"])
    found = [one[3] for one in results(subtasks.process(batch([("a", 5, "count", 0, 0), ("b", 5, "count", 0, 0)])))]
    for on in (TTL - 1, TTL - 1, TTL):
        clock.time += timedelta(microseconds=on)
        found += [one[3] for one in results(subtasks.process(batch([("a", 5, "count", 0, 0)])))]
    assert found == [1, 1, 2, 3, 1]
    assert subtasks.due() == BEGIN_US + TTL
    subtasks.tick(BEGIN_US + 3 * TTL - 2)
    subtasks.cut()
    assert (subtasks.stored_keys(), subtasks.due()) == (1, BEGIN_US + 4 * TTL - 2)


@pytest.mark.parametrize("type_, shown", [("timestamp", moment(7).replace(tzinfo=None)), ("date", dt.date(2024, 1, 8))])
def test_moments_are_of_the_type_of_the_column(type_: str, shown: Any) -> None:
    schema = Schema.declare({"k": "text", "at": type_})
    seen = list[Any]()

    def set_timer(row: dict[str, Any], state: Any) -> None:
        state.timers.set(shown)

    process = transformation(
        function=set_timer,
        on_timer=lambda timer, state: seen.append(timer.moment),
        declared=None,
        ttl=timedelta(days=9),
    )
    subtasks = Subtasks(lambda: operator_for(process, [schema], schema), ["k"])  # type: ignore[arg-type,return-value]
    at = dt.datetime(2024, 1, 1) if type_ == "timestamp" else dt.date(2024, 1, 1)
    rows = pa.RecordBatch.from_pylist([{"k": "a", "at": at}], schema=schema.to_arrow())
    subtasks.process(rows)
    subtasks.advance(BEGIN_US + 1)
    subtasks.cut()
    subtasks.crash(1)
    assert seen == []
    subtasks.advance(FOREVER)
    assert seen == [shown]


@pytest.mark.parametrize(
    "given_, problem",
    [
        (dt.datetime(2024, 1, 1), "has no time zone"),
        (5, "5 is int, timestamptz takes datetime"),
        (None, "None is no moment"),
        (dt.datetime.max.replace(tzinfo=dt.timezone(timedelta(hours=-5))), "timestamptz"),
    ],
)
def test_what_is_no_moment_is_refused_with_function_and_row(given_: Any, problem: str) -> None:
    def set_timer(row: dict[str, Any], state: Any) -> None:
        state.timers.set(given_)

    subtasks = Subtasks(maker(transformation(function=set_timer)), ["k"])
    subtasks.process(batch([("a", 10, "set", 1, 0)]))
    with pytest.raises(RecordError) as caught:
        subtasks.advance(FOREVER)
    assert str(caught.value).startswith('process "timed" at job.py:1: state "timers": ')
    assert problem in str(caught.value)
    assert "set_timer" in str(caught.value)
    assert "for the row {'k': 'a'" in str(caught.value)


def test_a_timer_that_sets_itself_again_is_refused_with_function_and_key() -> None:
    def same(timer: Timer, state: Any) -> None:
        state.timers.set(timer.moment)

    subtasks = Subtasks(maker(transformation(on_timer=same)), ["k"])
    subtasks.process(batch([("a", 10, "set", 1, 0)]))
    with pytest.raises(
        RecordError, match=r"is not after 2024-01-01 00:00:00.000011.* in .*same .*for the timer of {'k': 'a'}"
    ):
        subtasks.advance(FOREVER)


def test_error_of_a_timer_function_names_it_and_the_timer() -> None:
    def broken(timer: Timer, state: Any) -> None:
        raise ZeroDivisionError("no")

    subtasks = Subtasks(maker(transformation(on_timer=broken)), ["k"])
    subtasks.process(batch([("a", 10, "set", 1, 0)]))
    with pytest.raises(
        InternalError, match=r"broken .* ZeroDivisionError: no for the timer of {'k': 'a'} at 2024-01-01"
    ):
        subtasks.advance(FOREVER)


def test_row_without_a_time_is_refused_where_its_time_matters() -> None:
    rows = pa.RecordBatch.from_pylist([{"k": "a", "id": 5}], schema=SCHEMA.to_arrow())
    for process in (transformation(), transformation(in_order=False)):
        with pytest.raises(RecordError, match=r'column "at" is NULL in the row {.*}; filter such rows before'):
            Subtasks(maker(process), ["k"]).process(rows)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"time": None}, "in_order needs the time of the rows"),
        ({"time": None, "in_order": False}, "on_timer needs the time of the rows"),
        ({"on_timer": 5}, "on_timer=5 is not a function"),
        ({"on_clock_timer": "f"}, "on_clock_timer='f' is not a function"),
        ({"in_order": False, "on_timer": None, "ttl": None}, "time='at' is given, and nothing goes by it"),
        ({"ttl": 5}, "ttl=5 is no timedelta above 0"),
        ({"ttl": timedelta(0)}, "ttl=datetime.timedelta(0) is no timedelta above 0"),
        ({"ttl": timedelta.max}, "is no timedelta above 0 and up to 366000 days"),
        ({"states": {"timers": ValueState("int8")}}, 'state "timers" has the name of the timers'),
        ({"keys_in_memory": 5}, "keys_in_memory is given, and keys whose time will come must be in memory"),
    ],
)
def test_mistakes_in_the_declaration_are_told(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        transformation(**changes).output_schema([SCHEMA])
    assert problem in str(caught.value)


def test_only_what_takes_rows_in_order_has_late_ones() -> None:
    assert transformation().side_schema("late", [SCHEMA]) == SCHEMA
    with pytest.raises(ConfigurationError, match="no row is late for it: it gets each one when it comes"):
        transformation(in_order=False).side_schema("late", [SCHEMA])
