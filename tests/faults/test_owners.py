"""Two runs of one job: at once, and one overtaking another that stands still."""

from __future__ import annotations

from dataclasses import replace

import pytest
from psycopg.conninfo import make_conninfo

from tests.faults import oracle
from tests.faults.arena import BUSY, Arena
from tests.faults.cases import FAULT_CASES, Undisturbed, every_occurrence
from tests.faults.fault import Action, Fault
from tests.faults.jobs import KINDS

FENCED = 78
BEFORE_CLAIM = "lease.claiming"
"""A run that stands still there owns nothing yet: when it goes on it is simply the next one."""

SOON_S = 0.3
"""When a run that stands still is overtaken."""


@pytest.mark.parametrize("starts", [2, 5])
def test_one_of_many_starts_at_once_works(arena: Arena, undisturbed: Undisturbed, starts: int) -> None:
    expected = undisturbed.state("two-phase")
    request = arena.case("two-phase", Fault(Action.ASK, "source.batch"))
    runs = [arena.spawn(request) for _ in range(starts)]

    working = [run for run in runs if run.asked() is not None]
    refused = [run.wait() for run in runs if run not in working]
    for run in working:
        run.answer()
    done = [run.wait() for run in working]

    assert [result.exit_code for result in done if result] == [0]
    assert [result.exit_code for result in refused if result] == [BUSY] * (starts - 1)
    oracle.check_done(arena, request, expected)


@pytest.mark.parametrize(
    "kind, step, occurrence",
    [
        ("transactional", "source.batch", 4),
        ("two-phase", "source.batch", 4),
        ("write-ahead", "source.batch", 4),
        ("write-ahead", "checkpoint.completed", 1),
        ("two-phase", "recover.listed", 2),
        ("write-ahead", "recover.listed", 2),
    ],
)
def test_overtaken_run_is_fenced_when_its_sessions_could_not_be_ended(
    arena: Arena, undisturbed: Undisturbed, stranger: str, kind: str, step: str, occurrence: int
) -> None:
    expected = undisturbed.state(kind)
    # Without a heartbeat, nothing but the fence can tell it.
    request = arena.case(kind, Fault(Action.STOP, step, occurrence), heartbeat=False)
    with arena.told(request):
        stopped = arena.spawn(request)
        assert stopped.wait_stopped()
        store, other = (
            make_conninfo(url, user=stranger, password=stranger) for url in (arena.store_url, arena.other_url)
        )

        arena.finish(replace(request, owner_timeout_s=1.0, store_url=store, other_url=other))

        (target,) = KINDS[kind].targets
        rows = oracle.visible_rows(arena, target)
        assert rows == target.expected(expected.rows(KINDS[kind], expected.checkpoint))
        assert oracle.sessions(arena.store) != [], "nothing is left that the fence would have to stop"
        stopped.go_on()
        stopped.end(FENCED)
        assert oracle.visible_rows(arena, target) == rows
        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind, step", [case for case in FAULT_CASES if case[1] != BEFORE_CLAIM])
def test_overtaken_run_changes_nothing_when_it_goes_on(
    arena: Arena, undisturbed: Undisturbed, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind)
    for occurrence in every_occurrence(kind, undisturbed.result(kind).count(step)):
        request = arena.case(kind, Fault(Action.STOP, step, occurrence))
        with arena.told(request):
            stopped = arena.spawn(request)
            assert stopped.wait_stopped(), "the step was not reached"
            # Overtaken when all is visible, a run has ended well.
            ends = {0, FENCED} if oracle.is_done(arena, request, expected) else {FENCED}

            arena.finish(replace(request, owner_timeout_s=SOON_S))

            state = oracle.check_done(arena, request, expected)
            stopped.go_on()
            result = stopped.wait()
            assert result is not None
            assert result.exit_code in ends, result.trace
            assert oracle.check_done(arena, request, expected) == state
