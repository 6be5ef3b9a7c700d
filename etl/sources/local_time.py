"""Local times of a named zone as instants, exact: ambiguous and skipped times are refused, never guessed.

The rules come from the standard library's ``zoneinfo``. Whole columns are converted day by day: on nearly every day
the offset from UTC is one number; only the values of the few days on which it changes are looked at one by one.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pyarrow as pa
import pyarrow.compute as pc

_HOURS_AROUND_DAY = range(-1, 26)
_DAYS_CACHED = 4096


class UnknownZoneError(ValueError):
    """The zone is not in the time zone database of this machine."""


class LocalTimeError(ValueError):
    """A local time that is no instant, or more than one."""


class LocalTimes:
    """Converts local times of one zone.

    Raises:
        UnknownZoneError: The name is not in the time zone database, or there is no such database.
    """

    def __init__(self, name: str) -> None:
        try:
            self._zone = ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise UnknownZoneError(f'time zone "{name}" is not in the time zone database of this machine') from error
        self.name = name
        self._offset_of_day = lru_cache(_DAYS_CACHED)(self._find_offset_of_day)

    def instant(self, local: datetime) -> datetime:
        """The instant of a naive local time, in UTC.

        Raises:
            LocalTimeError: The clocks were put forward over it, or showed it twice.
        """
        first, second = self._offsets(local)
        if first > second:
            raise LocalTimeError(f"it is ambiguous in {self.name}, the clocks showed it twice")
        if first < second:
            raise LocalTimeError(f"it does not exist in {self.name}, the clocks were put forward over it")
        try:
            return (local - first).replace(tzinfo=UTC)
        except OverflowError as error:
            raise LocalTimeError("it lies outside the years 1 to 9999 in UTC") from error

    def instants(self, local: Any) -> Any:
        """Convert an Arrow array of naive ``timestamp[us]`` to ``timestamp[us, UTC]``.

        Raises:
            LocalTimeError: Some value has no single instant; :meth:`instant` tells which.
        """
        days = pc.floor_temporal(local, unit="day").cast(pa.date32()).dictionary_encode()
        offsets = pa.array([self._offset_of_day(day) for day in days.dictionary.to_pylist()], pa.duration("us"))
        offset = offsets.take(days.indices)
        one_by_one = pc.and_(local.is_valid(), offset.is_null())
        if not pc.any(one_by_one).as_py():
            return pc.subtract(local, offset).cast(pa.timestamp("us", "UTC"))
        singles = iter([self.instant(value) for value in local.filter(one_by_one).to_pylist()])
        known = pc.subtract(local, offset).cast(pa.timestamp("us", "UTC")).to_pylist()
        return pa.array(
            [next(singles) if single else value for single, value in zip(one_by_one.to_pylist(), known, strict=True)],
            pa.timestamp("us", "UTC"),
        )

    def _offsets(self, local: datetime) -> tuple[timedelta, timedelta]:
        first = local.replace(tzinfo=self._zone, fold=0).utcoffset()
        second = local.replace(tzinfo=self._zone, fold=1).utcoffset()
        assert first is not None
        assert second is not None
        return first, second

    def _find_offset_of_day(self, day: date | None) -> timedelta | None:
        """The offset that holds through the whole day, None when there is none (or the day is NULL)."""
        if day is None or not date.min < day < date.max - timedelta(days=1):
            return None
        midnight = datetime(day.year, day.month, day.day)
        offsets = {offset for hour in _HOURS_AROUND_DAY for offset in self._offsets(midnight + timedelta(hours=hour))}
        return offsets.pop() if len(offsets) == 1 else None
