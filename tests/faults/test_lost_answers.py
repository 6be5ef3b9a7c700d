"""A statement that ends a transaction, or the answer to it, is lost, and the connection with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults import oracle
from tests.faults.arena import Arena
from tests.faults.cases import THOROUGH, Undisturbed, occurrences
from tests.faults.jobs import KINDS
from tests.faults.proxy import Incident, Loss, proxied

UNREACHABLE = 69
STATEMENTS = ("COMMIT", "PREPARE TRANSACTION", "COMMIT PREPARED", "UPDATE etl.head SET epoch")
PREPARING = {kind for kind in KINDS if kind.startswith("two-phase") or kind == "united"}
COMBINATIONS = [
    (kind, statement, loss)
    for loss in Loss
    for statement in STATEMENTS
    for kind in (KINDS if loss is Loss.ANSWER or THOROUGH else ("transactional", "two-phase"))
    if kind in PREPARING or "PREPARE" not in statement
]


@pytest.mark.parametrize("kind, statement, loss", COMBINATIONS)
def test_lost_statement_or_answer_changes_nothing(
    arena: Arena, undisturbed: Undisturbed, kind: str, statement: str, loss: Loss
) -> None:
    expected = undisturbed.state(kind)
    for occurrence in occurrences():
        request = arena.case(kind)
        incident = Incident(statement, occurrence, loss)
        with arena.told(request, incident), proxied(arena.store_url, incident) as proxy:
            store, other = proxy.conninfo(arena.store_url), proxy.conninfo(arena.other_url)
            result = arena.run(replace(request, store_url=store, other_url=other))
            if proxy.seen < occurrence:
                assert occurrence > 1, "the statement was never seen"
                return
            assert result is not None
            if result.exit_code == UNREACHABLE:
                # Before the job is claimed nothing is repeated: there is nothing yet that could be lost.
                assert result.count("lease.claimed") == 0
                arena.finish(request)
            else:
                assert result.exit_code == 0, result.trace
                # A fast server's answer may slip through before the connection is cut: nothing was lost then.
                assert result.restarts in ({0, 1} if loss is Loss.CONNECTION else {1})
            oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("statement", ["INSERT INTO etl.run", "COMMIT"])
def test_run_is_recorded_once_whatever_answer_is_lost(arena: Arena, undisturbed: Undisturbed, statement: str) -> None:
    expected = undisturbed.state("transactional")
    for occurrence in occurrences():
        request = arena.case("transactional")
        incident = Incident(statement, occurrence, Loss.ANSWER)
        with arena.told(request, incident), proxied(arena.store_url, incident) as proxy:
            result = arena.again(replace(request, store_url=proxy.conninfo(arena.store_url)))
            if proxy.seen < occurrence:
                assert occurrence > 1, "the statement was never seen"
                return
            assert result is not None
            if result.exit_code == UNREACHABLE:
                result = arena.finish(request)
            state = oracle.check_done(arena, request, expected)
            recorded = arena.store.execute(
                "SELECT status, rows_read, error FROM etl.run WHERE job_id = %s", [state.job_id]
            ).fetchall()
            assert recorded == [("succeeded", result.rows_read, None)]
