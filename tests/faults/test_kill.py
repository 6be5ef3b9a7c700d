"""kill -9 at every step of every job, at each of its occurrences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults import oracle, steps
from tests.faults.arena import Arena
from tests.faults.cases import SAMPLE, THOROUGH, Undisturbed, kills, thorough
from tests.faults.fault import Action, Fault


@pytest.mark.parametrize("kind", steps.STEPS)
def test_clean_run_emits_exactly_the_listed_steps(undisturbed: Undisturbed, kind: str) -> None:
    seen = {step.name for step in undisturbed.result(kind).steps}

    assert seen == steps.STEPS[kind]


AT_OTHER_PARALLELISM = [
    (kind, step)
    for kind in ("timed-1", "timed-2")
    for step in sorted(steps.STEPS["timed-4"] - (frozenset() if THOROUGH else {*steps.STARTING}))
]
"""How many subtasks there are makes no difference before they begin."""


@pytest.mark.parametrize("kind, step", [*steps.CASES, *AT_OTHER_PARALLELISM])
def test_kill_is_made_good_by_the_next_run(arena: Arena, undisturbed: Undisturbed, kind: str, step: str) -> None:
    expected = undisturbed.state(kind)
    for occurrence in kills(kind, undisturbed.result(kind).count(step)):
        request = arena.case(kind, Fault(Action.KILL, step, occurrence))
        with arena.told(request):
            assert arena.run(request) is None, "the step was not reached"
            oracle.check_interrupted(arena, request, expected)

            arena.finish(request)

            state = oracle.check_done(arena, request, expected)
            if occurrence == 1 and (THOROUGH or step in SAMPLE):
                oracle.check_idle(arena, request, state)


@pytest.mark.parametrize("kind", steps.RECOVERY_STEPS)
def test_recovery_emits_exactly_the_listed_steps(undisturbed: Undisturbed, kind: str) -> None:
    seen = {step.name for step in undisturbed.recovery(kind, "checkpoint.completed")}

    assert seen - set(steps.STARTING) == steps.RECOVERY_STEPS[kind]


RECOVERY_CASES = [
    *((kind, step, "checkpoint.completed") for kind, step in steps.RECOVERY_CASES),
    *(
        (kind, step, "sink.prepared")
        for kind, step in thorough(steps.RECOVERY_CASES, steps.SETTLING)
        if kind not in steps.LEFT_BY_CHANCE
    ),
]
"""With a unit to be made visible, and with one to be dropped."""


@pytest.mark.parametrize("kind, step, left_at", RECOVERY_CASES)
def test_kill_during_recovery_is_made_good(
    arena: Arena, undisturbed: Undisturbed, kind: str, step: str, left_at: str
) -> None:
    expected = undisturbed.state(kind)
    seen = [one.name for one in undisturbed.recovery(kind, left_at)].count(step)
    for occurrence in kills(kind, seen):
        request = arena.case(kind, Fault(Action.KILL, left_at, 2))
        with arena.told(request):
            assert arena.run(request) is None
            again = replace(request, faults=(Fault(Action.KILL, step, occurrence),))
            assert arena.again(again) is None, "the step was not reached"
            oracle.check_interrupted(arena, request, expected)

            arena.finish(request)

            oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("step", sorted(steps.STEPS["united"]))
def test_kill_while_several_subtasks_read_is_made_good_by_another_number_of_them(
    arena: Arena, undisturbed: Undisturbed, step: str
) -> None:
    expected = undisturbed.state("united")
    occurrence = min(2, undisturbed.result("united").count(step))
    request = arena.case("united", Fault(Action.KILL, step, occurrence), readers=2)
    with arena.told(request):
        assert arena.run(request) is None, "the step was not reached"
        oracle.check_interrupted(arena, request, expected)

        arena.finish(replace(request, readers=3))

        oracle.check_done(arena, request, expected)
