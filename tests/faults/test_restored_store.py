"""The store is restored from a backup: with its targets the job goes on; a target that has more is never written to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.faults import oracle
from tests.faults.arena import Arena
from tests.faults.cases import Undisturbed
from tests.faults.fault import Action, Fault
from tests.faults.jobs import KINDS
from tests.support.databases import fresh_database

STATE_ERROR = 70
KILLED_AFTER_THE_FIRST = Fault(Action.KILL, "commit.end", 1)


@contextmanager
def backup(arena: Arena, server_url: str) -> Iterator[str]:
    """A copy of the store as it is now; yields its URL."""
    oracle.check_sessions_gone(arena.store)
    name = str(conninfo_to_dict(arena.store_url)["dbname"])
    # A database that is copied must have no sessions.
    arena.close()
    try:
        with fresh_database(server_url, template=name) as url:
            arena.reconnect()
            yield url
    finally:
        arena.reconnect()


ONE_DATABASE = sorted(name for name, kind in KINDS.items() if not any(target.other for target in kind.targets))


@pytest.mark.parametrize("kind", ONE_DATABASE)
def test_job_whose_store_and_targets_are_restored_goes_on(
    arena: Arena, undisturbed: Undisturbed, server_url: str, kind: str
) -> None:
    expected = undisturbed.state(kind)
    request = arena.case(kind, KILLED_AFTER_THE_FIRST)
    arena.run(request)
    with backup(arena, server_url) as url:
        arena.finish(request)
        oracle.check_done(arena, request, expected)
        former = arena.store_url
        arena.store_url = url
        arena.reconnect()
        try:
            arena.finish(replace(request, store_url=url))
            oracle.check_done(arena, replace(request, store_url=url), expected)
        finally:
            arena.store_url = former
            arena.close()


def test_target_with_more_than_the_restored_store_knows_is_refused(
    arena: Arena, undisturbed: Undisturbed, server_url: str
) -> None:
    expected = undisturbed.state("united")
    request = arena.case("united", KILLED_AFTER_THE_FIRST)
    arena.run(request)
    with backup(arena, server_url) as url:
        # With an attempt that is repeated: the fence is of a later epoch than the next one of the restored store.
        assert arena.again(replace(request, faults=(Fault(Action.CUT, "checkpoint.triggered", 1),))) is not None
        rows = oracle.visible_rows(arena, KINDS["united"].targets[0])
        told = []
        for _ in range(6):
            result = arena.again(replace(request, store_url=url, faults=()))
            assert result is not None
            assert result.exit_code == STATE_ERROR, result.trace
            assert result.count("source.batch") == 0
            assert oracle.visible_rows(arena, KINDS["united"].targets[0]) == rows
            told.append(result.error)
        assert "etl.fence of a database is ahead of the store, which gave out epoch 2 last" in told[0]
        assert f"the target has rows of checkpoint {expected.checkpoint}, and the store knows none after 1" in told[-1]
        oracle.check_done(arena, request, expected)
