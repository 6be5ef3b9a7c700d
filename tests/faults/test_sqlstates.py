"""Every class of error that a server can raise, at every kind of sink: repeated, or told and stopped; never in part."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.faults import oracle
from tests.faults.arena import Arena
from tests.faults.cases import THOROUGH, Undisturbed
from tests.faults.fault import Action, Fault
from tests.faults.jobs import KINDS
from tests.faults.refusals import SECRET, Place, has, raising, refusing
from tests.support.waiting import wait_until

REPEATED, CONFIGURATION, RECORD, UNREACHABLE, OTHER = 0, 2, 65, 69, 70

EXPECTED = {
    "08000": REPEATED,  # connection_exception
    "08006": REPEATED,  # connection_failure
    "08P01": REPEATED,  # protocol_violation: a proxy that lost its place
    "0A000": CONFIGURATION,  # feature_not_supported
    "21000": RECORD,  # cardinality_violation
    "22001": RECORD,  # string_data_right_truncation
    "22003": RECORD,  # numeric_value_out_of_range
    "22008": RECORD,  # datetime_field_overflow
    "22012": RECORD,  # division_by_zero
    "22021": RECORD,  # character_not_in_repertoire
    "22P02": RECORD,  # invalid_text_representation
    "23000": RECORD,  # integrity_constraint_violation
    "23502": RECORD,  # not_null_violation
    "23503": RECORD,  # foreign_key_violation
    "23505": RECORD,  # unique_violation
    "23514": RECORD,  # check_violation
    "23P01": RECORD,  # exclusion_violation
    "25006": REPEATED,  # read_only_sql_transaction: the server has become a standby
    "25P03": REPEATED,  # idle_in_transaction_session_timeout
    "25P04": REPEATED,  # transaction_timeout
    "28000": CONFIGURATION,  # invalid_authorization_specification
    "28P01": CONFIGURATION,  # invalid_password
    "2D000": OTHER,  # invalid_transaction_termination
    "3D000": CONFIGURATION,  # invalid_catalog_name
    "3F000": CONFIGURATION,  # invalid_schema_name
    "40000": REPEATED,  # transaction_rollback
    "40001": REPEATED,  # serialization_failure
    "40002": REPEATED,  # transaction_integrity_constraint_violation
    "40003": REPEATED,  # statement_completion_unknown
    "40P01": REPEATED,  # deadlock_detected
    "42501": CONFIGURATION,  # insufficient_privilege
    "42703": CONFIGURATION,  # undefined_column
    "42804": CONFIGURATION,  # datatype_mismatch
    "42P01": CONFIGURATION,  # undefined_table
    "42P10": CONFIGURATION,  # invalid_column_reference: no unique index for ON CONFLICT
    "44000": RECORD,  # with_check_option_violation
    "53000": REPEATED,  # insufficient_resources
    "53100": REPEATED,  # disk_full
    "53200": REPEATED,  # out_of_memory
    "53300": REPEATED,  # too_many_connections
    "53400": REPEATED,  # configuration_limit_exceeded
    "54000": RECORD,  # program_limit_exceeded: a row too large for an index
    "54001": OTHER,  # statement_too_complex: a trigger without end
    "55000": CONFIGURATION,  # object_not_in_prerequisite_state
    "55006": REPEATED,  # object_in_use
    "55P03": REPEATED,  # lock_not_available
    "57014": REPEATED,  # query_canceled, statement_timeout
    "57P01": REPEATED,  # admin_shutdown
    "57P02": REPEATED,  # crash_shutdown
    "57P03": REPEATED,  # cannot_connect_now
    "57P05": REPEATED,  # idle_session_timeout
    "58000": REPEATED,  # system_error
    "58030": REPEATED,  # io_error
    "72000": REPEATED,  # snapshot_too_old
    "F0000": OTHER,  # config_file_error
    "HV000": OTHER,  # fdw_error: a trigger that asks elsewhere
    "P0001": RECORD,  # raise_exception: a trigger refuses the row
    "P0004": RECORD,  # assert_failure
    "XX000": REPEATED,  # internal_error
    "XX001": REPEATED,  # data_corrupted
    "ZZ999": OTHER,  # nobody's
}
"""The exit code of a run to which it happens once; repeated ones go on by themselves."""

WIDE = {"22003", "40001"}
"""Tried at every place of every job; the others take turns."""


def combinations() -> list[tuple[str, Place, str]]:
    """Jobs, places and errors; all of them when the environment asks for it."""
    everywhere = [(kind, place) for kind in KINDS for place in Place if has(kind, place)]
    turns = itertools.cycle(everywhere)
    return [
        (kind, place, sqlstate)
        for sqlstate in EXPECTED
        for kind, place in (everywhere if THOROUGH or sqlstate in WIDE else [next(turns)])
        # No row of the user's is in the ledger.
        if place is not Place.LEDGER or EXPECTED[sqlstate] != RECORD
    ]


def expected_exit_code(place: Place, sqlstate: str) -> int:
    """What refuses a record in a target contradicts, in the store, what should be stored there."""
    exit_code = EXPECTED[sqlstate]
    return OTHER if exit_code == RECORD and place is Place.STORE else exit_code


@pytest.mark.parametrize("kind, place, sqlstate", combinations())
def test_error_is_repeated_or_told_and_only_whole_checkpoints_are_visible(
    arena: Arena, undisturbed: Undisturbed, kind: str, place: Place, sqlstate: str
) -> None:
    expected = undisturbed.state(kind)
    exit_code = expected_exit_code(place, sqlstate)
    request = arena.case(kind, restarts=3)
    with arena.told(request), refusing(arena, KINDS[kind].targets[0], place, raising(sqlstate)) as visits:
        result = arena.run(request)

        assert result is not None
        assert result.exit_code == exit_code, result.trace
        if exit_code == REPEATED:
            assert (result.restarts, visits()) == (1, 2)
            assert [warning.count(sqlstate) for warning in result.warnings if "restart" in warning] == [1]
        else:
            assert (result.restarts, visits()) == (0, 1)
            assert f": {sqlstate}: refused on purpose" in result.error
            assert SECRET not in result.error
            assert "\n" not in result.error
            oracle.check_interrupted(arena, request, expected)
            arena.finish(request)
        assert not any(SECRET in warning for warning in result.warnings)
        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize(
    "kind, sqlstate, exit_code",
    [
        ("transactional", "40001", OTHER),
        ("two-phase", "57P01", UNREACHABLE),
        ("write-ahead", "57014", OTHER),
        ("write-ahead", "57P01", UNREACHABLE),
        ("upsert", "40P01", OTHER),
    ],
)
def test_error_that_does_not_pass_ends_the_run_when_its_restarts_are_used_up(
    arena: Arena, undisturbed: Undisturbed, kind: str, sqlstate: str, exit_code: int
) -> None:
    expected = undisturbed.state(kind)
    request = arena.case(kind, restarts=2)
    target = KINDS[kind].targets[0]
    with arena.told(request), refusing(arena, target, Place.ROW, raising(sqlstate), times=3) as visits:
        result = arena.run(request)

        assert result is not None
        assert (result.exit_code, result.restarts, visits()) == (exit_code, 2, 3), result.trace
        assert f": {sqlstate}: refused on purpose" in result.error
        oracle.check_interrupted(arena, request, expected)
        arena.finish(request)
        oracle.check_done(arena, request, expected)


HELD = "held_by_somebody"
REAL = {
    "25006": "SET LOCAL transaction_read_only = on; CREATE TABLE public.never ();",
    "55P03": f"LOCK TABLE public.{HELD} NOWAIT;",
    "57014": "PERFORM pg_cancel_backend(pg_backend_pid()), pg_sleep(60);",
    "57P01": "PERFORM pg_terminate_backend(pg_backend_pid()), pg_sleep(60);",
    "22012": "PERFORM 1 / 0;",
    "42P01": "PERFORM count(*) FROM public.nowhere;",
    "54001": "PERFORM public.without_end();",
}
"""Statements by which the server comes to an error by itself, some of which end the session as well."""

SINGLE = ("write-ahead", "upsert", "transactional", "two-phase")


@pytest.fixture
def held(arena: Arena) -> Iterator[psycopg.Connection[Any]]:
    """A table that somebody has locked, and that session."""
    arena.store.execute(f"CREATE TABLE {HELD} (a int)")
    arena.store.execute(
        "CREATE FUNCTION public.without_end() RETURNS void LANGUAGE plpgsql"
        " AS $$ BEGIN PERFORM public.without_end(); END $$"
    )
    with psycopg.connect(arena.store_url) as holding:
        holding.execute(f"LOCK TABLE {HELD}")
        yield holding
    arena.store.execute(f"DROP TABLE {HELD}; DROP FUNCTION public.without_end()")


@pytest.mark.parametrize(
    "kind, sqlstate",
    list(itertools.product(SINGLE, REAL) if THOROUGH else zip(itertools.cycle(SINGLE), REAL, strict=False)),
)
@pytest.mark.usefixtures("held")
def test_real_error_is_repeated_or_told(arena: Arena, undisturbed: Undisturbed, kind: str, sqlstate: str) -> None:
    expected = undisturbed.state(kind)
    request = arena.case(kind, restarts=3)
    with arena.told(request), refusing(arena, KINDS[kind].targets[0], Place.ROW, REAL[sqlstate]) as visits:
        result = arena.run(request)

        assert result is not None
        assert result.exit_code == EXPECTED[sqlstate], result.trace
        # A sequence forgets what it gave to a session that was ended before its next write-ahead record.
        assert visits() >= 1
        if result.exit_code == REPEATED:
            assert result.restarts == 1
            assert any(f": {sqlstate}: " in warning for warning in result.warnings)
        else:
            assert f": {sqlstate}: " in result.error
            oracle.check_interrupted(arena, request, expected)
            arena.finish(request)
        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind", ["two-phase", "upsert"])
def test_real_deadlock_is_repeated(
    arena: Arena, undisturbed: Undisturbed, held: psycopg.Connection[Any], kind: str
) -> None:
    expected = undisturbed.state(kind)
    (target,) = KINDS[kind].targets
    request = arena.case(kind, Fault(Action.ASK, "sink.prepare.before", 2), restarts=3)
    body = f"LOCK TABLE public.{HELD} IN SHARE MODE;"
    with arena.told(request), refusing(arena, target, Place.COMMIT, body):
        run = arena.spawn(request)
        assert run.asked() is not None
        # The run finds the deadlock, not this session.
        held.execute("SET deadlock_timeout = '1h'")
        held.pgconn.send_query(f"LOCK TABLE {target.table}".encode())
        await_rows(arena, "SELECT FROM pg_locks WHERE pid = %s AND NOT granted", held.info.backend_pid)
        run.answer()
        # Granted when the run's transaction has been given up.
        assert held.pgconn.get_result() is not None
        assert held.pgconn.get_result() is None
        held.rollback()
        result = run.end(restarts=1)

        assert any(": 40P01: " in warning for warning in result.warnings)
        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind", ["two-phase", "upsert"])
def test_session_ended_for_being_idle_is_repeated(arena: Arena, undisturbed: Undisturbed, kind: str) -> None:
    expected = undisturbed.state(kind)
    request = arena.case(kind, Fault(Action.ASK, "sink.prepare.before", 2), restarts=3)
    body = "PERFORM set_config('idle_in_transaction_session_timeout', '1s', true);"
    with arena.told(request), refusing(arena, KINDS[kind].targets[0], Place.ROW, body):
        run = arena.spawn(request)
        assert run.asked() is not None
        writing = "application_name ~ '^etl:[^:]+:[0-9]+:.*:writer$' AND datname = current_database()"
        await_rows(arena, f"SELECT WHERE NOT EXISTS (SELECT FROM pg_stat_activity WHERE {writing})")
        run.answer()
        result = run.end(restarts=1)

        # The server's last words are lost when the connection is found closed before they are read.
        assert any('sink "' in warning for warning in result.warnings)
        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind", ["transactional", "two-phase", "write-ahead", "upsert"])
def test_too_many_connections_are_waited_for(arena: Arena, undisturbed: Undisturbed, ordinary: str, kind: str) -> None:
    expected = undisturbed.state(kind)
    faults = (Fault(Action.ASK, "lease.claimed"), Fault(Action.ASK, "attempt.restarting", 2))
    request = arena.case(kind, *faults, restarts=5)
    store, other = (
        make_conninfo(url, user=ordinary, password=ordinary) for url in (request.store_url, request.other_url)
    )
    limit = sql.SQL("ALTER ROLE {} CONNECTION LIMIT {}")
    with arena.told(request):
        run = arena.spawn(replace(request, store_url=store, other_url=other))
        assert run.asked() == "lease.claimed"
        arena.store.execute(limit.format(sql.Identifier(ordinary), 1))
        run.answer()
        assert run.asked() == "attempt.restarting"
        arena.store.execute(limit.format(sql.Identifier(ordinary), -1))
        run.answer()
        result = run.end(restarts=2)

        assert sum("too many connections" in warning for warning in result.warnings) == 2
        oracle.check_done(arena, request, expected)


def await_rows(arena: Arena, query: LiteralString, *parameters: object) -> None:
    """Wait until the query yields a row."""
    wait_until(lambda: arena.store.execute(query, parameters).fetchall(), query)
