"""Joins with versions, against looking for the version of each row among all of them."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.event_time import FOREVER
from etl.joins import AsOfJoin, JoinKind
from etl.operator import LATE, LATE_RIGHT
from etl.operators.keyed import join_rows
from etl.schema import Schema
from etl.transformation import Location
from tests.support.joins import JoinStage, Row, moment

LEFT = Schema.declare({"at": "timestamptz", "currency": "text", "n": "int4"})
RIGHT = Schema.declare({"currency": "text", "valid_from": "timestamptz", "rate": "numeric(8,4)", "n": "int4"})


def stage(how: JoinKind = JoinKind.LEFT, parallelism: int = 1) -> JoinStage:
    keys = ("currency",)
    join = AsOfJoin(Location("jobs/rated.py", 7), "rated", keys, keys, ("at", "valid_from"), how=how)
    return JoinStage(join, (LEFT, RIGHT), ("at",), parallelism)


def order(currency: str | None, at: int, number: int = 0) -> Row:
    return (moment(at), currency, number)


def version(currency: str | None, at: int, number: int = 0) -> Row:
    return (currency, moment(at), Decimal(number).scaleb(-4), number)


def rated(one: Row, other: Row | None) -> Row:
    return (*one, *(other[1:] if other is not None else (None, None, None)))


def expected(orders: list[Row], versions: list[Row], how: JoinKind) -> Counter[str]:
    found: list[Row] = []
    for one in orders:
        begun = [
            (other[1], number)
            for number, other in enumerate(versions)
            if one[1] is not None and other[0] == one[1] and other[1] <= one[0]
        ]
        if begun:
            found.append(rated(one, versions[max(begun)[1]]))
        elif how is JoinKind.LEFT:
            found.append(rated(one, None))
    return counted(found)


def counted(rows: list[Row]) -> Counter[str]:
    return Counter(map(repr, rows))


DISORDER = 4


@pytest.mark.parametrize("how", AsOfJoin.kinds)
@settings(deadline=None, max_examples=60)
@given(
    events=st.lists(
        st.tuples(
            st.integers(0, 1), st.sampled_from(["EUR", "USD", None]), st.integers(0, 30), st.integers(0, DISORDER)
        ),
        max_size=60,
    ),
    ahead=st.integers(-20, 20),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=10),
    restarts=st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=1, max_size=10),
)
def test_each_row_gets_the_version_of_its_time(
    how: JoinKind, events: list[tuple[int, str | None, int, int]], ahead: int, sizes: list[int], restarts: list[int]
) -> None:
    """Rows and versions come out of order, as far as promised, and one side ahead of the other."""
    ordered = sorted(events, key=lambda event: event[2] + event[3] + ahead * event[0])
    made = stage(how, parallelism=2)
    orders: list[Row] = []
    versions: list[Row] = []
    latest = [-1000, -1000]
    begin = step = 0
    while begin < len(ordered):
        some = ordered[begin : begin + sizes[step % len(sizes)]]
        begin += len(some)
        for side, make, so_far in ((0, order, orders), (1, version, versions)):
            rows = [make(key, at, begin * 10 + number) for number, (of, key, at, _) in enumerate(some) if of == side]
            if rows:
                so_far.extend(rows)
                made.give(side, *rows)
            latest[side] = max([latest[side], *(at for of, _, at, _ in some if of == side)])
        made.advance(min(latest) - DISORDER)
        parallelism = restarts[step % len(restarts)]
        if parallelism:
            made.restart(parallelism)
        step += 1
    assert counted(made.rows) <= expected(orders, versions, how)
    made.advance(FOREVER)
    assert counted(made.rows) == expected(orders, versions, how)
    assert made.late == {}
    assert made.waiting == len({other[0] for other in versions} - {None})


def test_row_waits_until_all_versions_before_it_have_come() -> None:
    made = stage()
    one = order("EUR", 10)
    made.give(1, version("EUR", 5, 1))
    made.give(0, one)
    made.advance(10)
    assert made.rows == []
    made.give(1, version("EUR", 10, 2))
    made.advance(11)
    assert made.rows == [rated(one, version("EUR", 10, 2))]


def test_of_versions_that_begin_together_the_one_that_came_last_is_valid() -> None:
    for restarted in (False, True):
        made = stage()
        made.give(1, version("EUR", 5, 1), version("EUR", 5, 2))
        made.give(1, version("EUR", 5, 3), version("EUR", 4, 4))
        if restarted:
            made.restart(3)
        made.give(0, order("EUR", 7))
        made.advance(8)
        assert made.rows == [rated(order("EUR", 7), version("EUR", 5, 3))]


def test_only_versions_that_a_row_can_still_need_are_kept() -> None:
    made = stage()
    made.give(1, *(version(currency, at, at) for at in (1, 3, 5, 9) for currency in ("EUR", "USD")))
    made.advance(4)
    assert made.waiting == 6
    made.restart(2)
    assert made.waiting == 6
    made.advance(5)
    assert made.waiting == 4
    made.give(0, order("EUR", 8), order("USD", 5))
    made.advance(FOREVER)
    assert made.rows == [rated(order("USD", 5), version("USD", 5, 5)), rated(order("EUR", 8), version("EUR", 5, 5))]
    assert made.waiting == 2


def test_version_that_comes_late_is_told_and_holds_for_what_follows() -> None:
    made = stage()
    made.give(0, order("EUR", 10))
    made.advance(20)
    late = [version("EUR", 8, 2), version("USD", 9, 3), version("EUR", 5, 1)]
    made.give(1, late[0])
    made.give(1, late[1], late[2])
    made.give(0, order("EUR", 19), order("EUR", 20), order("USD", 25))
    made.advance(30)
    assert made.late == {LATE_RIGHT: late, LATE: [order("EUR", 19)]}
    assert made.rows == [
        rated(order("EUR", 10), None),
        rated(order("EUR", 20), late[0]),
        rated(order("USD", 25), late[1]),
    ]
    made.restart(1)
    assert (made.late_rows, made.waiting) == (4, 2)


def test_null_in_the_key_has_no_version_and_is_none() -> None:
    for how, rows in ((JoinKind.LEFT, [rated(order(None, 5), None)]), (JoinKind.INNER, [])):
        made = stage(how)
        made.give(1, version(None, 1))
        made.give(0, order(None, 5))
        assert (made.rows, made.waiting) == (rows, 0)


def test_watermark_goes_on_as_it_came() -> None:
    made = stage()
    made.advance(7)
    assert made.watermark == 1_704_067_200_000_007


def test_rows_come_out_in_bounded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_rows, "ROWS_MAX", 2)
    made = stage()
    made.give(1, version("EUR", 3, 1))
    orders = [order("EUR", at) for at in range(7)]
    made.give(0, *orders)
    made.advance(FOREVER)
    assert made.rows == [rated(one, version("EUR", 3, 1) if at >= 3 else None) for at, one in enumerate(orders)]
