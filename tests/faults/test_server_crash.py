"""The server and all its processes killed in the middle of a run, and started again: the run goes on by itself."""

from __future__ import annotations

from enum import StrEnum

import pytest

from tests.faults import oracle
from tests.faults.arena import Arena
from tests.faults.cases import FAULT_CASES, THOROUGH, Undisturbed, every_occurrence
from tests.faults.crashing import CrashingServer
from tests.faults.fault import Action, Fault


class UpAgain(StrEnum):
    """When the server is there again."""

    FIRST = "before the run notices"
    LATER = "while the run retries"


OUTSIDE_ATTEMPTS = {"lease.claiming", "run.ending", "run.ended"}
"""Nothing is repeated there: before the claim nothing can be lost yet, and after the last attempt nothing any more."""
UNREACHABLE = 69

COMBINATIONS = [
    (kind, step, up_again)
    for number, (kind, step) in enumerate(FAULT_CASES)
    for up_again in (UpAgain if THOROUGH else [list(UpAgain)[number % 2]])
]


@pytest.mark.parametrize("kind, step, up_again", COMBINATIONS)
def test_run_goes_on_by_itself_when_the_server_is_killed(
    crashing_server: CrashingServer,
    crash_arena: Arena,
    undisturbed: Undisturbed,
    kind: str,
    step: str,
    up_again: UpAgain,
) -> None:
    expected = undisturbed.state(kind)
    for occurrence in every_occurrence(kind, undisturbed.result(kind).count(step)):
        request = crash_arena.case(kind, Fault(Action.ASK, step, occurrence), restarts=1000)
        with crash_arena.told(request):
            run = crash_arena.spawn(request)
            assert run.asked() == step
            crashing_server.kill()
            if up_again is UpAgain.LATER:
                run.answer()
            crashing_server.restart()
            crash_arena.reconnect()
            if up_again is UpAgain.FIRST:
                run.answer()
            result = run.wait()

            assert result is not None
            if step in OUTSIDE_ATTEMPTS:
                assert result.exit_code in {0, UNREACHABLE}, result.trace
                crash_arena.finish(request)
            else:
                assert result.exit_code == 0, result.trace
            oracle.check_done(crash_arena, request, expected)
