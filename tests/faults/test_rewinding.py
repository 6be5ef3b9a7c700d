"""Going back to a checkpoint: whoever dies on the way, it takes place once or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from tests.faults import oracle
from tests.faults.arena import BUSY, Arena
from tests.faults.cases import THOROUGH, Undisturbed
from tests.faults.fault import Action, Fault, RunRequest
from tests.faults.jobs import ALL_KINDS, UPSERT_TABLE, Rows
from tests.faults.oracle import State
from tests.faults.steps import RECOVERY_STEPS, STARTING

FENCED = 78
BASE = 1
"""The checkpoint to go back to."""

REWINDING = ("rewind.begin", "rewind.copied", "rewind.completed", "lease.reclaimed")
AFTERWARDS = ("checkpoint.head_advanced", "checkpoint.completed", "commit.begin", "run.ending")
EVERY_STEP = ("two-phase", "keyed-apart") if THOROUGH else ("keyed-apart",)
SOME = (*EVERY_STEP, "two-phase", "upsert", "timed-4")
CASES = [
    *((kind, step) for kind in EVERY_STEP for step in (*STARTING, *sorted(RECOVERY_STEPS[kind]), *AFTERWARDS)),
    *(
        (kind, step)
        for kind in ALL_KINDS
        for step in REWINDING
        if THOROUGH or kind in (*EVERY_STEP, "upsert", "timed-4")
    ),
]


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A job that was killed when its second checkpoint was recorded, and nothing of it committed.

    Attributes:
        request: Its request, to go back.
        state: How the store describes it.
    """

    request: RunRequest
    state: State

    def expected(self, end: State) -> Mapping[str, Rows]:
        """What the targets must show when the job has gone back to the first checkpoint and come to its end."""
        kind = ALL_KINDS[self.request.kind]
        found = {}
        for target in kind.targets:
            rows = target.expected(end.rows(kind, end.checkpoint))
            if target.table != UPSERT_TABLE:
                # Written before the job went back, and once more.
                rows += target.expected(self.state.rows(kind, 2)) - target.expected(self.state.rows(kind, BASE))
            found[target.uid] = rows
        return found


def interrupt(arena: Arena, kind: str) -> Interrupted:
    request = arena.case(kind, Fault(Action.KILL, "commit.begin", 2))
    assert arena.run(request) is None
    state = oracle.read_state(arena.store, request.job)
    assert state.checkpoint == 2
    return Interrupted(replace(request.without_faults(), start=str(BASE)), state)


def incarnation(arena: Arena, interrupted: Interrupted) -> int:
    row = arena.store.execute(
        "SELECT incarnation FROM etl.head WHERE job_id = %s", [interrupted.state.job_id]
    ).fetchone()
    assert row is not None
    return int(row[0])


def check(arena: Arena, interrupted: Interrupted, undisturbed: State) -> None:
    """The job went back once, and everything is there that must be."""
    kind = ALL_KINDS[interrupted.request.kind]
    state = oracle.read_state(arena.store, interrupted.request.job)
    assert incarnation(arena, interrupted) == 2
    assert state.offsets[-1] == undisturbed.offsets[-1]
    expected = interrupted.expected(undisturbed)
    for target in kind.targets:
        assert oracle.visible_rows(arena, target) == expected[target.uid], target.uid
    oracle.check_operators(arena, kind, state)
    oracle.check_nothing_left(arena)


@pytest.mark.parametrize("kind, step", CASES)
def test_kill_while_going_back_is_made_good(arena: Arena, undisturbed: Undisturbed, kind: str, step: str) -> None:
    expected = undisturbed.state(kind)
    interrupted = interrupt(arena, kind)
    request = replace(interrupted.request, faults=(Fault(Action.KILL, step),))
    with arena.told(request):
        assert arena.again(request) is None, "the step was not reached"
        went_back = incarnation(arena, interrupted) == 2
        assert went_back == (step in ("rewind.completed", "lease.reclaimed", *AFTERWARDS))

        arena.finish(replace(request, start=None) if went_back else request)

        check(arena, interrupted, expected)
        idle = arena.finish(replace(request, start=None))
        assert (idle.rows_read, sum(idle.rows_written.values())) == (0, 0)
        check(arena, interrupted, expected)


@pytest.mark.parametrize("kind", ["two-phase", "keyed"])
def test_two_runs_that_go_back_at_once_do_so_once(arena: Arena, undisturbed: Undisturbed, kind: str) -> None:
    expected = undisturbed.state(kind)
    interrupted = interrupt(arena, kind)
    request = replace(interrupted.request, faults=(Fault(Action.ASK, "rewind.begin"),))
    runs = [arena.spawn(request) for _ in range(2)]

    working = [run for run in runs if run.asked() is not None]
    refused = [run.wait() for run in runs if run not in working]
    for run in working:
        run.answer()
    done = [run.wait() for run in working]

    assert [result.exit_code for result in refused if result] == [BUSY]
    assert [result.exit_code for result in done if result] == [0]
    check(arena, interrupted, expected)


@pytest.mark.parametrize("kind", ["two-phase", "keyed"])
@pytest.mark.parametrize("step", ["rewind.begin", "rewind.copied", "rewind.completed"])
def test_overtaken_run_that_was_going_back_is_fenced(
    arena: Arena, undisturbed: Undisturbed, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind)
    interrupted = interrupt(arena, kind)
    request = replace(interrupted.request, faults=(Fault(Action.STOP, step),))
    with arena.told(request):
        stopped = arena.spawn(request)
        assert stopped.wait_stopped()
        start = None if step == "rewind.completed" else request.start

        arena.finish(replace(request, owner_timeout_s=0.3, start=start))

        check(arena, interrupted, expected)
        stopped.go_on()
        stopped.end(FENCED)
        check(arena, interrupted, expected)


@pytest.mark.parametrize("step", ["rewind.begin", "rewind.copied", "rewind.completed", "lease.reclaimed"])
def test_run_whose_sessions_are_cut_while_it_goes_back_does_so_once(
    arena: Arena, undisturbed: Undisturbed, step: str
) -> None:
    expected = undisturbed.state("keyed")
    interrupted = interrupt(arena, "keyed")
    request = replace(interrupted.request, faults=(Fault(Action.CUT, step),))
    with arena.told(request):
        result = arena.again(request)

        assert result is not None
        assert (result.exit_code, result.restarts) == (0, 1), result.trace
        check(arena, interrupted, expected)
