"""Moments as integers."""

from __future__ import annotations

from datetime import date

import pyarrow as pa
import pytest

from etl.event_time import FOREVER, microseconds_of

DAY = 86_400_000_000


@pytest.mark.parametrize(
    "days, moment",
    [(1, DAY), (-1, -DAY), (2**31 - 1, FOREVER // DAY * DAY), (-(2**31), -(FOREVER // DAY * DAY)), (None, None)],
)
def test_dates_are_midnights_and_infinite_ones_do_not_come_round(days: int | None, moment: int | None) -> None:
    dates = pa.array([days], pa.int32()).cast(pa.date32())
    assert microseconds_of(dates).to_pylist() == [moment]


def test_first_and_last_date_of_the_calendar_are_held() -> None:
    found = microseconds_of(pa.array([date.min, date.max])).to_pylist()
    assert found == [(date.min - date(1970, 1, 1)).days * DAY, (date.max - date(1970, 1, 1)).days * DAY]
