"""Exceptions, exhausted memory and terminated sessions at every step."""

from __future__ import annotations

import pytest

from tests.faults import oracle
from tests.faults.arena import Arena
from tests.faults.cases import FAULT_CASES, SAMPLE, Undisturbed, every_occurrence, thorough
from tests.faults.fault import Action, Fault

INTERNAL_ERROR = 70
OUTSIDE_ATTEMPTS = {"lease.claiming", "lease.claimed", "run.ending", "run.ended"}
WITHIN = [(kind, step) for kind, step in FAULT_CASES if step not in OUTSIDE_ATTEMPTS]


@pytest.mark.parametrize(
    "action, kind, step",
    [
        *((Action.RAISE, kind, step) for kind, step in thorough(WITHIN, SAMPLE)),
        *((Action.EXHAUST, kind, step) for kind, step in thorough(WITHIN, {"sink.prepared"})),
    ],
)
def test_defect_stops_the_run_and_only_whole_checkpoints_are_visible(
    arena: Arena, undisturbed: Undisturbed, action: Action, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind)
    request = arena.case(kind, Fault(action, step, min(2, undisturbed.result(kind).count(step))))
    with arena.told(request):
        result = arena.run(request)

        assert result is not None
        assert result.exit_code == INTERNAL_ERROR
        assert result.error.startswith("InternalError: ")
        assert result.restarts == 0
        oracle.check_interrupted(arena, request, expected)
        arena.finish(request)
        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind, step", WITHIN)
def test_run_goes_on_by_itself_when_its_sessions_are_terminated(
    arena: Arena, undisturbed: Undisturbed, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind)
    for occurrence in every_occurrence(kind, undisturbed.result(kind).count(step)):
        request = arena.case(kind, Fault(Action.CUT, step, occurrence))
        with arena.told(request):
            result = arena.run(request)

            assert result is not None
            assert result.exit_code == 0, result.trace
            assert result.count(step) >= occurrence, "the step was not reached"
            oracle.check_done(arena, request, expected)
