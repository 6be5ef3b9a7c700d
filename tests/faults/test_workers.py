"""Worker processes killed, stopped, orphaned, and working on for a run that was overtaken."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import oracle, steps
from tests.faults.arena import Arena
from tests.faults.cases import THOROUGH, Undisturbed
from tests.faults.crashing import children_of
from tests.faults.fault import Action, Fault
from tests.faults.test_owners import FENCED, SOON_S
from tests.support.waiting import wait_until

KEYED = ("keyed", "keyed-apart", "timed-4")
WORKERS = 2

BEFORE_WORKERS = (*steps.STARTING, "recover.listed")
AFTER_WORKERS = ("run.ending", "run.ended")
CASES = [
    (kind, step)
    for kind in KEYED
    for step in sorted({*steps.STEPS[kind], "worker.started"} - {*BEFORE_WORKERS, *AFTER_WORKERS})
]
SAMPLE = {
    "keyed": {"worker.started", "source.batch", "state.snapshotting", "sink.prepared", "checkpoint.completed"},
    "keyed-apart": {"checkpoint.recorded"},
    "timed-4": {"source.batch", "state.snapshotted", "sink.prepared", "checkpoint.completed"},
}


def sampled(sample: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
    """All cases when the environment asks for them, else those of the sample."""
    return [case for case in CASES if THOROUGH or case in sample]


SAMPLED = sampled([(kind, step) for kind, names in SAMPLE.items() for step in names])


def occurrence_of(undisturbed: Undisturbed, kind: str, step: str) -> int:
    """The second one, where there are so many; each step of a run is taken with workers as well."""
    return WORKERS if step == "worker.started" else min(2, undisturbed.result(kind).count(step))


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("kind", KEYED)
def test_run_with_workers_takes_the_same_steps_and_yields_the_same(
    arena: Arena, undisturbed: Undisturbed, kind: str
) -> None:
    expected = undisturbed.state(kind)
    request = arena.case(kind, workers=WORKERS)

    result = arena.finish(request)

    assert {step.name for step in result.steps} == {*steps.STEPS[kind], "worker.started"}
    assert result.warnings == ()
    state = oracle.check_done(arena, request, expected)
    oracle.check_idle(arena, request, state)


@pytest.mark.parametrize("kind, step", SAMPLED)
def test_killed_worker_is_made_good_by_the_same_run(
    arena: Arena, undisturbed: Undisturbed, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind)
    fault = Fault(Action.KILL_WORKER, step, occurrence_of(undisturbed, kind, step))
    request = arena.case(kind, fault, workers=WORKERS)
    with arena.told(request):
        result = arena.run(request)

        assert result is not None
        assert (result.exit_code, result.restarts) == (0, 1), result.trace
        assert "was ended by SIGKILL" in result.warnings[0]
        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("step", ["source.batch", "checkpoint.head_advanced"])
def test_worker_that_stands_still_is_made_good_by_the_same_run(
    arena: Arena, undisturbed: Undisturbed, step: str
) -> None:
    expected = undisturbed.state("keyed")
    request = arena.case("keyed", Fault(Action.STOP_WORKER, step, 2), workers=WORKERS, timeout_s=5.0)
    with arena.told(request):
        result = arena.run(request)

        assert result is not None
        assert (result.exit_code, result.restarts) == (0, 1), result.trace
        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind, step", sampled([("keyed", "source.batch"), ("timed-4", "checkpoint.completed")]))
def test_workers_end_with_a_killed_run_and_the_next_one_makes_it_good(
    arena: Arena, undisturbed: Undisturbed, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind)
    fault = Fault(Action.ASK, step, occurrence_of(undisturbed, kind, step))
    request = arena.case(kind, fault, workers=WORKERS)
    with arena.told(request):
        run = arena.spawn(request)
        assert run.asked() == step
        workers = children_of(run.pid)
        # One of them stands still: it cannot notice anything.
        os.kill(workers[-1], signal.SIGSTOP)

        os.kill(run.pid, signal.SIGKILL)

        assert run.wait() is None
        wait_until(lambda: all(map(is_gone, workers)), f"the end of workers {workers}")
        oracle.check_interrupted(arena, request, expected)
        arena.finish(request)
        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind, step", sampled([("keyed", "state.snapshotted"), ("timed-4", "sink.prepared")]))
def test_workers_of_an_overtaken_run_change_nothing_when_it_goes_on(
    arena: Arena, undisturbed: Undisturbed, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind)
    fault = Fault(Action.STOP, step, occurrence_of(undisturbed, kind, step))
    request = arena.case(kind, fault, workers=WORKERS)
    with arena.told(request):
        stopped = arena.spawn(request)
        assert stopped.wait_stopped(), "the step was not reached"
        workers = children_of(stopped.pid)
        ends = {0, FENCED} if oracle.is_done(arena, request, expected) else {FENCED}

        arena.finish(replace(request, owner_timeout_s=SOON_S))

        state = oracle.check_done(arena, request, expected)
        assert not any(map(is_gone, workers))
        stopped.go_on()
        result = stopped.wait()
        assert result is not None
        assert result.exit_code in ends, result.trace
        assert all(map(is_gone, workers))
        assert oracle.check_done(arena, request, expected) == state
