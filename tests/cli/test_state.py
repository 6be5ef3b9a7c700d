"""``etl state`` and what ``etl explain`` says of operators that remember."""

from __future__ import annotations

import json

import psycopg
import pytest

from tests.cli.conftest import Project

JOB = '''
"""Numbers by their remainder."""

import polars as pl

from etl import Job, MapState, ValueState
from jobs._numbers import Numbers
from sinks import PostgresTable, UpsertSink


def remember(row, state):
    state.largest.value = row["half"]
    state.seen[row["n"]] = float("nan") if row["n"] == 3 else row["n"] / 4
    return None


job = Job("kept", parallelism=2)
numbers = job.read("numbers", Numbers(count=12))
keyed = numbers.with_columns(
    key=pl.when(pl.col("n") % 3 < 2).then(pl.col("n") % 3), half=(pl.col("n") / 2).cast(pl.Decimal(6, 1))
).key_by("key")
totals = keyed.aggregate("totals", total=pl.col("half").sum(), rows=pl.len())
totals.write("out", UpsertSink(PostgresTable("totals", key=["rows", "total"], create=True)))
memory = keyed.process(
    "memory", remember, state={"largest": ValueState("numeric(6,1)"), "seen": MapState("int8", "float8")}
)
memory.select("n").write("nothing", UpsertSink(PostgresTable("nothing", key=["n"], create=True)))
'''


@pytest.fixture
def kept(stored: Project) -> Project:
    """A store on which a job with state has run."""
    stored.write("jobs/kept.py", JOB)
    done = stored.etl("run", "--quiet", "jobs.kept")
    assert done.returncode == 0, done.stderr
    return stored


def test_operators_are_listed_with_their_size(kept: Project) -> None:
    shown = kept.etl("state", "show", "kept")
    assert (shown.returncode, shown.stderr) == (0, "")
    header, *lines = shown.stdout.splitlines()
    assert header.split()[:3] == ["OPERATOR", "KEY", "GROUPS"]
    assert [line.split()[0] for line in lines] == ["memory", "totals"]
    document = json.loads(kept.etl("state", "show", "kept", "--json").stdout)
    assert [(one["operator"], one["key_groups"], one["last_changed"]) for one in document] == [
        ("memory", 3, 1),
        ("totals", 3, 1),
    ]


def test_closed_event_time_and_late_rows_are_listed(kept: Project, store_url: str) -> None:
    assert "LATE ROWS" not in kept.etl("state", "show", "kept").stdout
    with psycopg.connect(store_url, autocommit=True) as connection:
        connection.execute(
            "UPDATE etl.checkpoint SET states = jsonb_set(states, '{totals}', states -> 'totals' ||"
            ' \'{"watermark": 1709251200000000, "late_rows": 3}\')'
        )
    shown = kept.etl("state", "show", "kept").stdout.splitlines()
    assert shown[0].endswith("CLOSED UP TO  LATE ROWS")
    assert [line.split()[0] for line in shown[1:]] == ["memory", "totals"]
    assert shown[2].split()[-3:] == ["2024-03-01", "00:00:00.000000", "3"]


def test_keys_of_an_operator_are_shown(kept: Project) -> None:
    shown = kept.etl("state", "show", "kept", "totals")
    assert (shown.returncode, shown.stderr) == (0, "")
    header, *lines = shown.stdout.splitlines()
    assert header.split() == ["key", "total.sum", "rows.len"]
    assert sorted(line.split() for line in lines) == [["0", "9.0", "4"], ["1", "11.0", "4"], ["NULL", "13.0", "4"]]
    assert len(kept.etl("state", "show", "kept", "totals", "--limit", "2").stdout.splitlines()) == 3


def test_export_is_exact(kept: Project) -> None:
    exported = kept.etl("state", "export", "kept", "memory")
    assert exported.stderr == ""
    assert exported.returncode == 0
    found = [json.loads(line) for line in exported.stdout.splitlines()]
    assert sorted(found, key=lambda one: str(one["key"]["key"])) == [
        {
            "key": {"key": key},
            "state": {
                "largest": largest,
                "seen": [{"key": n, "value": "NaN" if n == 3 else n / 4} for n in range(first, 12, 3)],
            },
        }
        for key, largest, first in ((0, "4.5", 0), (1, "5.0", 1), (None, "5.5", 2))
    ]


def test_unknown_operator_is_refused_with_the_known_ones(kept: Project) -> None:
    for command in ("show", "export"):
        done = kept.etl("state", command, "kept", "total")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            'etl: error: operator "total" of job "kept" has no state at checkpoint 1; those that have: memory, totals\n'
        )


def test_unknown_job_is_refused_with_the_known_ones(kept: Project) -> None:
    for arguments in (("show", "kep"), ("show", "kep", "totals"), ("export", "kep", "totals")):
        done = kept.etl("state", *arguments)
        assert (done.returncode, done.stderr) == (
            2,
            'etl: error: no job named "kep" has run on this store; known: kept\n',
        )


def test_job_without_state_says_so(stored: Project) -> None:
    stored.job("plain")
    assert stored.etl("run", "--quiet", "jobs.plain").returncode == 0
    done = stored.etl("state", "show", "plain")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == 'no operator of job "plain" has stored anything\n'


def test_edited_state_is_refused(kept: Project) -> None:
    with psycopg.connect(kept.environ["ETL_DATABASE_URL"], autocommit=True) as connection:
        connection.execute("UPDATE etl.state SET content = content || '\\x00' WHERE uid = 'totals'")
    done = kept.etl("state", "export", "kept", "totals")
    assert (done.returncode, done.stdout) == (70, "")
    assert 'etl.state: that of operator "totals", key group ' in done.stderr
    assert "Traceback" not in done.stderr


def test_explain_shows_what_is_kept(kept: Project) -> None:
    shown = kept.etl("explain", "jobs.kept").stdout
    assert 'totals: aggregate by key: total=col("half").sum(), rows=len()' in shown
    assert "memory: process by key remember, keeping largest numeric(6,1), seen map of int8 to float8" in shown
    assert "State, stored with each checkpoint" in shown
    assert "  totals: by key, in 2 subtask(s)" in shown
    nodes = {node["id"]: node for node in json.loads(kept.etl("explain", "jobs.kept", "--json").stdout)["nodes"]}
    assert nodes["totals"]["parallelism"] == 2
    assert nodes["totals"]["schema"] == {"key": "int8", "total": "numeric(38,1)", "rows": "int8"}
