"""Interval joins against all pairs of rows, compared one by one."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import RecordError, StateError
from etl.event_time import FOREVER
from etl.joins import IntervalJoin, JoinKind
from etl.operator import LATE, LATE_RIGHT
from etl.operators.keyed import join_rows, key_times
from etl.schema import Schema
from etl.transformation import Location
from tests.support.joins import JoinStage, Row, moment

LEFT = Schema.declare({"at": "timestamptz", "k": "text", "part": "float8", "n": "int4", "amount": "numeric(12,2)"})
RIGHT = Schema.declare({"n": "int4", "part_id": "float8", "key": "text", "paid_at": "timestamptz", "tags": "text[]"})
OUTPUT = Schema.declare(
    {
        "at": "timestamptz",
        "k": "text",
        "part": "float8",
        "n": "int4",
        "amount": "numeric(12,2)",
        "n_right": "int4",
        "paid_at": "timestamptz",
        "tags": "text[]",
    }
)


def join(how: JoinKind, lower: int = 0, upper: int = 5) -> IntervalJoin:
    return IntervalJoin(
        Location("jobs/paid.py", 7),
        "paid",
        ("k", "part"),
        ("key", "part_id"),
        ("at", "paid_at"),
        dt.timedelta(microseconds=lower),
        dt.timedelta(microseconds=upper),
        how=how,
    )


def stage(how: JoinKind, lower: int = 0, upper: int = 5, parallelism: int = 1) -> JoinStage:
    return JoinStage(join(how, lower, upper), (LEFT, RIGHT), ("at", "paid_at"), parallelism)


def left(key: str | None, at: int, number: int = 0) -> Row:
    return (moment(at), key, 0.5, number, None if number % 3 == 0 else Decimal(number).scaleb(-2))


def right(key: str | None, at: int, number: int = 0) -> Row:
    return (number, 0.5, key, moment(at), None if number % 2 else [f"t{number}", None])


def pair(one: Row, other: Row) -> Row:
    return (*one, other[0], other[3], other[4])


def alone_left(one: Row) -> Row:
    return (*one, None, None, None)


def alone_right(other: Row) -> Row:
    return (None, other[2], other[1], None, None, other[0], other[3], other[4])


def expected(lefts: list[Row], rights: list[Row], how: JoinKind, lower: int, upper: int) -> Counter[str]:
    """By comparing all with all."""
    found: list[Row] = []
    joined_rights = set()
    for one in lefts:
        partners = [
            number
            for number, other in enumerate(rights)
            if one[1] is not None
            and (one[1], one[2]) == (other[2], other[1])
            and dt.timedelta(microseconds=lower) <= other[3] - one[0] <= dt.timedelta(microseconds=upper)
        ]
        joined_rights.update(partners)
        found += [pair(one, rights[number]) for number in partners]
        if not partners and how.keeps[0]:
            found.append(alone_left(one))
    if how.keeps[1]:
        found += [alone_right(other) for number, other in enumerate(rights) if number not in joined_rights]
    return counted(found)


def counted(rows: list[Row]) -> Counter[str]:
    return Counter(map(repr, rows))


DISORDER = 4
EVENTS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["a", "b", "c", None]), st.integers(0, 40), st.integers(0, DISORDER)),
    max_size=60,
)


@pytest.mark.parametrize("how", JoinKind)
@settings(deadline=None, max_examples=60)
@given(
    events=EVENTS,
    bounds=st.tuples(st.integers(-8, 8), st.integers(-8, 8)).map(sorted),
    ahead=st.integers(0, 20),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=10),
    restarts=st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=1, max_size=10),
)
def test_join_is_that_of_all_pairs(
    how: JoinKind,
    events: list[tuple[int, str | None, int, int]],
    bounds: list[int],
    ahead: int,
    sizes: list[int],
    restarts: list[int],
) -> None:
    """Rows come out of order, as far as promised, and one side ahead of the other, in batches of any size."""
    lower, upper = bounds
    ordered = sorted(events, key=lambda event: event[2] + event[3] + ahead * event[0])
    made = stage(how, lower, upper, parallelism=2)
    given_rows: tuple[list[Row], list[Row]] = ([], [])
    latest = [-1000, -1000]
    begin = step = 0
    while begin < len(ordered):
        some = ordered[begin : begin + sizes[step % len(sizes)]]
        begin += len(some)
        for side, make in ((0, left), (1, right)):
            rows = [make(key, at, begin * 10 + number) for number, (of, key, at, _) in enumerate(some) if of == side]
            if rows:
                given_rows[side].extend(rows)
                made.give(side, *rows)
            latest[side] = max([latest[side], *(at for of, _, at, _ in some if of == side)])
        made.advance(min(latest) - DISORDER)
        parallelism = restarts[step % len(restarts)]
        if parallelism:
            made.restart(parallelism)
        step += 1
    before = counted(made.rows)
    everything = expected(*given_rows, how, lower, upper)
    assert before <= everything
    made.advance(FOREVER)
    assert counted(made.rows) == everything
    assert made.late == {}
    assert made.waiting == 0
    assert made.watermark == FOREVER


def test_columns_are_those_of_the_left_then_those_of_the_right_but_its_key() -> None:
    assert join(JoinKind.INNER).output_schema([LEFT, RIGHT]) == OUTPUT


def test_both_bounds_are_included() -> None:
    made = stage(JoinKind.INNER, lower=-2, upper=5)
    one = left("a", 10)
    others = [right("a", at, at) for at in (7, 8, 15, 16)]
    made.give(0, one)
    made.give(1, *others)
    assert made.rows == [pair(one, others[1]), pair(one, others[2])]


def test_row_without_partner_comes_out_when_none_can_come_any_more() -> None:
    made = stage(JoinKind.FULL, lower=0, upper=5)
    one, other = left("a", 10), right("b", 10)
    made.give(0, one)
    made.give(1, other)
    made.advance(10)
    assert made.rows == []
    made.advance(11)
    assert made.rows == [alone_right(other)]
    made.advance(15)
    assert made.waiting == 1
    made.advance(16)
    assert made.rows == [alone_right(other), alone_left(one)]
    assert made.waiting == 0


def test_row_that_had_a_partner_never_comes_out_alone_also_after_a_restart() -> None:
    made = stage(JoinKind.FULL)
    one, other = left("a", 10), right("a", 12)
    made.give(0, one)
    made.restart(2)
    made.give(1, other)
    made.restart(3)
    made.advance(FOREVER)
    assert made.rows == [pair(one, other)]


def test_null_in_the_key_joins_with_nothing_and_comes_out_at_once() -> None:
    made = stage(JoinKind.FULL)
    one, other = left(None, 10), right(None, 10)
    made.give(0, one)
    made.give(1, other)
    assert made.rows == [alone_left(one), alone_right(other)]
    assert made.waiting == 0


def test_zeros_and_nans_are_equal_keys_and_stay_what_they_are() -> None:
    made = stage(JoinKind.FULL)
    made.give(0, (moment(0), "a", -0.0, 1, None), (moment(0), "a", float("nan"), 2, None))
    made.give(1, (3, 0.0, "a", moment(0), None), (4, float("nan"), "a", moment(0), None))
    assert [repr(row[2:4]) + str(row[5]) for row in made.rows] == ["(-0.0, 1)3", "(nan, 2)4"]


def test_late_rows_of_either_side_go_aside_and_are_counted() -> None:
    made = stage(JoinKind.FULL)
    made.advance(10)
    lefts, rights = [left("a", 9), left("a", 10)], [right("a", 10), right("a", 9), right("a", 12)]
    made.give(0, *lefts)
    made.give(1, *rights)
    assert made.late == {LATE: [lefts[0]], LATE_RIGHT: [rights[1]]}
    assert made.rows == [pair(lefts[1], rights[0]), pair(lefts[1], rights[2])]
    made.restart(1)
    assert made.late_rows == 2
    made.give(0, left("a", 9))
    made.restart(2)
    assert made.late_rows == 3


def test_watermark_is_held_back_by_the_bound_unless_everything_is_closed() -> None:
    for lower, upper, expected_back in ((0, 5, 5), (-7, 5, 7), (2, 5, 5), (-5, -2, 5), (0, 0, 0)):
        made = stage(JoinKind.INNER, lower, upper)
        made.advance(100)
        assert made.watermark == 1_704_067_200_000_100 - expected_back
        made.advance(FOREVER)
        assert made.watermark == FOREVER


def test_row_whose_partners_lie_in_the_past_does_not_wait_when_they_are_closed() -> None:
    made = stage(JoinKind.LEFT, lower=-8, upper=-5)
    one, other = left("a", 12), right("a", 6)
    made.give(1, other)
    made.advance(12)
    made.give(0, one, left("b", 12))
    assert made.rows == [pair(one, other), alone_left(left("b", 12))]
    assert made.waiting == 1


def test_row_without_a_time_stops_the_run() -> None:
    with pytest.raises(RecordError, match=r'interval join "paid" at jobs/paid.py:7: "paid_at" is NULL in a row'):
        stage(JoinKind.INNER).give(1, (1, 0.5, "a", None, None))


def test_bounds_and_times_beyond_64_bits_are_no_bounds() -> None:
    made = JoinStage(
        IntervalJoin(
            Location("jobs/paid.py", 7), "paid", ("k",), ("key",), ("at", "paid_at"), dt.timedelta.min, dt.timedelta.max
        ),
        (LEFT, RIGHT),
        ("at", "paid_at"),
    )
    one, other = left("a", 0), right("a", 40)
    made.give(0, one)
    made.advance(100)
    made.give(1, right("a", 100))
    assert len(made.rows) == 1
    made.advance(FOREVER)
    assert made.waiting == 0
    assert other not in made.rows


def test_many_partners_come_out_in_bounded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_times, "PAIRS_MAX", 3)
    monkeypatch.setattr(join_rows, "ROWS_MAX", 2)
    made = stage(JoinKind.FULL)
    lefts, rights = [left("a", 1, number) for number in range(4)], [right("a", 2, number) for number in range(5)]
    made.give(0, *lefts)
    made.give(1, *rights)
    assert counted(made.rows) == counted([pair(one, other) for one in lefts for other in rights])
    made.give(0, *(left("b", 1, number) for number in range(5)))
    made.advance(FOREVER)
    assert counted(made.rows[20:]) == counted([alone_left(left("b", 1, number)) for number in range(5)])


def test_keys_that_share_a_hash_do_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_rows, "hash_keys", lambda columns: np.zeros(len(columns[0]), dtype=np.uint64))
    made = stage(JoinKind.INNER)
    one, other = left("a", 1), left("b", 1)
    made.give(0, one, other)
    made.give(1, right("b", 1))
    assert made.rows == [pair(other, right("b", 1))]


def test_state_of_a_join_that_noted_no_partners_is_refused_by_one_that_does() -> None:
    made = stage(JoinKind.INNER)
    made.give(0, left("a", 1))
    fragments = made.operators[0].cut().fragments
    with pytest.raises(StateError, match=r'state of operator "paid" has columns .*give the changed operator a new uid'):
        stage(JoinKind.LEFT).operators[0].restore(fragments)


def test_columns_named_like_those_of_the_state_are_kept_apart() -> None:
    schema = Schema.declare({"sequence": "int4", "joined": "bool", "removed": "text", "at": "timestamp"})
    transformation = IntervalJoin(
        Location("jobs/paid.py", 7),
        "paid",
        ("sequence", "joined"),
        ("sequence", "joined"),
        ("at", "at"),
        dt.timedelta(0),
        dt.timedelta(0),
        how=JoinKind.FULL,
    )
    made = JoinStage(transformation, (schema, schema), ("at", "at_right"))
    at = dt.datetime(2024, 1, 1)
    rows: list[Any] = [(1, True, "x", at), (2, False, "y", at)]
    made.give(0, *rows)
    made.restart(2)
    made.give(1, (2, False, None, at))
    made.advance(FOREVER)
    assert counted(made.rows) == counted([(*rows[1], None, at), (*rows[0], None, None)])
