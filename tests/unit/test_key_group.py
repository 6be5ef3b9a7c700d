"""Hashes of keys are stored numbers: they are the same for ever."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.key_group import (
    KEY_GROUPS,
    groups_of_hashes,
    groups_of_subtask,
    hash_keys,
    hash_within_groups,
    subtasks_of_hashes,
)
from etl.transformation import PARALLELISM_MAX


def hashes(*columns: tuple[Sequence[Any], pa.DataType]) -> list[int]:
    return [int(one) for one in hash_keys([pa.array(values, arrow) for values, arrow in columns])]


# Written down when the hash was made. A test that fails here says: every stored state would be looked for elsewhere.
GOLDEN: list[tuple[pa.DataType, list[Any], list[int]]] = [
    (
        pa.int64(),
        [0, 1, -1, 2**63 - 1, None],
        [5878998237028904013, 11077119077225503817, 10244581803076742552, 1686541391689873589, 15339618874240046125],
    ),
    (
        pa.string(),
        ["", "a", "customer-4711", "ü" * 20, "x" * 300, "a\0", None],
        [
            5872587937445714797,
            6236618800580255337,
            6833403499327162749,
            18335949132588103228,
            8929855039568728515,
            13137676625350360861,
            15339618874240046125,
        ],
    ),
    (
        pa.binary(),
        [b"", b"\x00", b"\xff" * 8, b"123456789"],
        [5872587937445714797, 14667169293828630055, 6199823948091229183, 11907373583386886976],
    ),
    (
        pa.decimal128(12, 2),
        [Decimal("0.00"), Decimal("-1.50"), None],
        [5878998237028904013, 4990967056061147520, 15339618874240046125],
    ),
    (pa.bool_(), [True, False, None], [11077119077225503817, 5878998237028904013, 15339618874240046125]),
    (
        pa.float64(),
        [0.0, 1.5, float("nan"), float("-inf")],
        [5878998237028904013, 1872530526987959449, 6942562634585466928, 4090639019825182833],
    ),
    (pa.float32(), [1.5, None], [1872530526987959449, 15339618874240046125]),
    (pa.date32(), [dt.date(2024, 2, 29), dt.date(1, 1, 1)], [84642894561450391, 12549400564380750101]),
    (pa.time64("us"), [dt.time(23, 59, 59, 999999)], [817317196488116123]),
    (pa.timestamp("us"), [dt.datetime(2024, 2, 29, 12)], [16279741695525638108]),
    (
        pa.timestamp("us", tz="UTC"),
        [dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC), None],
        [16279741695525638108, 15339618874240046125],
    ),
]


@pytest.mark.parametrize("arrow, values, expected", GOLDEN, ids=[str(arrow) for arrow, _, _ in GOLDEN])
def test_hashes_never_change(arrow: pa.DataType, values: list[Any], expected: list[int]) -> None:
    assert hashes((values, arrow)) == expected


SEVERAL = [15491675076713505941, 17277474238920073539]


def test_hash_of_several_columns_never_changes() -> None:
    assert hashes(([1, None], pa.int64()), (["a", "b"], pa.string())) == SEVERAL


@pytest.mark.parametrize("arrow", [pa.int16(), pa.int32(), pa.int64()])
def test_a_number_has_the_same_hash_in_every_width(arrow: pa.DataType) -> None:
    assert hashes(([-5, 0, 7, None], arrow)) == hashes(([-5, 0, 7, None], pa.int64()))


def test_floats_that_are_equal_have_the_same_hash() -> None:
    odd_nan = np.array([0x7FF8_0000_0000_0001], dtype=np.uint64).view(np.float64)[0]
    zero, minus_zero, nan, other_nan = hashes(([0.0, -0.0, float("nan"), odd_nan], pa.float64()))
    assert (zero, nan) == (minus_zero, other_nan)
    assert zero != nan


def test_null_is_no_value() -> None:
    for arrow, value in ((pa.int64(), 0), (pa.string(), ""), (pa.bool_(), False), (pa.float64(), 0.0)):
        null, zero = hashes(([None, value], arrow))
        assert null != zero


def test_order_and_borders_of_columns_matter() -> None:
    text = pa.string()
    assert hashes((["a"], text), (["b"], text)) != hashes((["b"], text), (["a"], text))
    assert hashes((["ab"], text), (["c"], text)) != hashes((["a"], text), (["bc"], text))


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.text(max_size=40), st.text(min_size=250, max_size=300)), max_size=30), st.data()
)
def test_hash_of_a_row_does_not_depend_on_its_neighbours(values: list[str | None], data: st.DataObject) -> None:
    column = pa.array(values, pa.string())
    first = data.draw(st.integers(0, len(values)))
    last = data.draw(st.integers(first, len(values)))

    sliced = hash_keys([column.slice(first, last - first)])

    assert sliced.tolist() == hash_keys([column]).tolist()[first:last]
    assert sliced.tolist() == [int(hash_keys([pa.array([one], pa.string())])[0]) for one in values[first:last]]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=20), unique=True, max_size=200))
def test_different_keys_have_different_hashes(values: list[bytes]) -> None:
    # Not promised, but a collision among so few would be no chance.
    assert len(set(hashes((values, pa.binary())))) == len(values)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(range(100_000), pa.int64()),
        pa.array([f"customer-{number}" for number in range(100_000)]),
        pa.array([Decimal(number) for number in range(100_000)], pa.decimal128(12, 2)),
    ],
    ids=["int8", "text", "numeric"],
)
def test_keys_spread_over_all_groups(column: pa.Array) -> None:
    sizes = np.bincount(groups_of_hashes(hash_keys([column])), minlength=KEY_GROUPS)
    expected = len(column) / KEY_GROUPS
    assert sizes.min() > 0.8 * expected
    assert sizes.max() < 1.2 * expected


@pytest.mark.parametrize("parallelism", range(1, KEY_GROUPS + 1))
def test_every_group_has_exactly_one_owner(parallelism: int) -> None:
    owned = [group for subtask in range(parallelism) for group in groups_of_subtask(subtask, parallelism)]
    assert owned == list(range(KEY_GROUPS))
    every_group = np.arange(KEY_GROUPS, dtype=np.uint64) << np.uint64(57)
    owners = subtasks_of_hashes(every_group, parallelism).tolist()
    assert all(group in groups_of_subtask(owner, parallelism) for group, owner in enumerate(owners))


def test_parallelism_ends_with_the_number_of_groups() -> None:
    assert PARALLELISM_MAX == KEY_GROUPS


def test_parts_of_a_key_lie_in_its_group() -> None:
    keys = pa.array([f"k{number % 50}" for number in range(500)])
    windows = pa.array(range(500), pa.int64())
    within = hash_within_groups([keys, windows], 1)
    assert (groups_of_hashes(within) == groups_of_hashes(hash_keys([keys]))).all()
    assert len(set(within.tolist())) == 500
    assert (hash_within_groups([keys, windows], 2) == hash_keys([keys, windows])).all()
