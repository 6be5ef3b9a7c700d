"""The five fields of a cron schedule, checked; running on schedule is cron's own work."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_ITEM = re.compile(r"(?:\*|(?P<low>\w+)(?:-(?P<high>\w+))?)(?:/(?P<step>[0-9]+))?")


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    low: int
    high: int
    words: tuple[str, ...] = ()

    def number(self, text: str) -> int | None:
        if text.lower() in self.words:
            return self.low + self.words.index(text.lower())
        return int(text) if text.isdecimal() and text.isascii() and self.low <= int(text) <= self.high else None

    def problem(self, text: str) -> str | None:
        wrong = [item for item in text.split(",") if not self._is_valid(item)]
        if not wrong:
            return None
        return f'"{wrong[0]}" is no {self.name}: numbers {self.low}-{self.high}, *, a-b, /step and lists of them'

    def _is_valid(self, item: str) -> bool:
        match = _ITEM.fullmatch(item)
        if match is None or (match["step"] is not None and not 1 <= int(match["step"]) <= self.high):
            return False
        if match["low"] is None:
            return True
        low = self.number(match["low"])
        high = low if match["high"] is None else self.number(match["high"])
        # "5/10" means something in some crons and nothing in others
        is_portable = match["step"] is None or match["high"] is not None
        return low is not None and high is not None and low <= high and is_portable


_FIELDS = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of the month", 1, 31),
    _Field("month", 1, 12, _MONTHS),
    _Field("day of the week", 0, 7, _DAYS),
)


def schedule_problem(text: str) -> str | None:
    """What is wrong with a schedule such as ``*/5 * * * *``, or None."""
    parts = text.split()
    if len(parts) != len(_FIELDS):
        return f'"{text}" has {len(parts)} fields, cron has 5: minute, hour, day of the month, month, day of the week'
    if "\n" in text or "\r" in text:
        return "the schedule has more than one line"
    for field, part in zip(_FIELDS, parts, strict=True):
        problem = field.problem(part)
        if problem is not None:
            return problem
    return None
