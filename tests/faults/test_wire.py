"""The network falls silent, stalls, is slow, resets or refuses connections: what comes of it is exact, and in time."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
from psycopg.conninfo import make_conninfo

from etl.store.database import Database
from tests.faults import oracle
from tests.faults.arena import Arena, Connection
from tests.faults.cases import SAMPLED, THOROUGH, Undisturbed, asking, occurrences
from tests.faults.fault import Action, Fault
from tests.faults.jobs import KINDS
from tests.faults.proxy import COPY_DATA, Incident, Loss, proxied
from tests.faults.wire import TIMEOUTS, Wire, over, tcp_url
from tests.support.waiting import wait_until

UNREACHABLE = 69
FENCED = 78
NOTICED_WITHIN_S = 5.0
"""Keepalives and new connections give up after two seconds, unconfirmed bytes after one."""

BOUND_S = 20.0
"""A silence is noticed, threads that were stuck in it are given up, and the rest takes a second."""

EARLY = {"recovery.settled", "source.batch"}


def sampled(offset: int) -> list[tuple[str, str]]:
    """All cases, or every tenth of them; others for another offset."""
    return [case for number, case in enumerate(SAMPLED) if THOROUGH or number % 10 == offset]


@pytest.mark.parametrize("kind, step", sampled(0))
def test_run_goes_on_by_itself_when_its_connections_fall_silent(
    arena: Arena, undisturbed: Undisturbed, wire: Wire, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind)
    request = asking(arena, undisturbed, kind, step)
    with arena.told(request):
        run = arena.spawn(over(wire, request))
        assert run.asked() == step
        wire.silence()
        started_s = time.monotonic()
        run.answer()
        result = run.end()

        # Early on only the owner's session is open: the run may be at its end before that one is missed.
        assert result.restarts >= (step not in EARLY)
        assert time.monotonic() - started_s < BOUND_S
        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind, step", sampled(1))
def test_run_goes_on_by_itself_after_an_outage(
    arena: Arena, undisturbed: Undisturbed, wire: Wire, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind)
    request = asking(arena, undisturbed, kind, step)
    # Besides the sampled step it asks when it has given its connections up, and a new one was not answered.
    request = replace(request, faults=(*request.faults, Fault(Action.ASK, "attempt.restarting", 2)))
    with arena.told(request):
        run = arena.spawn(over(wire, request))
        assert run.asked() == step
        wire.isolate()
        run.answer()
        assert run.asked() == "attempt.restarting"
        wire.recover()
        started_s = time.monotonic()
        run.answer()
        result = run.end()

        assert result.restarts >= 2
        assert time.monotonic() - started_s < BOUND_S
        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind, step", sampled(2))
def test_run_goes_on_by_itself_when_the_server_refuses_for_a_while(
    arena: Arena, undisturbed: Undisturbed, wire: Wire, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind)
    request = asking(arena, undisturbed, kind, step)
    request = replace(request, faults=(*request.faults, Fault(Action.ASK, "attempt.restarting", 4)))
    with arena.told(request):
        run = arena.spawn(over(wire, request))
        assert run.asked() == step
        wire.refuse()
        run.answer()
        assert run.asked() == "attempt.restarting"
        wire.admit()
        run.answer()
        result = run.end()

        assert result.restarts >= 4
        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind", KINDS if THOROUGH else ["united"])
def test_run_that_cannot_connect_ends_and_touches_nothing(
    arena: Arena, undisturbed: Undisturbed, wire: Wire, kind: str
) -> None:
    expected = undisturbed.state(kind)
    request = arena.case(kind)
    with arena.told(request):
        for close, reopen in ((wire.refuse, wire.admit), (wire.isolate, wire.recover)):
            close()
            started_s = time.monotonic()
            result = arena.run(over(wire, request))
            reopen()

            assert result is not None
            assert result.exit_code == UNREACHABLE, result.trace
            assert result.count("lease.claiming") == 0
            assert time.monotonic() - started_s < NOTICED_WITHIN_S
            assert oracle.read_state(arena.store, request.job).job_id == ""
        arena.finish(over(wire, request))
        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind, step", sampled(3))
@pytest.mark.parametrize("confirmed", [True, False])
def test_run_waits_when_nothing_comes_through_for_a_while(
    arena: Arena, undisturbed: Undisturbed, wire: Wire, kind: str, step: str, *, confirmed: bool
) -> None:
    expected = undisturbed.state(kind)
    request = asking(arena, undisturbed, kind, step)
    with arena.told(request):
        patient = [make_conninfo(url, connect_timeout=10) for url in (request.store_url, request.other_url)]
        run = arena.spawn(over(wire, replace(request, store_url=patient[0], other_url=patient[1])))
        assert run.asked() == step
        # A peer that confirms what it gets may take its time; one that does not is given up after a second.
        stop, resume, lasting_s = (wire.stall, wire.go_on, 4.0) if confirmed else (wire.lose_packets, wire.recover, 0.3)
        stop()
        run.answer()
        # Not waiting for anything: how long it lasts is what is tried.
        time.sleep(lasting_s)
        resume()
        run.end(restarts=0)

        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind", KINDS if THOROUGH else ["transactional", "united"])
def test_run_over_a_slow_wire_differs_in_nothing(arena: Arena, undisturbed: Undisturbed, wire: Wire, kind: str) -> None:
    expected = undisturbed.state(kind)
    request = arena.case(kind)
    with arena.told(request):
        # Also tears every message apart.
        wire.slow_down(piece_bytes=61, pause_s=0.0005)
        result = arena.run(over(wire, request))

        assert result is not None
        assert (result.exit_code, result.restarts) == (0, 0), result.trace
        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind", KINDS if THOROUGH else ["transactional", "two-phase", "upsert"])
def test_reset_in_the_middle_of_a_copy_changes_nothing(arena: Arena, undisturbed: Undisturbed, kind: str) -> None:
    expected = undisturbed.state(kind)
    for occurrence in occurrences():
        request = arena.case(kind)
        incident = Incident(COPY_DATA, occurrence, Loss.HALF)
        with arena.told(request, incident), proxied(tcp_url(arena.store_url, arena.store), incident) as proxy:
            store, other = proxy.conninfo(arena.store_url), proxy.conninfo(arena.other_url)
            result = arena.run(replace(request, store_url=store, other_url=other))
            if proxy.seen < occurrence:
                assert occurrence > 1, "no rows were ever sent by COPY"
                return
            assert result is not None
            assert (result.exit_code, result.restarts) == (0, 1), result.trace
            oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind, step", sampled(1))
def test_server_frees_what_a_vanished_machine_held(
    arena: Arena, undisturbed: Undisturbed, wire: Wire, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind)
    request = asking(arena, undisturbed, kind, step)
    with arena.told(request):
        run = arena.spawn(over(wire, request))
        assert run.asked() == step
        wire.silence()
        os.kill(run.pid, signal.SIGKILL)
        assert run.wait() is None
        assert holding(arena.store) != [], "nothing was held"

        wait_until(
            lambda: not [*holding(arena.store), *holding(arena.other)], "the end of what was held", NOTICED_WITHIN_S
        )
        oracle.check_interrupted(arena, request, expected)
        arena.finish(request)
        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind, step", sampled(3))
def test_cut_off_run_is_replaced_and_finds_itself_fenced(
    arena: Arena, undisturbed: Undisturbed, wire: Wire, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind)
    request = asking(arena, undisturbed, kind, step)
    request = replace(request, faults=(*request.faults, Fault(Action.ASK, "attempt.restarting", 2)))
    with arena.told(request):
        cut_off = arena.spawn(over(wire, request))
        assert cut_off.asked() == step
        wire.isolate()
        cut_off.answer()
        assert cut_off.asked() == "attempt.restarting"

        arena.finish(replace(request, owner_timeout_s=1.0))

        state = oracle.check_done(arena, request, expected)
        wire.recover()
        cut_off.answer()
        cut_off.end(FENCED)
        assert oracle.check_done(arena, request, expected) == state


def holding(connection: Connection) -> list[str]:
    """Sessions that hold the job or a lock; one that was just being opened does neither and has no timeouts yet."""
    rows = connection.execute(
        "SELECT application_name FROM pg_stat_activity a WHERE datname = current_database()"
        " AND starts_with(application_name, 'etl:') AND (application_name LIKE '%:owner'"
        " OR EXISTS (SELECT FROM pg_locks l WHERE l.pid = a.pid))"
    )
    return [name for (name,) in rows]


def test_timeouts_of_the_url_hold_on_both_sides(arena: Arena) -> None:
    url = make_conninfo(tcp_url(arena.store_url, arena.store), **TIMEOUTS)
    with Database(url, "store").connect("test") as connection:
        client = {key: value for key, value in connection.info.get_parameters().items() if key in TIMEOUTS}

        assert client == {key: str(value) for key, value in TIMEOUTS.items()}
        assert server_side(connection) == ("1", "1", "1", "1000")


def test_dead_peer_is_noticed_within_half_a_minute_unless_the_url_says_otherwise(arena: Arena) -> None:
    with Database(tcp_url(arena.store_url, arena.store), "store").connect("test") as connection:
        assert server_side(connection) == ("10", "5", "3", "30000")


def server_side(connection: Connection) -> tuple[str, ...]:
    shown = connection.execute(
        "SELECT current_setting('tcp_keepalives_idle'), current_setting('tcp_keepalives_interval'),"
        " current_setting('tcp_keepalives_count'), current_setting('tcp_user_timeout')"
    ).fetchone()
    assert shown is not None
    return tuple(shown)
