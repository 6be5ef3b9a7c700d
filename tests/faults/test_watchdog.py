"""Bytes are confirmed and never delivered, or the server stands still: a run goes on by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from threading import Thread

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from etl.store.database import Database
from etl.store.watchdog import Watchdog
from tests.faults import oracle
from tests.faults.arena import Arena, Connection
from tests.faults.cases import SAMPLED, THOROUGH, Undisturbed, asking
from tests.faults.crashing import CrashingServer
from tests.faults.fault import Action, Fault
from tests.faults.wire import Wire, over
from tests.support.waiting import wait_until

PATIENCE_S = 0.5
WORK_S = 4 * PATIENCE_S


@pytest.fixture
def watched(arena: Arena, wire: Wire) -> Iterator[Connection]:
    """A session over the wire that a watchdog looks after."""
    with Watchdog(PATIENCE_S) as watchdog:
        # The kernel would give up by itself where it can.
        url = make_conninfo(arena.store_url, tcp_user_timeout=60_000)
        database = Database(wire.conninfo(url), "store").for_run(60.0, watchdog)
        with closing(database.connect("etl:watched")) as session:
            yield session


def test_session_whose_answer_was_lost_is_cut(watched: Connection, wire: Wire) -> None:
    wire.swallow()

    with pytest.raises(
        psycopg.OperationalError, match=r"no answer .* to session etl:watched for \d+ s, and it is not at work on it"
    ):
        watched.execute("SELECT 1")

    assert watched.broken


def test_session_in_the_middle_of_a_copy_is_cut(watched: Connection, wire: Wire) -> None:
    watched.execute("CREATE TEMPORARY TABLE t (a text)")
    with watched.cursor() as cursor:
        unread = "no answer .* it does not answer new connections either"
        with pytest.raises(psycopg.OperationalError, match=unread), cursor.copy("COPY t FROM STDIN") as copy:
            wire.stall()
            while True:
                copy.write("more\n" * 10_000)


def test_session_is_cut_when_the_server_cannot_be_asked(watched: Connection, wire: Wire) -> None:
    wire.stall()

    with pytest.raises(psycopg.OperationalError, match="it does not answer new connections either"):
        watched.execute("SELECT 1")


def test_session_at_work_is_waited_for(watched: Connection) -> None:
    row = watched.execute("SELECT 1 FROM pg_sleep(%s)", [WORK_S]).fetchone()

    assert row == (1,)


def test_session_that_waits_for_a_lock_is_waited_for(watched: Connection, arena: Arena) -> None:
    arena.store.execute("SELECT pg_advisory_lock(1)")
    waiting = Thread(target=watched.execute, args=["SELECT pg_advisory_lock(1)"])
    waiting.start()
    patient = "SELECT FROM pg_stat_activity WHERE application_name = 'etl:watched' AND wait_event = 'advisory'"
    wait_until(
        lambda: arena.store.execute(f"{patient} AND clock_timestamp() > state_change + interval '{WORK_S} s'").rowcount,
        "a session that has waited for long",
    )
    arena.store.execute("SELECT pg_advisory_unlock(1)")
    waiting.join()

    assert watched.execute("SELECT pg_advisory_unlock(1)").fetchone() == (True,)


def test_session_of_another_role_is_given_the_benefit_of_the_doubt(arena: Arena, ordinary: str, wire: Wire) -> None:
    url = make_conninfo(arena.store_url, options=f"-c role={ordinary}")
    with Watchdog(PATIENCE_S) as watchdog:
        database = Database(wire.conninfo(url), "store").for_run(60.0, watchdog)
        with closing(database.connect("etl:watched")) as session:
            assert session.execute("SELECT 1 FROM pg_sleep(%s)", [WORK_S]).fetchone() == (1,)


def test_session_is_waited_for_when_the_server_refuses_to_be_asked(arena: Arena, ordinary: str, wire: Wire) -> None:
    arena.store.execute(sql.SQL("ALTER ROLE {} CONNECTION LIMIT 1").format(sql.Identifier(ordinary)))
    url = make_conninfo(arena.store_url, user=ordinary, password=ordinary)
    with Watchdog(PATIENCE_S) as watchdog:
        database = Database(wire.conninfo(url), "store").for_run(60.0, watchdog)
        with closing(database.connect("etl:watched")) as session:
            with pytest.raises(psycopg.OperationalError, match="too many connections for role"):
                psycopg.connect(url)
            assert session.execute("SELECT 1 FROM pg_sleep(%s)", [WORK_S]).fetchone() == (1,)


@pytest.mark.parametrize("kind, step", SAMPLED if THOROUGH else SAMPLED[::6])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_run_goes_on_by_itself_when_bytes_are_confirmed_and_not_delivered(
    arena: Arena, undisturbed: Undisturbed, wire: Wire, kind: str, step: str, *, all_of_them: bool
) -> None:
    expected = undisturbed.state(kind)
    request = replace(asking(arena, undisturbed, kind, step), owner_timeout_s=PATIENCE_S)
    # Besides the sampled step it asks when it has given its connections up.
    request = replace(request, faults=(*request.faults, Fault(Action.ASK, "attempt.restarting", 1)))
    with arena.told(request):
        run = arena.spawn(over(wire, request))
        assert run.asked() == step
        wire.swallow()
        if all_of_them:
            wire.stall()
        run.answer()
        assert run.asked() == "attempt.restarting"
        wire.go_on()
        run.answer()
        run.end()

        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind, step", SAMPLED if THOROUGH else SAMPLED[2::12])
def test_run_goes_on_by_itself_when_the_server_stands_still_for_a_while(
    crashing_server: CrashingServer, crash_arena: Arena, undisturbed: Undisturbed, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind)
    request = replace(asking(crash_arena, undisturbed, kind, step), owner_timeout_s=PATIENCE_S)
    request = replace(request, faults=(*request.faults, Fault(Action.ASK, "attempt.restarting", 1)))
    request = replace(
        request,
        store_url=make_conninfo(request.store_url, connect_timeout=2),
        other_url=make_conninfo(request.other_url, connect_timeout=2),
    )
    with crash_arena.told(request):
        run = crash_arena.spawn(request)
        assert run.asked() == step
        with crashing_server.standing_still():
            run.answer()
            assert run.asked() == "attempt.restarting"
        run.answer()
        run.end()

        oracle.check_done(crash_arena, request, expected)
