"""What is put into a column of state comes out again, bit for bit."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.operators.keyed.columns import DecimalColumn, state_column

DECIMALS = st.decimals(-(10**35), 10**35, places=2, allow_nan=False)
TYPES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int2": (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    "int8": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float4": (pa.float32(), st.floats(width=32)),
    "float8": (pa.float64(), st.floats()),
    "bool": (pa.bool_(), st.booleans()),
    "numeric": (pa.decimal128(38, 2), DECIMALS),
    "text": (pa.string(), st.text(max_size=5)),
    "bytea": (pa.binary(), st.binary(max_size=5)),
    "date": (pa.date32(), st.dates()),
    "time": (pa.time64("us"), st.times()),
    "timestamp": (pa.timestamp("us"), st.datetimes()),
    "timestamptz": (pa.timestamp("us", tz="UTC"), st.datetimes(timezones=st.just(dt.UTC))),
    "array": (pa.list_(pa.int64()), st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=3)),
}


@pytest.mark.parametrize("name", TYPES)
@settings(deadline=None)
@given(data=st.data())
def test_values_come_out_as_they_went_in(name: str, data: st.DataObject) -> None:
    arrow, values = TYPES[name]
    column = state_column(arrow)
    expected: dict[int, Any] = {}
    for _ in range(data.draw(st.integers(0, 4))):
        ids = data.draw(st.lists(st.integers(0, 3000), unique=True, max_size=12))
        given_values = data.draw(st.lists(st.one_of(st.none(), values), min_size=len(ids), max_size=len(ids)))
        padded = pa.array([None, *given_values], arrow).slice(1)
        column.reserve(max(ids, default=0) + 1)
        numbers = np.array(ids, dtype=np.int64)
        column.put(numbers, padded)
        assert column.equal(numbers, padded).all()
        expected |= dict(zip(ids, padded.to_pylist(), strict=True))
    wanted = np.array(sorted(expected), dtype=np.int64)
    taken = column.take(wanted)
    taken.validate(full=True)
    assert taken.equals(pa.array([expected[one] for one in sorted(expected)], arrow)) or "float" in name
    assert repr(taken.to_pylist()) == repr([expected[one] for one in sorted(expected)])


def test_what_lies_beneath_a_null_is_always_the_same() -> None:
    column = state_column(pa.int64())
    column.reserve(2)
    column.put(np.array([0, 1]), pa.array([5, 6]))
    column.put(np.array([0]), pa.array([9, None]).slice(1))
    taken = column.take(np.array([0, 1]))
    assert np.frombuffer(taken.buffers()[1], dtype=np.int64).tolist() == [0, 6]


@pytest.mark.parametrize("name", [name for name in TYPES if name not in {"array", "bool"}])
@settings(deadline=None)
@given(data=st.data())
def test_order_is_that_of_the_values(name: str, data: st.DataObject) -> None:
    arrow, values = TYPES[name]
    pair = data.draw(st.tuples(values, values).filter(lambda both: both[0] == both[0] and both[1] == both[1]))
    here, there = pa.array(pair[:1], arrow), pa.array(pair[1:], arrow)
    column = state_column(arrow)
    column.reserve(1)
    column.put(np.array([0]), here)
    left, right = here.to_pylist()[0], there.to_pylist()[0]
    assert column.compare(np.array([0]), there).tolist() == [(left > right) - (left < right)]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-(10**37), 10**37), min_size=3, max_size=3), max_size=10))
def test_sums_of_128_bits_are_exact(rows: list[list[int]]) -> None:
    column = DecimalColumn(pa.decimal128(38, 0))
    column.reserve(3)
    ids = np.array([0, 1, 2])
    for row in rows:
        assert not column.add(ids, pa.array([Decimal(one) for one in row], pa.decimal128(38, 0))).any()
    sums = [sum(row[place] for row in rows) for place in range(3)]
    assert [None if not rows else Decimal(one) for one in sums] == (
        column.take(ids).to_pylist()
        if max(map(abs, sums)) < 10**38
        else [None if not rows else Decimal(one) for one in sums]
    )


def test_sum_that_leaves_128_bits_is_told() -> None:
    column = DecimalColumn(pa.decimal128(38, 0))
    column.reserve(2)
    big = pa.array([Decimal(10**38 - 1), Decimal(1)], pa.decimal128(38, 0))
    assert column.add(np.array([0, 1]), big).tolist() == [False, False]
    assert column.add(np.array([0, 1]), big).tolist() == [True, False]
