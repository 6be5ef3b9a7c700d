"""Two runs of a job in each other's way: a table of where the first one stands while the second one gets how far.

What the second one can reach is decided by what the first one holds where it stands. Nothing but the epoch keeps them
apart: the second may not end the first one's sessions, and the first has no heartbeat that would tell it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.faults import jobs, oracle
from tests.faults.arena import Arena
from tests.faults.cases import THOROUGH, Undisturbed
from tests.faults.fault import Action, Fault
from tests.faults.schedules import FENCED, Met, Stage
from tests.faults.steps import STEPS

KINDS = ("transactional", "two-phase", "write-ahead", "upsert", "united")
DEFAULT_COUNT = 16

ORDER = (
    "lease.claimed",
    "recovery.sessions_ended",
    "recovery.settled",
    "recovery.fenced",
    "recovery.verified",
    "source.batch",
    "sink.begun",
    "sink.fenced",
    "sink.written",
    "sink.prepare.before",
    "sink.prepared",
    "sink.acknowledging",
    "checkpoint.completing",
    "checkpoint.head_advanced",
    "checkpoint.recorded",
    "checkpoint.completed",
    "commit.before",
    "commit.delivered",
    "commit.after",
    "commit.end",
    "run.ending",
)
"""The way of a run."""

HOLDING_NOTHING = {*ORDER[:5], "sink.begun", "sink.prepared", "sink.acknowledging"}
"""Where a first run holds no lock; a unit that it has prepared is settled by the second."""

HOLDING_THE_HEAD = {"checkpoint.head_advanced", "checkpoint.recorded"}
"""Where nobody can claim the job. Everywhere else a first run holds the fence, if only for the next checkpoint."""

BEFORE_THE_FENCE = ORDER[:3]
OUTDATED_AT = ("sink.prepared", "checkpoint.completing")
"""Where a first run is killed that has been outdated: it gets no further."""

KILLED_UNDER = {*BEFORE_THE_FENCE, "recovery.fenced", "sink.prepared", "checkpoint.head_advanced"}
"""Where the second one is then: beyond that, nothing that the first one does makes any difference to it."""

NOT_OUTDATED_AT = ("checkpoint.completed", "commit.before", "commit.delivered", "commit.end")
"""Where one is killed that nobody has replaced yet."""


def meetings(kind: str) -> Iterator[Met]:
    """All meetings of a job."""
    steps = [step for step in ORDER if step in STEPS[kind] and step != "run.ending"]
    for first in steps:
        if first not in HOLDING_THE_HEAD:
            for second in seconds(kind, first):
                for killed in (None, *(later(first, OUTDATED_AT) if second in KILLED_UNDER else ())):
                    yield Met(at(first), (second, 1), (killed, at(first)[1]) if killed else None)
        for killed in later(first, NOT_OUTDATED_AT):
            if killed in steps:
                yield Met(at(first), ("lease.claiming", 1), (killed, 2))


def seconds(kind: str, first: str) -> list[str]:
    """Where the second run may come to while the first one stands there."""
    # The transaction of transactional sinks is open from the first row until the checkpoint has completed.
    free = first in HOLDING_NOTHING and not (kind == "transactional" and first.startswith("sink."))
    return [step for step in (ORDER if free else BEFORE_THE_FENCE) if step in STEPS[kind]]


def later(first: str, steps: Sequence[str]) -> list[str]:
    """Those of the steps that come after the first one's."""
    return [step for step in steps if ORDER.index(step) > ORDER.index(first)]


def at(step: str) -> tuple[str, int]:
    """The step in the middle of a run."""
    return step, 1 if step.startswith(("lease.", "recovery.")) else 2


STANDING = ("recovery.verified", "sink.prepared", "commit.begin")
"""Where the first of three runs stands."""

ALL = [(kind, met) for kind in KINDS for met in meetings(kind)]


def spread(table: Sequence[tuple[str, Met]]) -> list[tuple[str, Met]]:
    """All of it when the environment asks for that, else some from everywhere."""
    return list(table if THOROUGH else table[:: len(table) // DEFAULT_COUNT])


def name(value: object) -> str | None:
    """How a case is called."""
    if not isinstance(value, Met):
        return None
    killed = f"-killed-at-{value.killed[0]}" if value.killed else ""
    return f"{value.first[0]}-{value.second[0]}{killed}"


@pytest.fixture
def settler(arena: Arena, stranger: str) -> str:
    """A stranger who may finish what another role has prepared, which otherwise is up to a job's one role."""
    try:
        arena.store.execute(sql.SQL("ALTER ROLE {} SUPERUSER").format(sql.Identifier(stranger)))
    except psycopg.errors.InsufficientPrivilege:
        pytest.skip("needs a superuser")
    return stranger


@pytest.mark.parametrize("kind, met", spread(ALL), ids=name)
def test_two_runs_that_meet_leave_what_one_would_have(
    arena: Arena, undisturbed: Undisturbed, settler: str, kind: str, met: Met
) -> None:
    Stage(arena, settler).play(met, kind, undisturbed.state(kind))


def test_run_that_is_outdated_before_it_has_begun_leaves_the_records_alone(
    arena: Arena, undisturbed: Undisturbed, settler: str
) -> None:
    met = Met(("lease.claimed", 1), ("run.ending", 1))
    Stage(arena, settler).play(met, "transactional", undisturbed.state("transactional"))

    records = arena.store.execute(
        "SELECT status FROM etl.run WHERE job_id = (SELECT job_id FROM etl.run ORDER BY run_id DESC LIMIT 1)"
    ).fetchall()

    assert records == [("succeeded",)]


@pytest.mark.parametrize("kind", KINDS if THOROUGH else ["two-phase", "united"])
@pytest.mark.parametrize("step", STANDING if THOROUGH else STANDING[-1:])
def test_two_outdated_runs_change_nothing_when_they_go_on(
    arena: Arena, undisturbed: Undisturbed, settler: str, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind)
    request = arena.case(kind, Fault(Action.ASK, *at(step)), heartbeat=False)
    with arena.told(request):
        first = arena.spawn(request)
        assert first.asked() is not None
        # The second one has settled what the first one left, when it is overtaken by the third.
        store, other = (
            make_conninfo(url, user=settler, password=settler) for url in (request.store_url, request.other_url)
        )
        waiting = replace(request, faults=(Fault(Action.ASK, "recovery.settled"),), owner_timeout_s=1.0)
        second = arena.spawn(replace(waiting, store_url=store, other_url=other))
        assert second.asked() is not None

        arena.finish(replace(request, owner_timeout_s=1.0, heartbeat=True))

        state = oracle.read_state(arena.store, request.job)
        rows = {target: oracle.visible_rows(arena, target) for target in jobs.KINDS[kind].targets}
        for outdated in (second, first):
            outdated.answer()
            outdated.end(FENCED)
        assert {target: oracle.visible_rows(arena, target) for target in rows} == rows
        assert oracle.check_done(arena, request, expected) == state
