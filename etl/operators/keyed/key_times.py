"""Where the rows of a key lie in time: found without looking at those that lie elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etl.operators.keyed.columns import Flags, Ids
from etl.operators.keyed.time_queue import Moments

PAIRS_MAX = 65_536
"""Pairs that are found at once, unless a single row has more."""

NONE = -1

Numbers = npt.NDArray[np.int64]

KeyNumbers = npt.NDArray[np.uint64]
"""What stands for keys: hashes, or numbers of their own."""


class KeyTimes:
    """Ids by the number of a key and a moment.

    Sorted runs, of which neighbours of like length are merged: adding costs what is added, and asking what is asked
    for and found, but for a logarithm, however much else is there. Removed ids stay in their runs until these are
    merged, and are not told: each entry has a number that is given once, so an id that was given to another row since
    is not taken for the former one.
    """

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._numbers: Numbers = np.zeros(0, dtype=np.int64)
        self._next = 0

    def add(self, keys: KeyNumbers, moments: Moments, ids: Ids) -> None:
        """Note ids; of equal moments the one that was added last is the later one."""
        if not len(ids):
            return
        self._reserve(int(ids.max()) + 1)
        numbers = np.arange(self._next, self._next + len(ids))
        self._next += len(ids)
        self._numbers[ids] = numbers
        self._runs.append(_Run(keys, moments, ids, numbers).chosen(np.lexsort((moments, keys))))
        while len(self._runs) > 1 and len(self._runs[-2].ids) <= 2 * len(self._runs[-1].ids):
            self._runs[-2:] = [self._merged(self._runs[-2:])]

    def remove(self, ids: Ids) -> None:
        """These ids are told no more."""
        self._numbers[ids] = NONE

    def within(self, keys: KeyNumbers, first: Moments, last: Moments) -> Iterator[tuple[Numbers, Ids]]:
        """For each row asked for the ids with its key and a moment from ``first`` to ``last``, both included.

        Yields:
            Pairs of a row's place and an id, as two arrays.
        """
        for run in self._runs:
            begin, end = run.places_of(keys)
            begin = run.first_place(begin, end, first, after=False)
            counts = run.first_place(begin, end, last, after=True) - begin
            for rows in _in_pieces(counts):
                of_rows = counts[rows]
                ends = np.cumsum(of_rows)
                places = np.arange(ends[-1]) + np.repeat(begin[rows] - ends + of_rows, of_rows)
                asked, there = np.repeat(rows, of_rows), self._is_there(run, places)
                yield asked[there], run.ids[places[there]]

    def latest(self, keys: KeyNumbers, until: Moments) -> Ids:
        """For each row asked for the id with its key that is the latest one until a moment, itself included.

        Of each key, only ids before its latest one until that moment may have been removed.

        Returns:
            :data:`NONE` where there is none.
        """
        found, moments, numbers = np.full((3, len(keys)), NONE)
        for run in self._runs:
            begin, end = run.places_of(keys)
            places = run.first_place(begin, end, until, after=True) - 1
            rows = np.flatnonzero(places >= begin)
            rows = rows[self._is_there(run, places[rows])]
            at, number = run.moments[places[rows]], run.numbers[places[rows]]
            is_later = (found[rows] == NONE) | (at > moments[rows]) | ((at == moments[rows]) & (number > numbers[rows]))
            rows, at, number = rows[is_later], at[is_later], number[is_later]
            found[rows], moments[rows], numbers[rows] = run.ids[places[rows]], at, number
        return found

    def _reserve(self, end: int) -> None:
        if end > len(self._numbers):
            grown = np.full(max(end, 2 * len(self._numbers)), NONE)
            grown[: len(self._numbers)] = self._numbers
            self._numbers = grown

    def _is_there(self, run: _Run, places: Numbers) -> Flags:
        there: Flags = self._numbers[run.ids[places]] == run.numbers[places]
        return there

    def _merged(self, runs: list[_Run]) -> _Run:
        """One run of those that are there; the sort is stable, and the first run is the older one."""
        parts = [run.chosen(np.flatnonzero(self._is_there(run, np.arange(len(run.ids))))) for run in runs]
        joined = _Run(
            np.concatenate([one.keys for one in parts]),
            np.concatenate([one.moments for one in parts]),
            np.concatenate([one.ids for one in parts]),
            np.concatenate([one.numbers for one in parts]),
        )
        return joined.chosen(np.lexsort((joined.moments, joined.keys)))


@dataclass(frozen=True, slots=True)
class _Run:
    """Entries in the order of keys, moments and numbers."""

    keys: KeyNumbers
    moments: Moments
    ids: Ids
    numbers: Numbers

    def chosen(self, places: Numbers) -> _Run:
        """The entries at these places, in their order."""
        return _Run(self.keys[places], self.moments[places], self.ids[places], self.numbers[places])

    def places_of(self, keys: KeyNumbers) -> tuple[Numbers, Numbers]:
        """Where the entries of each key begin and end."""
        return np.searchsorted(self.keys, keys), np.searchsorted(self.keys, keys, side="right")

    def first_place(self, begin: Numbers, end: Numbers, moments: Moments, *, after: bool) -> Numbers:
        """From ``begin`` to ``end`` the first place whose moment is not before, or is after, the one asked for."""
        low, high = begin.copy(), end.copy()
        rows = np.flatnonzero(low < high)
        while len(rows):
            middle = (low[rows] + high[rows]) // 2
            wanted = moments[rows]
            is_before = self.moments[middle] <= wanted if after else self.moments[middle] < wanted
            low[rows] = np.where(is_before, middle + 1, low[rows])
            high[rows] = np.where(is_before, high[rows], middle)
            rows = rows[low[rows] < high[rows]]
        return low


def _in_pieces(counts: Numbers) -> Iterator[Numbers]:
    """Rows that have something to count, as many together as come to a bounded sum."""
    rows = np.flatnonzero(counts)
    ends = np.cumsum(counts[rows])
    begin, done = 0, 0
    while begin < len(rows):
        end = max(int(np.searchsorted(ends, done + PAIRS_MAX, side="right")), begin + 1)
        yield rows[begin:end]
        begin, done = end, int(ends[end - 1])
