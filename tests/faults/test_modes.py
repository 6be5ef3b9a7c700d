"""kill -9 at every step of jobs that promise less: at-least-once loses nothing, at-most-once repeats nothing."""

from __future__ import annotations

import pytest

from etl.sink import CheckpointMode
from tests.faults import oracle
from tests.faults.arena import Arena
from tests.faults.cases import SAMPLE, THOROUGH, Undisturbed, occurrences, thorough
from tests.faults.fault import Action, Fault
from tests.faults.jobs import KINDS, Rows
from tests.faults.steps import CASES, STEPS

AT_LEAST_ONCE, AT_MOST_ONCE = CheckpointMode.AT_LEAST_ONCE, CheckpointMode.AT_MOST_ONCE
MODES = (AT_LEAST_ONCE, AT_MOST_ONCE)
APPENDING = ("transactional", "two-phase", "united")
COMBINATIONS = [
    # With one input there is nothing to align: there, at-least-once does what exactly-once does.
    *((AT_LEAST_ONCE, kind, step) for kind, step in thorough(CASES, SAMPLE) if kind == "united"),
    *((AT_MOST_ONCE, kind, step) for kind, step in CASES if kind in APPENDING and (THOROUGH or kind != "united")),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", APPENDING)
def test_clean_run_emits_the_same_steps_in_every_mode(
    undisturbed: Undisturbed, kind: str, mode: CheckpointMode
) -> None:
    assert {step.name for step in undisturbed.result(kind, mode).steps} == STEPS[kind]


@pytest.mark.parametrize("mode, kind, step", COMBINATIONS)
def test_kill_breaks_no_promise_of_the_mode(
    arena: Arena, undisturbed: Undisturbed, mode: CheckpointMode, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind, mode)
    for occurrence in occurrences(undisturbed.result(kind, mode).count(step)):
        request = arena.case(kind, Fault(Action.KILL, step, occurrence), mode=mode)
        with arena.told(request):
            # Where nothing is aligned, it is a matter of luck how many units a united job has.
            assert arena.run(request) is None or (kind == "united" and occurrence > 1), "the step was not reached"

            arena.finish(request)

            state = oracle.read_state(arena.store, request.job)
            assert state.offsets[-1] == expected.offsets[-1]
            oracle.check_nothing_left(arena)
            for target in KINDS[kind].targets:
                all_once = target.expected(state.rows(KINDS[kind], state.checkpoint))
                assert _is_kept(mode, oracle.visible_rows(arena, target), all_once)


def _is_kept(mode: CheckpointMode, rows: Rows, all_once: Rows) -> bool:
    if mode is CheckpointMode.AT_LEAST_ONCE:
        return rows >= all_once and set(rows) == set(all_once)
    return rows <= all_once
