"""The crash test of a user's job: what is wrong is found, what is right is not blamed, what is real is not touched."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from etl.store import tables
from tests.cli.conftest import TIMEOUT_S, Project, started
from tests.support.databases import fresh_database

Connection = psycopg.Connection[Any]

JOB = """
import uuid
from datetime import datetime

import polars as pl

from etl import CheckpointMode, CheckpointPolicy, Job
from etl.sources import CsvFiles
from sinks import ParquetFiles, PostgresTable, TransactionalSink, TwoPhaseCommitSink, UpsertSink, WriteAheadSink

COLUMNS = {{"id": "int8", "name": "text"}}
job = Job("people", checkpoint=CheckpointPolicy(rows=2){mode})
people = job.read("people_csv", CsvFiles("people/*.csv", COLUMNS, batch_rows=1))
{body}
"""
APPEND = 'people.write("people", TwoPhaseCommitSink(PostgresTable("people", create=True)))'
NAMES = ("Ada", "Grace", "Edsger", "Barbara", "Tony", "Donald", "Frances")
SECRET = "Barbara"


@pytest.fixture
def people(stored: Project, tmp_path: Path) -> Project:
    """A project with seven people in a file, and a directory of its own for temporary files."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    stored = Project(stored.dir, {**stored.environ, "TMPDIR": str(temporary)})
    lines = ["id,name", *(f"{number},{name}" for number, name in enumerate(NAMES, start=1))]
    stored.write("people/all.csv", "".join(f"{line}\n" for line in lines))
    return stored


def declare(project: Project, body: str = APPEND, mode: str = "") -> None:
    """Write ``jobs/people.py``."""
    project.write("jobs/people.py", JOB.format(body=body, mode=f", mode=CheckpointMode.{mode}" if mode else ""))


