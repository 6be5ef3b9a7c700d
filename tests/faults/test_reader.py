"""Somebody reads all the time while runs are killed and repeated: never a row twice, too early, in part or gone."""

from __future__ import annotations

import pytest

from tests.faults import oracle
from tests.faults.arena import Arena
from tests.faults.cases import Undisturbed
from tests.faults.fault import Action, Fault
from tests.faults.jobs import KINDS
from tests.faults.reader import Reader


@pytest.mark.parametrize("kind", KINDS)
def test_undisturbed_run_shows_each_checkpoint_as_a_whole(arena: Arena, undisturbed: Undisturbed, kind: str) -> None:
    count = undisturbed.state(kind).checkpoint
    request = arena.case(kind, *(Fault(Action.ASK, "commit.end", number) for number in range(1, count + 1)))
    with Reader(request) as reader:
        run = arena.spawn(request)
        while run.asked():
            reader.look_again()
            run.answer()
        result = run.wait()

    assert result is not None
    assert result.exit_code == 0, result.trace
    state = oracle.read_state(arena.store, request.job)
    for target in KINDS[kind].targets:
        wholes = [target.expected(state.rows(KINDS[kind], number)) for number in range(state.checkpoint + 1)]
        assert reader.states[target.uid] == tuple(wholes)
