"""A job with a unit to prepare in each of two databases, killed when one of them is prepared, committed or settled."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from tests.faults import oracle
from tests.faults.arena import Arena, Connection
from tests.faults.cases import Undisturbed, occurrences
from tests.faults.fault import Action, Fault
from tests.faults.jobs import ALL_KINDS
from tests.support.waiting import wait_until

KIND = "paired"
SINKS = ("near", "far")
WAIT_TIMEOUT_S = 20.0
MESSAGES = ("sink.prepared", "sink.acknowledging", "commit.before", "commit.after")


def prepared(connection: Connection) -> list[str]:
    """What is prepared in this database."""
    query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
    return [gid for (gid,) in connection.execute(query)]


@pytest.mark.parametrize("late", SINKS)
@pytest.mark.parametrize("checkpoint", [1, 2, 3])
def test_unit_that_is_prepared_without_the_other_is_dropped(
    arena: Arena, undisturbed: Undisturbed, late: str, checkpoint: int
) -> None:
    expected = undisturbed.state(KIND)
    request = arena.case(KIND, Fault(Action.ASK, "sink.prepare.before", checkpoint, uid=late))
    early_one, late_one = (arena.other, arena.store) if late == "near" else (arena.store, arena.other)
    with arena.told(request):
        run = arena.spawn(request)
        assert run.asked() == "sink.prepare.before"
        wait_until(
            lambda: prepared(early_one) and oracle.read_state(arena.store, request.job).checkpoint == checkpoint - 1,
            "the other unit, prepared",
            WAIT_TIMEOUT_S,
        )
        os.kill(run.pid, signal.SIGKILL)
        assert run.wait() is None
        assert (len(prepared(early_one)), len(prepared(late_one))) == (1, 0)
        assert oracle.read_state(arena.store, request.job).checkpoint == checkpoint - 1
        oracle.check_interrupted(arena, request, expected)

        arena.finish(request)

        state = oracle.check_done(arena, request, expected)
        oracle.check_idle(arena, request, state)


@pytest.mark.parametrize("message", MESSAGES)
def test_kill_between_two_units_is_made_good(arena: Arena, undisturbed: Undisturbed, message: str) -> None:
    expected = undisturbed.state(KIND)
    for occurrence in occurrences(undisturbed.result(KIND).count(message)):
        request = arena.case(KIND, Fault(Action.KILL, message, occurrence))
        with arena.told(request):
            assert arena.run(request) is None, "the step was not reached"
            oracle.check_interrupted(arena, request, expected)

            arena.finish(request)

            oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("step", ["recover.each.before", "recover.each.after", "recovery.settled"])
@pytest.mark.parametrize("left_at", ["checkpoint.completing", "checkpoint.completed"])
def test_kill_between_two_units_of_the_recovery_is_made_good(
    arena: Arena, undisturbed: Undisturbed, step: str, left_at: str
) -> None:
    expected = undisturbed.state(KIND)
    for occurrence in (1, 2) if step.startswith("recover.each") else (1,):
        request = arena.case(KIND, Fault(Action.KILL, left_at, 2))
        with arena.told(request):
            assert arena.run(request) is None
            assert (len(prepared(arena.store)), len(prepared(arena.other))) == (1, 1)
            again = replace(request, faults=(Fault(Action.KILL, step, occurrence),))
            assert arena.again(again) is None, "the step was not reached"
            oracle.check_interrupted(arena, request, expected)

            arena.finish(request)

            oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("lost", SINKS)
def test_lost_unit_is_an_alarm_and_the_other_one_is_kept(arena: Arena, undisturbed: Undisturbed, lost: str) -> None:
    expected = undisturbed.state(KIND)
    request = arena.case(KIND, Fault(Action.KILL, "checkpoint.completed", 2))
    lost_one, kept_one = (arena.store, arena.other) if lost == "near" else (arena.other, arena.store)
    (kept,) = (target for target in ALL_KINDS[KIND].targets if target.uid != lost)
    with arena.told(request):
        assert arena.run(request) is None
        (gid,) = prepared(lost_one)
        lost_one.execute(f"ROLLBACK PREPARED '{gid}'")

        result = arena.again(request.without_faults())

        assert result is not None
        assert (result.exit_code, result.count("source.batch")) == (70, 0)
        assert result.error.startswith("LostRowsError: ")
        assert "checkpoint 2" in result.error
        # The one that is settled first has been committed by then.
        rows = kept.expected(expected.rows(ALL_KINDS[KIND], 2))
        assert oracle.visible_rows(arena, kept) == rows or len(prepared(kept_one)) == 1
