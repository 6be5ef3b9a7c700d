"""Barrier alignment: what is blocked, and when the barrier goes on."""

from __future__ import annotations

import pytest

from etl.errors import InternalError
from etl.runtime.alignment import Aligner
from etl.runtime.element import Barrier
from etl.sink import CheckpointMode

EXACTLY, AT_LEAST = CheckpointMode.EXACTLY_ONCE, CheckpointMode.AT_LEAST_ONCE


def test_barrier_goes_on_at_once_when_there_is_one_input() -> None:
    aligner = Aligner(1, EXACTLY)
    assert aligner.barrier(0, Barrier(1)) == Barrier(1)
    assert aligner.blocked == frozenset()


def test_channel_is_blocked_until_all_barriers_have_come() -> None:
    aligner = Aligner(3, EXACTLY)
    assert aligner.barrier(0, Barrier(7)) is None
    assert aligner.barrier(2, Barrier(7)) is None
    assert aligner.blocked == {0, 2}
    assert aligner.barrier(1, Barrier(7)) == Barrier(7)
    assert aligner.blocked == frozenset()


def test_channel_is_not_blocked_in_at_least_once_mode() -> None:
    aligner = Aligner(2, AT_LEAST)
    assert aligner.barrier(0, Barrier(1)) is None
    assert aligner.blocked == frozenset()
    assert aligner.barrier(1, Barrier(1)) == Barrier(1)


def test_ended_channel_counts_as_aligned() -> None:
    aligner = Aligner(2, EXACTLY)
    assert aligner.end(1) is None
    assert aligner.barrier(0, Barrier(1)) == Barrier(1)
    assert not aligner.ended


def test_end_of_a_channel_releases_the_barrier_that_waits_for_it() -> None:
    aligner = Aligner(2, EXACTLY)
    assert aligner.barrier(0, Barrier(1)) is None
    assert aligner.end(1) == Barrier(1)


def test_aligner_has_ended_when_all_channels_have() -> None:
    aligner = Aligner(2, EXACTLY)
    aligner.end(0)
    aligner.end(1)
    assert aligner.ended


@pytest.mark.parametrize(("index", "checkpoint_id"), [(1, 2), (0, 1)])
def test_barrier_out_of_order_is_refused(index: int, checkpoint_id: int) -> None:
    aligner = Aligner(2, EXACTLY)
    aligner.barrier(0, Barrier(1))
    with pytest.raises(InternalError):
        aligner.barrier(index, Barrier(checkpoint_id))
