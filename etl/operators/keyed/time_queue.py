"""What is due when: ids in the order of moments."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from etl.operators.keyed.columns import Ids

Moments = npt.NDArray[np.int64]
"""Microseconds since 1970."""

_LEAST, _GREATEST = -(1 << 63), (1 << 63) - 1


class TimeQueue:
    """Ids, each to be taken when its moment has come; of equal moments the one that was added first comes first.

    Sorted runs, of which neighbours of like length are merged: adding and taking cost what is added and taken, but for
    a logarithm, however much waits. Nothing can be taken out before its moment; whoever asks must know what is still
    meant.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[Moments, Ids]] = []

    def __len__(self) -> int:
        return sum(len(moments) for moments, _ in self._runs)

    @property
    def earliest(self) -> int | None:
        """The first moment, None where nothing waits."""
        return min((int(moments[0]) for moments, _ in self._runs), default=None)

    def add(self, moments: Moments, ids: Ids) -> None:
        """Have ids wait for their moments."""
        if not len(ids):
            return
        self._runs.append(_sorted(moments, ids))
        while len(self._runs) > 1 and len(self._runs[-2][0]) <= 2 * len(self._runs[-1][0]):
            self._runs[-2:] = [_joined(self._runs[-2:])]

    def take(self, until: int) -> tuple[Moments, Ids]:
        """Everything whose moment is not after ``until``, in order; it waits no longer."""
        due: list[tuple[Moments, Ids]] = []
        left: list[tuple[Moments, Ids]] = []
        for moments, ids in self._runs:
            end = int(np.searchsorted(moments, until, side="right"))
            due.append((moments[:end], ids[:end]))
            if end < len(ids):
                left.append(_released(moments[end:], ids[end:]))
        self._runs = left
        return _joined(due) if due else (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def later(moments: Moments, span: int) -> Moments:
    """Moments that lie a span, which may be negative, behind others; none goes beyond what 64 bits hold."""
    low, high = max(_LEAST, _LEAST - span), min(_GREATEST, _GREATEST - span)
    return np.clip(moments, low, high) + span


def _sorted(moments: Moments, ids: Ids) -> tuple[Moments, Ids]:
    order = np.argsort(moments, kind="stable")
    return moments[order], ids[order]


def _joined(runs: list[tuple[Moments, Ids]]) -> tuple[Moments, Ids]:
    return _sorted(np.concatenate([moments for moments, _ in runs]), np.concatenate([ids for _, ids in runs]))


def _released(moments: Moments, ids: Ids) -> tuple[Moments, Ids]:
    """The rest of a run, copied where that frees more than it takes."""
    whole = moments.base
    if whole is not None and len(whole) > 2 * len(moments):
        return moments.copy(), ids.copy()
    return moments, ids
