"""Prepared transactions that strangers need as well: their number is limited, and their ids are known to everybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql

from tests.faults import oracle
from tests.faults.arena import Arena, Connection
from tests.faults.cases import Undisturbed
from tests.faults.fault import Action, Fault, RunRequest
from tests.faults.jobs import KINDS

CONFIGURATION, OTHER = 2, 70
PREPARING = ("two-phase", "two-phase-upsert", "united")


@contextmanager
def all_slots_taken(connection: Connection) -> Iterator[Callable[[], None]]:
    """Have a stranger hold all that are free, until the end of the block or the call of what is yielded."""
    gids: list[str] = []

    def give_back() -> None:
        while gids:
            connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gids.pop())))

    try:
        with pytest.raises(psycopg.errors.OutOfMemory):
            while True:
                gid = f"strange-{len(gids)}"
                connection.execute("BEGIN")
                connection.execute(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(gid)))
                gids.append(gid)
        yield give_back
    finally:
        give_back()


def about_to_prepare(kind: str) -> Fault:
    """The test is asked before the second unit of the job's first sink is prepared."""
    return Fault(Action.ASK, "sink.prepare.before", 2, KINDS[kind].targets[0].uid)


@pytest.mark.parametrize("kind", PREPARING)
def test_run_waits_for_slots_that_strangers_hold(crash_arena: Arena, undisturbed: Undisturbed, kind: str) -> None:
    expected = undisturbed.state(kind)
    arena = crash_arena  # a server of its own: nobody else is to be in want of slots
    request = arena.case(kind, about_to_prepare(kind), Fault(Action.ASK, "attempt.restarting"), restarts=3)
    with arena.told(request):
        run = arena.spawn(request)
        assert run.asked() == "sink.prepare.before"
        with all_slots_taken(arena.store) as give_back:
            run.answer()
            assert run.asked() == "attempt.restarting"
            give_back()
            run.answer()
            result = run.end(restarts=1)

        assert any(": 53200: maximum number of prepared transactions" in warning for warning in result.warnings)
        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind", PREPARING)
def test_run_names_the_lack_of_slots_when_its_restarts_are_used_up(
    crash_arena: Arena, undisturbed: Undisturbed, kind: str
) -> None:
    expected = undisturbed.state(kind)
    arena = crash_arena
    request = arena.case(kind, about_to_prepare(kind), restarts=2)
    with arena.told(request):
        run = arena.spawn(request)
        assert run.asked() is not None
        with all_slots_taken(arena.store):
            run.answer()
            result = run.end(OTHER, restarts=2)

            assert ": 53200: maximum number of prepared transactions" in result.error
            oracle.check_interrupted(arena, request, expected)
            refused = arena.again(request.without_faults())
            assert refused is not None
            assert refused.exit_code == CONFIGURATION
            assert "prepared transactions are in use" in refused.error
        arena.finish(request)
        oracle.check_done(arena, request, expected)


def next_gid(arena: Arena, request: RunRequest) -> str:
    """That of the unit which a run in its first epoch prepares for its second checkpoint."""
    row = arena.store.execute(
        "SELECT format('etl:%%s:%%s:2:%%s:0', job_id, epoch, sink_id)"
        " FROM etl.head JOIN etl.job USING (job_id) JOIN etl.sink USING (job_id) WHERE name = %s AND uid = %s",
        [request.job, KINDS[request.kind].targets[0].uid],
    ).fetchone()
    assert row is not None
    return str(row[0])


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("kind", PREPARING)
def test_gid_that_a_stranger_has_taken_is_refused_by_name(
    arena: Arena, undisturbed: Undisturbed, kind: str, elsewhere: bool
) -> None:
    expected = undisturbed.state(kind)
    target = KINDS[kind].targets[0]
    # Ids are those of the whole server, and only in their own database can they be listed and finished.
    connection = arena.other if target.other is not elsewhere else arena.store
    request = arena.case(kind, about_to_prepare(kind), restarts=3)
    with arena.told(request):
        run = arena.spawn(request)
        assert run.asked() is not None
        gid = next_gid(arena, request)
        connection.execute("BEGIN; CREATE TABLE strange (); ")
        connection.execute(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(gid)))
        run.answer()
        result = run.end(CONFIGURATION)

        assert f'42710: transaction identifier "{gid}" is already in use' in result.error
        oracle.check_interrupted(arena, request, expected)
        arena.finish(request)
        if elsewhere:
            connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
        # In the target's database it was taken for what a dead run has left, and rolled back.
        assert connection.execute("SELECT to_regclass('strange')").fetchone() == (None,)
        oracle.check_done(arena, request, expected)
