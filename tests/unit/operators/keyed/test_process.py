"""Functions that remember, against plain dictionaries."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl import ConfigurationError, ListState, MapState, ValueState
from etl.codec import decode_rows, encode_rows
from etl.errors import InternalError, RecordError
from etl.keyed import Process
from etl.operators.keyed.process import ProcessOperator
from etl.schema import Schema
from etl.state import Fragment
from etl.transformation import Location

SCHEMA = Schema.declare({"k": "text", "n": "int4"})
OUTPUT = {"k": "text", "sum": "numeric(20,2)", "seen": "int4[]", "counts": "text", "last": "timestamptz"}
STATES = {
    "sum": ValueState("numeric(20,2)"),
    "seen": ListState("int4"),
    "counts": MapState("int4", "int8"),
    "last": ValueState("timestamptz"),
    "bounds": ValueState("int4[]"),
}


def moment(number: int) -> dt.datetime:
    return dt.datetime(2024, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=number)


def remember(row: dict[str, Any], state: Any) -> Iterator[dict[str, Any]]:
    """Everything that can be done to a state; 7 makes it forget."""
    number = row["n"]
    if number == 7:
        state.sum.clear()
        state.seen.clear()
        state.counts.clear()
        state.last.clear()
        state.bounds.clear()
        return
    if number == 3:
        state.counts.pop(1, None)
        state.seen.set([*state.seen[1:]])
    state.sum.value = (state.sum.value or Decimal(0)) + Decimal(number) / 4
    state.seen.append(number)
    state.counts[number] = state.counts.get(number, 0) + 1
    state.last.value = moment(number)
    state.bounds.value = [min(state.seen), max(state.seen)]
    shown = ",".join(f"{key}:{count}" for key, count in sorted(state.counts.items()))
    yield {"k": row["k"], "sum": state.sum.value, "seen": list(state.seen), "counts": shown, "last": state.last.value}


class Model:
    """The same with dictionaries."""

    def __init__(self) -> None:
        self.keys: dict[str | None, dict[str, Any]] = {}

    def copy(self) -> Model:
        other = Model()
        other.keys = {
            key: {**state, "seen": list(state["seen"]), "counts": dict(state["counts"])}
            for key, state in self.keys.items()
        }
        return other

    def take(self, key: str | None, number: int) -> list[tuple[Any, ...]]:
        if number == 7:
            self.keys.pop(key, None)
            return []
        state = self.keys.setdefault(key, {"sum": Decimal(0), "seen": [], "counts": {}})
        if number == 3:
            state["counts"].pop(1, None)
            state["seen"] = state["seen"][1:]
        state["sum"] += Decimal(number) / 4
        state["seen"].append(number)
        state["counts"][number] = state["counts"].get(number, 0) + 1
        shown = ",".join(f"{one}:{count}" for one, count in sorted(state["counts"].items()))
        return [(key, state["sum"], list(state["seen"]), shown, moment(number))]


def process(function: Any = remember, states: Any = STATES, schema: Any = OUTPUT) -> Process:
    return Process(Location("job.py", 1), "memory", ("k",), function, states, schema)


def operator(transformation: Process) -> ProcessOperator:
    return ProcessOperator(transformation, SCHEMA, transformation.output_schema([SCHEMA]))


def batch(rows: list[tuple[str | None, int]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [[], []]
    arrays = [pa.array(one, field.type) for one, field in zip(columns, SCHEMA.to_arrow(), strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA.to_arrow())


ROWS = st.lists(st.tuples(st.one_of(st.none(), st.sampled_from("abc")), st.integers(0, 7)), max_size=12)


@settings(deadline=None)
@given(st.lists(st.one_of(ROWS, st.sampled_from(["cut", "crash"])), max_size=14))
def test_what_is_remembered_is_what_a_dictionary_would_hold(steps: list[Any]) -> None:
    transformation = process()
    running, model, stored = operator(transformation), Model(), Model()
    chains: dict[int, list[Fragment]] = {}
    for step in steps:
        if step == "cut":
            for fragment in running.cut().fragments:
                if fragment.sequence == 0:
                    chains[fragment.key_group] = []
                rows = decode_rows(encode_rows(fragment.rows))
                chains[fragment.key_group].append(Fragment(fragment.key_group, fragment.sequence, rows))
            stored = model.copy()
        elif step == "crash":
            running, model = operator(transformation), stored.copy()
            for chain in chains.values():
                for fragment in chain:
                    running.restore(fragment)
        else:
            found = [tuple(row.values()) for one in running.process(batch(step)) for row in one.to_pylist()]
            assert found == [row for key, number in step for row in model.take(key, number)]
        assert len(running._state) == len(model.keys)


def only(function: Any, states: dict[str, Any], rows: list[tuple[str | None, int]]) -> list[dict[str, Any]]:
    running = operator(process(function, states, None))
    found = [row for one in running.process(batch(rows)) for row in one.to_pylist()]
    running.cut()
    return found


def test_function_may_return_nothing_a_list_or_a_generator() -> None:
    states = {"x": ValueState("int4")}
    assert only(lambda row, state: None, states, [("a", 1)]) == []
    assert only(lambda row, state: [row, row], states, [("a", 1)]) == [{"k": "a", "n": 1}] * 2


def test_single_row_instead_of_rows_is_refused() -> None:
    with pytest.raises(RecordError, match="returned dict, not rows; use yield, or a list"):
        only(lambda row, state: row, {"x": ValueState("int4")}, [("a", 1)])


def test_error_of_the_function_names_place_and_row() -> None:
    def broken(row: dict[str, Any], state: Any) -> None:
        raise ZeroDivisionError("no")

    with pytest.raises(
        InternalError, match=r'process "memory" at job.py:1: .*broken .* ZeroDivisionError: no for the row'
    ):
        only(broken, {"x": ValueState("int4")}, [("a", 1)])


@pytest.mark.parametrize(
    "value, problem",
    [
        (1.5, 'state "x": 1.5 is float, int4 takes int'),
        (True, 'state "x": True is bool, int4 takes int'),
        ("1", "state \"x\": '1' is str, int4 takes int"),
    ],
)
def test_value_of_another_type_is_refused_at_once(value: Any, problem: str) -> None:
    def keep(row: dict[str, Any], state: Any) -> None:
        state.x.value = value

    with pytest.raises(RecordError) as caught:
        only(keep, {"x": ValueState("int4")}, [("a", 1)])
    assert problem in str(caught.value)


def test_value_that_does_not_fit_is_refused_before_it_is_stored() -> None:
    def keep(row: dict[str, Any], state: Any) -> None:
        state.x.value = 2**31

    with pytest.raises(RecordError, match=r'state "x": 2147483648 does not fit int4'):
        only(keep, {"x": ValueState("int4")}, [("a", 1)])


def test_none_is_no_key_of_a_map() -> None:
    def keep(row: dict[str, Any], state: Any) -> None:
        state.x[None] = 1

    with pytest.raises(RecordError, match='state "x": None is no key'):
        only(keep, {"x": MapState("text", "int4")}, [("a", 1)])


def test_keys_of_which_nothing_is_remembered_leave_no_trace() -> None:
    running = operator(process(lambda row, state: None, {"x": ValueState("int4")}, None))
    list(running.process(batch([("a", 1), ("b", 2)])))
    assert running.cut().fragments == ()
    assert len(running._state) == 0


def test_keys_that_were_only_read_are_not_stored_again() -> None:
    def keep(row: dict[str, Any], state: Any) -> None:
        if state.x.value is None:
            state.x.value = row["n"]

    running = operator(process(keep, {"x": ValueState("int4")}, None))
    list(running.process(batch([("a", 1), ("b", 2)])))
    assert sum(fragment.rows.num_rows for fragment in running.cut().fragments) == 2
    list(running.process(batch([("a", 5), ("c", 2)])))
    assert [row["key:k"] for one in running.cut().fragments for row in one.rows.to_pylist()] == ["c"]


@pytest.mark.parametrize(
    "transformation, problem",
    [
        (process(states={}), "it declares no state"),
        (process(5), "int is not a function"),
        (process(states={"a b": ValueState("int4")}), "state 'a b' is no name of an attribute"),
        (process(states={"_x": ValueState("int4")}), "state '_x' is no name of an attribute"),
        (process(states={"x": ValueState("money")}), 'state "x": column type "money" is not supported'),
        (process(states={"x": ListState("int4[]")}), 'state "x" would hold arrays of arrays'),
    ],
)
def test_mistakes_in_the_declaration_are_told(transformation: Process, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        transformation.output_schema([SCHEMA])
    assert problem in str(caught.value)
