"""Findings about the server itself, which need a server of their own: prepared transactions, read-only databases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from etl.errors import Finding
from etl.store.embedded import EmbeddedServer
from etl.store.migrations import upgrade
from sinks import PostgresTable, TransactionalSink, TwoPhaseCommitSink, UpsertSink
from tests.support.embedded import state_directory
from tests.support_sinks.stage import Stage

TWO_PHASE = TwoPhaseCommitSink(PostgresTable("out"))


@contextmanager
def stage_on_server(max_prepared_transactions: int) -> Iterator[Stage]:
    settings = {"fsync": "off", "max_prepared_transactions": str(max_prepared_transactions)}
    with state_directory() as directory, EmbeddedServer(directory, settings) as url:
        upgrade(url)
        stage = Stage(url)
        stage.admin.execute("CREATE TABLE public.out (id int8 PRIMARY KEY, note text)")
        yield stage
        stage.close()


def two_phase_findings(stage: Stage) -> list[Finding]:
    return list(TWO_PHASE.preflight(stage.preflight_context(60.0)))


def test_preflight_finds_that_prepared_transactions_are_off() -> None:
    with stage_on_server(0) as stage:
        (finding,) = two_phase_findings(stage)
        assert finding.problem == "max_prepared_transactions is 0, the server's default: two-phase commit is off"
        assert "ALTER SYSTEM SET max_prepared_transactions = 64" in finding.cure
        assert list(TransactionalSink(PostgresTable("out")).preflight(stage.preflight_context(60.0))) == []


def test_preflight_finds_that_all_prepared_transactions_are_in_use_by_others() -> None:
    with stage_on_server(1) as stage:
        for gid, expected in (("etl:0123456789abcdef:1:1:1:0", 0), ("somebody:else", 1)):
            stage.admin.execute("BEGIN")
            stage.admin.execute("INSERT INTO out VALUES (1, 'x')")
            stage.admin.execute(f"PREPARE TRANSACTION '{gid}'")
            assert len(two_phase_findings(stage)) == expected
            stage.admin.execute(f"ROLLBACK PREPARED '{gid}'")


def test_preflight_finds_a_read_only_database(stage: Stage) -> None:
    name = stage.admin.info.dbname
    stage.admin.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    (finding,) = two_phase_findings(stage)
    assert finding.problem == "default_transaction_read_only is on"


@pytest.mark.parametrize(
    ("table", "found"),
    [
        (PostgresTable("out", key=["id"], version="note"), True),
        (PostgresTable("out", key=["id"]), False),
    ],
    ids=["versions", "counted"],
)
def test_preflight_finds_a_trigger_where_dropped_rows_would_not_be_noticed(
    stage: Stage, table: PostgresTable, found: bool
) -> None:
    stage.admin.execute(
        "CREATE FUNCTION drop_row() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;"
        " CREATE TRIGGER a BEFORE INSERT ON out FOR EACH ROW EXECUTE FUNCTION drop_row();"
        " CREATE TRIGGER b AFTER INSERT ON out FOR EACH ROW EXECUTE FUNCTION drop_row()"
    )
    findings = list(UpsertSink(table).preflight(stage.preflight_context(60.0)))
    assert [finding.cure for finding in findings] == (
        ['ALTER TABLE "public"."out" DISABLE TRIGGER "a";'] if found else []
    )


def test_refusal_of_a_server_without_prepared_transactions_is_what_preflight_foresees() -> None:
    with stage_on_server(0) as stage:
        stage.admin.execute("BEGIN")
        stage.admin.execute("INSERT INTO out VALUES (1, 'x')")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="prepared transactions are disabled"):
            stage.admin.execute("PREPARE TRANSACTION 'etl:x'")
