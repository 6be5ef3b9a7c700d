"""The server stopped or killed in the middle of a run, and once more during the recovery that follows."""

from __future__ import annotations

import itertools

import pytest

from tests.faults import oracle
from tests.faults.arena import Arena
from tests.faults.cases import THOROUGH, Undisturbed
from tests.faults.crashing import CrashingServer, Stop
from tests.faults.fault import Action, Fault
from tests.faults.reader import Reader
from tests.faults.steps import CASES, LEFT_BY_CHANCE, RECOVERY_STEPS

STAGED = ("sink.prepared", "checkpoint.head_advanced", "checkpoint.completed", "commit.before", "commit.delivered")
"""Where the server has something to remember: prepared, about to be committed, committed and not yet visible."""

AGAIN = ("lease.reclaimed", "recovery.settled", "recovery.fenced", "recover.each.before", "recover.each.after")
"""Where it stops again, while what the first stop has left is settled."""


def combinations() -> list[tuple[str, str, str, Stop, Stop]]:
    """Each job with each staged step; recovering steps and ways of stopping take turns unless all are tried."""
    found = []
    turns = itertools.count()
    for kind, step in CASES:
        if step in STAGED:
            is_left = step != "sink.prepared" or kind not in LEFT_BY_CHANCE
            settling = RECOVERY_STEPS.get(kind, ()) if is_left else ()
            steps = [one for one in AGAIN if not one.startswith("recover.") or one in settling]
            every = list(itertools.product(steps, Stop, Stop))
            # Prime to the number of ways, so that in turn all of them would come.
            chosen = every if THOROUGH else [every[next(turns) * 7 % len(every)]]
            found += [(kind, step, *one) for one in chosen]
    return found


def stop_server(server: CrashingServer, arena: Arena, how: Stop) -> None:
    """Stop it, and have it up again."""
    pid = arena.store.execute(
        "SELECT pid FROM pg_stat_activity WHERE starts_with(application_name, 'etl:') ORDER BY backend_start DESC"
    ).fetchone()
    assert pid is not None
    server.stop(how, pid[0], arena.store)
    server.restart()
    arena.reconnect()


@pytest.mark.parametrize("kind, step, again, first, second", combinations())
def test_run_goes_on_when_the_server_stops_and_stops_again_during_recovery(
    crashing_server: CrashingServer,
    crash_arena: Arena,
    undisturbed: Undisturbed,
    kind: str,
    step: str,
    again: str,
    first: Stop,
    second: Stop,
) -> None:
    expected = undisturbed.state(kind)
    occurrence = 2 if again.startswith("recovery.") else 1
    faults = (Fault(Action.ASK, step, 2), Fault(Action.ASK, again, occurrence))
    request = crash_arena.case(kind, *faults, restarts=1000)
    with crash_arena.told(request), Reader(request, server_may_stop=True) as reader:
        run = crash_arena.spawn(request)
        for fault, how in zip(faults, (first, second), strict=True):
            assert run.asked() == fault.step
            reader.look_again()
            stop_server(crashing_server, crash_arena, how)
            run.answer()
        run.end()

        assert reader.reconnects >= 2
        oracle.check_done(crash_arena, request, expected)
