"""Functions that remember, against plain dictionaries."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl import ConfigurationError, ListState, MapState, ValueState
from etl.codec import decode_rows, encode_rows
from etl.errors import InternalError, RecordError, StateError
from etl.keyed_process import Process
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
                    running.restore([fragment])
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


def test_function_may_return_whatever_can_be_iterated() -> None:
    states = {"x": ValueState("int4")}
    assert only(lambda row, state: (row,), states, [("a", 1)]) == [{"k": "a", "n": 1}]
    assert only(lambda row, state: map(dict, [row]), states, [("a", 1), ("b", 2)]) == [
        {"k": "a", "n": 1},
        {"k": "b", "n": 2},
    ]


@pytest.mark.parametrize("returned", [0, "", b"", {}, False])
def test_what_is_empty_but_no_rows_is_refused(returned: object) -> None:
    with pytest.raises(RecordError, match=f"returned {type(returned).__name__}, not rows"):
        only(lambda row, state: returned, {"x": ValueState("int4")}, [("a", 1)])


def test_attribute_that_another_object_lacks_is_an_error_of_the_function() -> None:
    with pytest.raises(InternalError, match=r"raised AttributeError: 'dict' object has no attribute 'y' for the row"):
        only(lambda row, state: row.y, {"x": ValueState("int4")}, [("a", 1)])


def test_key_that_was_forgotten_and_comes_back_begins_anew() -> None:
    """Also while the store still has to be told that it was forgotten."""
    seen: list[int | None] = []

    def keep(row: dict[str, Any], state: Any) -> None:
        seen.append(state.x.value)
        state.x.value = row["n"] or None

    running = operator(process(keep, {"x": ValueState("int4")}, None))
    for number in (1, 0, 2, 3):
        list(running.process(batch([("a", number)])))
        running.cut() if number == 1 else None
    assert seen == [None, 1, None, 2]
    assert [row["state:x"] for one in running.cut().fragments for row in one.rows.to_pylist()] == [3]


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


BERLIN = ZoneInfo("Europe/Berlin")
KEPT: list[tuple[str, Any, str | None]] = [
    ("numeric(12,2)", Decimal("1"), "Decimal('1.00')"),
    ("numeric(12,2)", Decimal("-0"), "Decimal('0.00')"),
    ("numeric(12,2)", Decimal("-0.00"), "Decimal('0.00')"),
    ("numeric(5,2)", Decimal("-999.99"), "Decimal('-999.99')"),
    ("numeric(5,2)", Decimal("1000.00"), None),
    ("numeric(2,2)", Decimal("0.99"), "Decimal('0.99')"),
    ("numeric(2,2)", Decimal("-1.00"), None),
    ("numeric(5,2)", Decimal("sNaN"), None),
    ("numeric(5,2)", Decimal("-Infinity"), None),
    ("numeric(5,2)", Decimal("1.234"), None),
    ("numeric(5,2)", Decimal("1000"), None),
    ("numeric(5,2)", Decimal("NaN"), None),
    ("numeric(38,0)", Decimal(10**38 - 1), f"Decimal('{10**38 - 1}')"),
    ("int2", 32768, None),
    ("int8", -(2**63), str(-(2**63))),
    ("float4", 0.1, None),
    ("float4", 1e300, None),
    ("float4", 0.5, "0.5"),
    ("float8", float("nan"), "nan"),
    ("varchar(3)", "abcd", None),
    ("varchar(3)", "äöü", "'äöü'"),
    ("text", "\ud800", None),
    ("uuid", "ABC", None),
    ("jsonb", "{", None),
    ("jsonb", "{}", "'{}'"),
    ("timestamptz", dt.datetime(2024, 6, 1, 12), None),
    ("timestamptz", dt.datetime.max.replace(tzinfo=ZoneInfo("America/New_York")), None),
    ("timestamptz", dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=5))), None),
    (
        "timestamptz",
        dt.datetime(2024, 6, 1, 12, tzinfo=BERLIN),
        "datetime.datetime(2024, 6, 1, 10, 0, tzinfo=zoneinfo.ZoneInfo(key='UTC'))",
    ),
    ("timestamp", dt.datetime(2024, 6, 1, 12, tzinfo=BERLIN), None),
    ("timestamp", dt.datetime(2024, 6, 1, 12, fold=1), "datetime.datetime(2024, 6, 1, 12, 0)"),
    ("time", dt.time(1, 2, 3, fold=1), "datetime.time(1, 2, 3)"),
    ("date", dt.date(9999, 12, 31), "datetime.date(9999, 12, 31)"),
    ("bytea", b"\x00", "b'\\x00'"),
    ("bool", True, "True"),
    ("numeric(5,1)[]", [Decimal(1), None], "[Decimal('1.0'), None]"),
]


@pytest.mark.parametrize("type_, value, kept", KEPT, ids=[f"{type_} {value!r}" for type_, value, _ in KEPT])
def test_value_is_at_once_what_a_restart_gives_back(type_: str, value: Any, kept: str | None) -> None:
    """A function must not be able to tell whether there was a restart; what could not be stored is refused."""
    seen: list[str] = []

    def keep(row: dict[str, Any], state: Any) -> None:
        if row["n"] == 0:
            state.x.value = value
        seen.append(repr(state.x.value))

    transformation = process(keep, {"x": ValueState(type_)}, None)
    running = operator(transformation)
    if kept is None:
        with pytest.raises(RecordError, match='state "x": '):
            list(running.process(batch([("a", 0)])))
        return
    list(running.process(batch([("a", 0), ("a", 1)])))
    restored = operator(transformation)
    for fragment in running.cut().fragments:
        restored.restore([Fragment(fragment.key_group, fragment.sequence, decode_rows(encode_rows(fragment.rows)))])
    list(restored.process(batch([("a", 2)])))
    assert seen == [kept] * 3


def test_list_that_was_set_or_yielded_may_be_changed_afterwards() -> None:
    def keep(row: dict[str, Any], state: Any) -> Iterator[dict[str, Any]]:
        elements = state.x.value or []
        elements.append(row["n"])
        state.x.value = elements
        yield {"l": elements}
        elements.append(99)
        state.x.value.append(98)

    running = operator(process(keep, {"x": ValueState("int4[]")}, {"l": "int4[]"}))
    found = [row["l"] for one in running.process(batch([("a", 1), ("a", 2), ("a", 3)])) for row in one.to_pylist()]
    assert found == [[1], [1, 2], [1, 2, 3]]


def test_map_keeps_the_order_in_which_its_keys_came() -> None:
    seen: list[list[int]] = []

    def keep(row: dict[str, Any], state: Any) -> None:
        state.x[row["n"]] = 1
        if len(state.x) > 3:
            del state.x[next(iter(state.x))]
        seen.append(list(state.x))

    transformation = process(keep, {"x": MapState("int4", "int4")}, None)
    running = operator(transformation)
    for number in (5, 3, 9, 1):
        list(running.process(batch([("a", number)])))
        restored = operator(transformation)
        for fragment in running.cut().fragments:
            restored.restore([fragment])
        running = restored
    list(running.process(batch([("a", 2)])))
    assert seen == [[5], [5, 3], [5, 3, 9], [3, 9, 1], [9, 1, 2]]


def test_handles_behave_like_what_they_stand_for() -> None:
    def use(row: dict[str, Any], state: Any) -> None:
        state.l.append(1)
        assert state.l == [1]
        assert state.l != [2]
        state.m["a"], state.m["b"] = 1, 2
        assert state.m == {"a": 1, "b": 2}
        assert state.m.popitem() == ("b", 2)
        assert state.m.pop("a") == 1
        with pytest.raises(KeyError):
            state.m.popitem()

    only(use, {"l": ListState("int4"), "m": MapState("text", "int4")}, [("a", 1)])


def test_state_cannot_be_replaced_by_a_value() -> None:
    def keep(row: dict[str, Any], state: Any) -> None:
        state.x = row["n"]

    with pytest.raises(RecordError, match=r'state "x" cannot be replaced: set state.x.value'):
        only(keep, {"x": ValueState("int4")}, [("a", 1)])


def test_state_that_is_not_declared_is_refused_by_name() -> None:
    with pytest.raises(RecordError, match=r'state "y" is not declared; declared are: x'):
        only(lambda row, state: state.y.value, {"x": ValueState("int4")}, [("a", 1)])


def test_state_of_another_type_is_refused_by_name() -> None:
    def keep(row: dict[str, Any], state: Any) -> None:
        state.x.value = "00000000-0000-0000-0000-000000000000"

    former = operator(process(keep, {"x": ValueState("text")}, None))
    list(former.process(batch([("a", 1)])))
    after = operator(process(keep, {"x": ValueState("uuid")}, None))
    with pytest.raises(
        StateError, match=r"has columns k \(string\), x \(text\), and .* keeps k \(string\), x \(uuid\)"
    ):
        after.restore([former.cut().fragments[0]])


@pytest.mark.parametrize("key", [None, float("nan")])
def test_what_equals_nothing_is_no_key_of_a_map(key: float | None) -> None:
    def keep(row: dict[str, Any], state: Any) -> None:
        state.x[key] = 1

    with pytest.raises(RecordError, match=f'state "x": {key} is no key'):
        only(keep, {"x": MapState("float8", "int4")}, [("a", 1)])


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
        (process(states={"class": ValueState("int4")}), "state 'class' is no name of an attribute"),
        (process(states=None), "it declares no state"),
        (process(states=["x"]), "it declares no state"),
        (process(states={"x": "int8"}), "state \"x\" is 'int8'"),
        (process(states={"x": ValueState}), 'state "x" is <class'),
        (process(states={"x": ValueState(5)}), 'state "x" is ValueState(type=5)'),  # type: ignore[arg-type]
        (process(states={"x": MapState("int8", None)}), 'state "x" is MapState('),  # type: ignore[arg-type]
        (process(states={"x": ValueState("money")}), 'state "x": column type "money" is not supported'),
        (process(states={"x": ListState("int4[]")}), 'state "x" would hold arrays of arrays'),
    ],
)
def test_mistakes_in_the_declaration_are_told(transformation: Process, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        transformation.output_schema([SCHEMA])
    assert problem in str(caught.value)