def chaos(project: Project, *options: str, code: int = 0, job: str = "jobs.people") -> dict[str, Any]:
    """The report of a crash test with this exit code."""
    done = project.etl("chaos", job, "--json", "--quiet", *options)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr == ""
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def results(report: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The cells by step and sink."""
    return {row["step"]: {uid: cell["result"] for uid, cell in row["sinks"].items()} for row in report["steps"]}


def url_of(project: Project) -> str:
    return project.environ["ETL_DATABASE_URL"]


def assert_nothing_left(project: Project, url: str | None = None) -> None:
    """No scratch schema, no job, no prepared transaction, no row of another job in schema etl, no directory."""
    url = url or url_of(project)
    with psycopg.connect(url, autocommit=True) as connection:
        schemas = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, 'etl_chaos_')"
        assert connection.execute(schemas).fetchall() == []
        assert connection.execute("SELECT name FROM etl.job WHERE starts_with(name, 'etl chaos ')").fetchall() == []
        known = sql.SQL("SELECT count(*) FROM {} WHERE job_id NOT IN (SELECT job_id FROM etl.job)")
        for table in tables.metadata.sorted_tables:
            assert connection.execute(known.format(sql.Identifier("etl", table.name))).fetchone() == (0,), table.name
        prepared = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        assert connection.execute(prepared).fetchall() == []
    assert list(Path(project.environ["TMPDIR"]).glob("etl-chaos-*")) == []


# --- jobs that are right ----------------------------------------------------------------------------------------------


def test_job_with_every_kind_of_sink_is_exact_at_every_step(people: Project) -> None:
    declare(
        people,
        """
people.write("appended", TwoPhaseCommitSink(PostgresTable("appended", create=True)))
people.write("logged", WriteAheadSink(PostgresTable("logged", create=True)))
people.write("direct", TransactionalSink(PostgresTable("direct", create=True)))
people.write("by_key", UpsertSink(PostgresTable("by_key", key=["id"], create=True)))
people.write("files", ParquetFiles("people_files"))
""",
    )
    steps = ("source.batch", "sink.prepared", "checkpoint.recorded", "checkpoint.completed", "commit.after")

    report = chaos(people, "--occurrences", "1", *(word for step in steps for word in ("--step", step)))

    assert report["status"] == "ok"
    assert report["sinks"] == {
        uid: {"rows": 7, "promised": "exactly-once in the end" if uid == "by_key" else "exactly-once"}
        for uid in ("appended", "logged", "direct", "by_key", "files")
    }
    assert set(results(report)) == set(steps)
    assert all(cell == "ok" for row in results(report).values() for cell in row.values())
    assert (report["kills"], report["untried"], report["rows_read"], report["checkpoints"]) == (11, 0, 7, 4)
    assert not (people.dir / "people_files").exists()
    assert_nothing_left(people)


def test_job_is_killed_at_every_step_that_it_takes(people: Project) -> None:
    declare(people)

    done = people.etl("chaos", "jobs.people", "--occurrences", "1")

    assert done.returncode == 0, done.stdout + done.stderr
    *table, summary = done.stdout.splitlines()
    assert table[0].split() == ["STEP", "KILLS", "people"]
    assert {line.split()[0]: line.split()[1:] for line in table[1:]} == {
        step: ["1", "ok"]
        for step in (
            *("lease.claiming", "lease.claimed", "recovery.begin", "recovery.sessions_ended", "recover.listed"),
            *("recovery.settled", "recovery.fenced", "recovery.verified", "source.batch", "sink.begun", "sink.fenced"),
            *("checkpoint.triggered", "source.barrier", "sink.barrier", "sink.written", "sink.prepare.before"),
            *("sink.prepared", "sink.acknowledging", "transaction.begun", "transaction.fenced"),
            *("checkpoint.completing", "checkpoint.head_advanced", "checkpoint.recorded", "checkpoint.completed"),
            *("commit.begin", "commit.before", "commit.after", "commit.end", "run.ending", "run.ended"),
        )
    }
    assert summary == "people: 30 kills at 30 steps, 7 rows: every target is as after an undisturbed run"
    assert done.stderr.splitlines()[:2] == [
        "people: first undisturbed run: 7 rows read, 4 checkpoint(s)",
        "people: second undisturbed run: 7 rows read, 4 checkpoint(s)",
    ]


def test_job_with_sinks_in_two_databases_is_tested_in_both(
    people: Project, server_url: str, store_template: str
) -> None:
    other = 'people.write("others", TwoPhaseCommitSink(PostgresTable("others", create=True, database="other")))'
    declare(people, f"{APPEND}\n{other}")
    with fresh_database(server_url, store_template) as other_url:
        both = Project(people.dir, {**people.environ, "ETL_DATABASE_URL_OTHER": other_url})

        report = chaos(both, "--occurrences", "1", "--step", "checkpoint.completed", "--step", "commit.after")

        # Killed after either sink's commit, and before any.
        assert (report["status"], report["kills"], set(report["sinks"])) == ("ok", 3, {"people", "others"})
        for url in (url_of(people), other_url):
            assert_nothing_left(people, url)
            with psycopg.connect(url) as connection:
                assert connection.execute("SELECT to_regclass('people'), to_regclass('others')").fetchone() == (
                    None,
                    None,
                )


# --- jobs that are wrong ----------------------------------------------------------------------------------------------

CARELESS = """
from contextlib import closing
from psycopg import sql
from sinks.postgres_unit import PostgresSink
from sinks import UnitDelivery, WriteAheadSinkBase

class Careless(PostgresSink, WriteAheadSinkBase):
    def create_delivery(self, context):
        return Delivery(context, self.table)

class Delivery(UnitDelivery):
    def __init__(self, context, table):
        self.context, self.table = context, table

    def deliver(self, unit, batches):
        insert = sql.SQL("INSERT INTO {} VALUES (%s, %s)").format(self.table.identifier)
        with closing(self.context.connect("careless")) as connection, connection.cursor() as cursor:
            for batch in batches:
                cursor.executemany(insert, [tuple(row.values()) for row in batch.to_pylist()])

people.write("people", Careless(PostgresTable("people", create=True)))
people.write("others", WriteAheadSink(PostgresTable("others", create=True)))
"""


def test_sink_that_delivers_again_is_found(people: Project) -> None:
    declare(people, CARELESS)
    steps = ("--step", "sink.prepared", "--step", "commit.delivered")

    report = chaos(people, "--occurrences", "1", *steps, code=1)

    assert report["status"] == "different"
    assert results(report) == {
        "sink.prepared": {"people": "ok", "others": "ok"},
        "commit.delivered": {"people": "duplicated 2", "others": "ok"},
    }
    (wrong,) = report["wrong"]
    assert (wrong["step"], wrong["uid"], wrong["occurrence"], wrong["failure"]) == (
        "commit.delivered",
        "people",
        1,
        None,
    )
    assert wrong["sinks"] == {"people": {"lost": 0, "duplicated": 2, "unexpected": 0, "columns": ["id", "name"]}}
    assert report["sinks"]["people"]["promised"] == "at-least-once"


FILE_SINK = """
import json
import pyarrow as pa
from etl.sink import SupportsScratch
from sinks import UnitDelivery, WriteAheadSinkBase

class Lines(WriteAheadSinkBase, SupportsScratch):
    def __init__(self, path):
        self.path = path

    def aimed_at(self, scratch):
        return Lines(scratch.directory / "lines")

    def visible_rows(self, context):
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        yield pa.RecordBatch.from_pylist([json.loads(line) for line in lines], schema=context.schema.to_arrow())

    def create_delivery(self, context):
        return Delivery(self.path)

class Delivery(UnitDelivery):
    def __init__(self, path):
        self.path = path

    def deliver(self, unit, batches):
        with open(self.path, "a") as file:
            for batch in batches:
                for row in batch.to_pylist():
                    print(json.dumps(row), file=file)

people.write("lines", Lines("the_real_file"))
"""


def test_own_sink_without_a_database_is_tested_in_a_scratch_directory(people: Project) -> None:
    declare(people, FILE_SINK)

    report = chaos(people, "--step", "commit.before", "--step", "commit.delivered", code=1)

    # There are four checkpoints, of two rows each but the last one.
    assert results(report) == {"commit.before": {"lines": "ok"}, "commit.delivered": {"lines": "duplicated 2"}}
    assert [one["sinks"]["lines"]["duplicated"] for one in report["wrong"]] == [2, 2, 1]
    assert not (people.dir / "the_real_file").exists()


def test_job_at_most_once_is_shown_to_lose_rows(people: Project) -> None:
    declare(people, mode="AT_MOST_ONCE")

    done = people.etl("chaos", "jobs.people", "--quiet", "--occurrences", "1", "--step", "checkpoint.completed")

    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        "STEP                  KILLS  people",
        "checkpoint.completed      1  lost 2",
        "killed at checkpoint.completed, occurrence 1: people: lost 2, in id, name",
        "note: people is promised at-most-once (see etl explain)",
        "people: 1 kills at 1 steps, 7 rows: 1 cells of 1 are wrong",
    ]


UNALIGNED = """
import threading
from jobs._numbers import Numbers, Reader

overtook = threading.Event()

class Fast(Numbers):
    def create_reader(self, context):
        return FastReader(self)

class FastReader(Reader):
    # One row a batch: each asks for a checkpoint, and the row behind the barrier overtakes it.
    def read_batch(self):
        batch = super().read_batch()
        if batch is not None:
            self.next -= batch.num_rows - 1
            batch = batch.slice(0, 1)
        return batch

class Slow(Numbers):
    def create_reader(self, context):
        return SlowReader(self)

class SlowReader(Reader):
    def read_batch(self):
        assert overtook.wait(20)
        return super().read_batch()

def watch(row):
    if row["n"] == 1:
        overtook.set()
    return row

job = Job("people", mode=CheckpointMode.AT_LEAST_ONCE, checkpoint=CheckpointPolicy(rows=1))
slow = job.read("slow", Slow(1))
fast = job.read("fast", Fast(5))
fast.union(slow).map(watch).write("numbers", TwoPhaseCommitSink(PostgresTable("numbers", create=True)))
"""


def test_job_at_least_once_is_shown_to_repeat_rows(people: Project) -> None:
    declare(people, UNALIGNED)

    report = chaos(people, "--occurrences", "1", "--step", "commit.end", code=1)

    # Number 1 was written with the first checkpoint, whose position lies before it.
    assert results(report) == {"commit.end": {"numbers": "duplicated 1"}}
    assert report["sinks"]["numbers"]["promised"] == "at-least-once"


def test_run_that_fails_after_a_kill_is_shown_with_its_error(people: Project) -> None:
    flag = people.dir / "killed_once"
    body = f"""
from pathlib import Path

def once(row):
    if row["id"] == 7 and not Path({str(flag)!r}).exists():
        return row
    if Path({str(flag)!r}).exists():
        raise ValueError("not again")
    return row

people.map(once).write("people", TwoPhaseCommitSink(PostgresTable("people", create=True)))
from etl.runtime import telemetry
original = telemetry.Telemetry.emit

def emit(self, name, **fields):
    if name == "checkpoint.completed" and self._listeners[0]._kill is not None:
        Path({str(flag)!r}).touch()
    original(self, name, **fields)

telemetry.Telemetry.emit = emit
"""
    declare(people, body)

    report = chaos(people, "--occurrences", "1", "--step", "checkpoint.completed", code=1)

    assert results(report) == {"checkpoint.completed": {"people": "the run after it fails; lost 5"}}
    (wrong,) = report["wrong"]
    assert wrong["failure"].startswith("exit code 70: ")
    assert "not again" in wrong["failure"]


# --- jobs that are not deterministic ----------------------------------------------------------------------------------

RANDOM = """
def with_token(row):
    return {**row, "token": str(uuid.uuid4())}

tokens = people.filter(pl.col("id") > 1).map(with_token, schema={**COLUMNS, "token": "text"})
tokens.write("tokens", TwoPhaseCommitSink(PostgresTable("tokens", create=True)))
people.write("people", TwoPhaseCommitSink(PostgresTable("people", create=True)))
"""


def test_function_that_yields_something_else_is_found_and_nothing_is_killed(people: Project) -> None:
    declare(people, RANDOM)

    report = chaos(people, code=1)

    assert (report["status"], report["kills"], report["steps"]) == ("nondeterministic", 0, [])
    (found,) = report["nondeterministic"]
    (suspect,) = found.pop("suspects")
    assert found == {"sink": "tokens", "rows": 6, "lost": 6, "duplicated": 0, "unexpected": 6, "columns": ["token"]}
    assert re.fullmatch(r"map with_token at jobs/people\.py:\d+", suspect)
    assert_nothing_left(people)


def test_values_are_shown_only_when_asked_for(people: Project) -> None:
    declare(people, RANDOM.replace('pl.col("id") > 1', f'pl.col("name") == "{SECRET}"'))

    silent = people.etl("chaos", "jobs.people")
    telling = people.etl("chaos", "jobs.people", "--show-data")

    assert (silent.returncode, telling.returncode) == (1, 1)
    first = "tokens: two undisturbed runs differ: 1 rows, differs (1 missing, 1 too many), in token"
    assert silent.stdout.splitlines()[0] == first
    assert SECRET not in silent.stdout + silent.stderr
    assert telling.stdout.splitlines()[0].startswith(f"{first}, for example id=4, name={SECRET}, token=")
    assert silent.stdout.splitlines()[-1] == "people: not deterministic (tokens); nothing was killed"


def test_function_that_drops_other_rows_each_time_is_found(people: Project) -> None:
    body = """
seen = uuid.uuid4().int % 5 + 1
from pathlib import Path
counter = Path("counter")
counter.write_text(str(int(counter.read_text() if counter.exists() else 0) + 1))
dropped = int(counter.read_text())
people.filter(lambda row: row["id"] != dropped, deterministic=False).write(
    "people", TwoPhaseCommitSink(PostgresTable("people", create=True)))
"""
    declare(people, body)

    (found,) = chaos(people, code=1)["nondeterministic"]

    assert (found["lost"], found["duplicated"], found["unexpected"]) == (1, 0, 1)
    (suspect,) = found["suspects"]
    assert suspect.startswith("filter <lambda> at jobs/people.py:")
    assert suspect.endswith(", declared deterministic=False")


def test_value_of_the_import_is_found_and_no_function_is_blamed(people: Project) -> None:
    body = """
marked = people.with_columns(batch=pl.lit(str(uuid.uuid4())))
marked.write("people", TwoPhaseCommitSink(PostgresTable("people", create=True)))
"""
    declare(people, body)

    (found,) = chaos(people, code=1)["nondeterministic"]

    assert found["columns"] == ["batch"]
    assert found["suspects"] == [
        "no Python function is on the way: look at values that are computed when the module is imported, at the source"
        " and at the sink"
    ]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_sink_that_cannot_be_aimed_is_refused_before_anything_runs(people: Project) -> None:
    people.job("numbers")

    done = people.etl("chaos", "jobs.numbers")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == 'etl: error: job "numbers" cannot be crash-tested: 1 problem(s)'
    assert "Table cannot be aimed at a scratch target" in done.stderr
    with psycopg.connect(url_of(people)) as connection:
        assert connection.execute("SELECT to_regclass('numbers'), (SELECT count(*) FROM etl.run)").fetchone() == (
            None,
            0,
        )


def test_source_that_cannot_be_read_again_is_refused(people: Project) -> None:
    body = """
from jobs._numbers import Numbers

class Once(Numbers):
    replayable = False

job = Job("people")
job.read("once", Once(3)).write("people", TwoPhaseCommitSink(PostgresTable("people", create=True)))
"""
    declare(people, body)

    done = people.etl("chaos", "jobs.people")

    assert done.returncode == 2
    assert 'source "once" at jobs/people.py' in done.stderr
    assert "it cannot be read again" in done.stderr


def test_table_that_does_not_exist_is_refused_with_its_statement(people: Project) -> None:
    declare(people, APPEND.replace(", create=True", ""))

    done = people.etl("chaos", "jobs.people", "--quiet")

    assert done.returncode == 2
    assert 'CREATE TABLE IF NOT EXISTS "public"."people" ("id" int8, "name" text)' in done.stderr
    assert_nothing_left(people)


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        (APPEND + '\nother = Job("other")\nother.read("a", CsvFiles("people/*.csv", COLUMNS)).write("b", '
         'TwoPhaseCommitSink(PostgresTable("p")))', 2, "jobs.people declares 2 jobs; name one of jobs.people:job,"),
        (APPEND.replace("people.write", 'people.filter(pl.col("id") < 0 / 0).write'), 2, "etl: error: "),
        (APPEND.replace("people.write", "people.map(lambda row: 1 / 0).write"), 70,
         "etl: error: the first undisturbed run failed: "),
    ],
)  # fmt: skip
def test_job_that_does_not_run_ends_with_its_own_code(people: Project, body: str, code: int, told: str) -> None:
    declare(people, body)

    done = people.etl("chaos", "jobs.people", "--quiet")

    assert (done.returncode, done.stdout) == (code, "")
    assert told in done.stderr
    assert_nothing_left(people)


def test_job_that_reads_nothing_is_refused(people: Project) -> None:
    declare(people)
    (people.dir / "people" / "all.csv").write_text("id,name\n")

    done = people.etl("chaos", "jobs.people", "--quiet")

    assert done.returncode == 2
    assert done.stderr == 'etl: error: job "people" reads no row: there is nothing to test\n'


def test_step_that_the_job_does_not_take_is_refused(people: Project) -> None:
    declare(people)

    done = people.etl("chaos", "jobs.people", "--quiet", "--step", "commit.delivered")

    assert done.returncode == 2
    assert 'job "people" takes no step commit.delivered; its steps are lease.claiming, ' in done.stderr


def test_database_without_the_right_to_create_schemas_is_refused(people: Project) -> None:
    declare(people)
    role = f"etl_test_{os.urandom(6).hex()}"
    with psycopg.connect(url_of(people), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {0} LOGIN PASSWORD {1}").format(*_named(role)))
        connection.execute(sql.SQL("GRANT USAGE ON SCHEMA etl TO {}").format(sql.Identifier(role)))
        connection.execute(sql.SQL("GRANT SELECT ON ALL TABLES IN SCHEMA etl TO {}").format(sql.Identifier(role)))
        try:
            url = re.sub(r"//[^@/]*@", f"//{role}:{role}@", url_of(people))
            assert role in url

            done = people.etl("chaos", "jobs.people", "--quiet", ETL_DATABASE_URL=url)
        finally:
            connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))

    assert done.returncode == 2, done.stderr
    assert "the role may not create schemas" in done.stderr
    assert f'TO "{role}";' in done.stderr


def _named(role: str) -> tuple[sql.Identifier, sql.Literal]:
    return sql.Identifier(role), sql.Literal(role)


# --- what is real stays as it is --------------------------------------------------------------------------------------

REAL = """
CREATE SCHEMA mart;
CREATE TABLE mart.people (
    serial bigserial PRIMARY KEY, id int8 NOT NULL CHECK (id > 0), name text, at timestamptz DEFAULT clock_timestamp(),
    number int8 GENERATED ALWAYS AS IDENTITY, old int8 DEFAULT nextval(('mart.old'::text)::regclass),
    twice int8 GENERATED ALWAYS AS (id * 2) STORED
);
CREATE SEQUENCE mart.old;
CREATE TABLE public.people (id int8 PRIMARY KEY, name varchar(20) NOT NULL, note text DEFAULT 'none');
INSERT INTO public.people VALUES (1, 'Alan', 'kept');
"""
REAL_JOB = """
people.write("mart", TwoPhaseCommitSink(PostgresTable("mart.people")))
people.write("keyed", UpsertSink(PostgresTable("people", key=["id"])))
people.write("log", WriteAheadSink(PostgresTable("log", create=True)))
people.write("files", ParquetFiles("out"))
"""


def everything(url: str) -> dict[str, list[Any]]:
    """Every row of every table with the transaction that wrote it, and where every sequence is."""
    with psycopg.connect(url) as connection:
        relations = connection.execute(
            "SELECT n.nspname, c.relname, c.relkind FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname IN ('public', 'mart', 'etl') AND c.relkind IN ('r', 'S') ORDER BY 1, 2"
        ).fetchall()
        found = {}
        for schema, name, kind in relations:
            columns = "last_value, is_called" if kind == "S" else "xmin::text, xmax::text, ctid::text, *"
            query = f"SELECT {columns} FROM {schema}.{name} ORDER BY {1 if kind == 'S' else 3}"
            found[f"{schema}.{name}"] = connection.execute(query.encode()).fetchall()
        return found


def test_real_tables_sequences_files_and_positions_are_untouched(people: Project) -> None:
    with psycopg.connect(url_of(people), autocommit=True) as connection:
        connection.execute(REAL.encode())
    declare(people, REAL_JOB)
    ran = people.etl("run", "--quiet", "jobs.people")
    assert ran.returncode == 0, ran.stderr
    with (people.dir / "people" / "all.csv").open("a") as file:
        file.write("8,Margaret\n")
    before, files = everything(url_of(people)), sorted((people.dir / "out").iterdir())
    assert len(before["mart.people"]) == len(before["public.people"]) == len(NAMES)

    report = chaos(people, "--occurrences", "1", "--step", "sink.prepared", "--step", "checkpoint.completed")

    assert (report["status"], report["rows_read"]) == ("ok", 8)
    after = everything(url_of(people))
    # Numbers of runs come from one sequence, which no transaction gives back.
    assert before.pop("etl.run_run_id_seq") < after.pop("etl.run_run_id_seq")
    assert after == before
    assert sorted((people.dir / "out").iterdir()) == files
    assert_nothing_left(people)
    again = people.etl("run", "--json", "--quiet", "jobs.people")
    assert json.loads(again.stdout)["rows_read"] == 1


def test_sample_reads_only_the_first_rows_of_each_source(people: Project) -> None:
    rows = "".join(f"{number},n{number}\n" for number in range(1, 5001))
    people.write("people/big.csv", "id,name\n" + rows)
    (people.dir / "people" / "all.csv").unlink()
    # All of it would be a single batch.
    declare(
        people, 'job = Job("people")\npeople = job.read("people_csv", CsvFiles("people/*.csv", COLUMNS))\n' + APPEND
    )

    report = chaos(people, "--rows", "100", "--step", "checkpoint.completed", "--step", "source.batch")

    assert (report["rows_read"], report["sample_rows"], report["sinks"]["people"]["rows"]) == (100, 100, 100)
    assert (report["status"], report["checkpoints"], report["kills"]) == ("ok", 4, 6)


# --- interrupted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_crash_test_removes_what_it_has_made(people: Project, signum: int, code: int) -> None:
    declare(people)
    with started(people, "chaos", "jobs.people") as process:
        await_line(process, "kills to come")
        process.send_signal(signum)
        out, err = process.communicate(timeout=TIMEOUT_S)

    assert (process.returncode, out) == (code, ""), err
    assert f"{signal.Signals(signum).name}: removing what the crash test has made" in err
    assert_nothing_left(people)


def test_killed_crash_test_leaves_no_process_and_the_next_one_removes_the_rest(people: Project) -> None:
    declare(people)
    with started(people, "chaos", "jobs.people") as process:
        await_line(process, "kills to come")
        children = children_of(process.pid)
        process.kill()
        process.communicate(timeout=TIMEOUT_S)
    assert children
    await_end(children)
    with psycopg.connect(url_of(people)) as connection:
        left = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, 'etl_chaos_') ORDER BY 1"
        schemas = [name for (name,) in connection.execute(left)]
    assert schemas

    done = people.etl("chaos", "jobs.people", "--step", "run.ended")

    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "removed" in line]
    assert told == [
        f"people: removed {schema}, left by a crash test that was killed, from database store" for schema in schemas
    ]
    assert_nothing_left(people)


def await_line(process: subprocess.Popen[str], part: str) -> None:
    """Read the process's stderr up to a line."""
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        if part in line:
            return
        lines.append(line)
    raise AssertionError(f"it has ended and never said {part!r}: {lines}")


def children_of(pid: int) -> list[int]:
    """Processes started by a process and by those."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found = [pid]
    for parent in found:
        found += [child for child, its in pairs if its == parent]
    return found[1:]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def await_end(pids: list[int]) -> None:
    """Wait until processes that are not ours have ended."""
    pause = threading.Event()
    for _ in range(TIMEOUT_S * 20):
        if not any(is_alive(pid) for pid in pids):
            return
        pause.wait(0.05)
    raise AssertionError("a process of the crash test lives on")
