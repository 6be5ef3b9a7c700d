"""Staged rows of a completed checkpoint that somebody removes by hand: the next run stops and says what is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from psycopg import sql

from tests.faults import oracle
from tests.faults.arena import Arena
from tests.faults.cases import Undisturbed
from tests.faults.fault import Action, Fault
from tests.faults.jobs import KINDS

STATE_ERROR = 70


@pytest.mark.parametrize("kind", ["two-phase", "two-phase-upsert", "united"])
def test_rolled_back_unit_of_a_completed_checkpoint_is_an_alarm(arena: Arena, kind: str) -> None:
    request = arena.case(kind, Fault(Action.KILL, "checkpoint.completed", 2))
    arena.run(request)
    target = KINDS[kind].targets[0]
    connection = arena.other if target.other else arena.store
    (gid,) = connection.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()").fetchone() or (
        "",
    )
    connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
    before = oracle.read_state(arena.store, request.job)
    rows = oracle.visible_rows(arena, target)

    for _ in range(2):
        result = arena.again(request.without_faults())

        assert result is not None
        assert result.exit_code == STATE_ERROR
        assert result.error.startswith("LostRowsError: ")
        for part in (target.table, "checkpoint 2", gid, "lost"):
            assert part in result.error
        assert result.count("source.batch") == 0
        assert oracle.read_state(arena.store, request.job) == before
        assert oracle.visible_rows(arena, target) == rows


@pytest.mark.parametrize("kind", ["two-phase", "write-ahead"])
def test_lost_rows_are_read_again_when_the_job_goes_back(arena: Arena, undisturbed: Undisturbed, kind: str) -> None:
    expected = undisturbed.state(kind)
    request = arena.case(kind, Fault(Action.KILL, "checkpoint.completed", 2))
    arena.run(request)
    target = KINDS[kind].targets[0]
    connection = arena.other if target.other else arena.store
    for (gid,) in connection.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"):
        connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
    arena.store.execute("DELETE FROM etl.write_ahead_log")

    result = arena.again(replace(request.without_faults(), start="1"))

    assert result is not None
    assert (result.exit_code, result.error) == (0, "")
    state = oracle.read_state(arena.store, request.job)
    assert state.offsets[-1] == expected.offsets[-1]
    assert oracle.visible_rows(arena, target) == target.expected(expected.rows(KINDS[kind], expected.checkpoint))


def test_emptied_log_of_a_completed_checkpoint_is_an_alarm(arena: Arena) -> None:
    request = arena.case("write-ahead", Fault(Action.KILL, "checkpoint.completed", 1))
    arena.run(request)
    arena.store.execute("DELETE FROM etl.write_ahead_log")

    result = arena.again(request.without_faults())

    assert result is not None
    assert result.exit_code == STATE_ERROR
    assert result.error.startswith("LostRowsError: ")
    for part in ("appended", "checkpoint 1", "lost"):
        assert part in result.error
    assert oracle.visible_rows(arena, KINDS["write-ahead"].targets[0]) == Counter()
