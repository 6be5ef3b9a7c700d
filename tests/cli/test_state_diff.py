"""``etl state diff``: what has changed between two checkpoints."""

from __future__ import annotations

import json

import psycopg
import pytest

from tests.cli.conftest import Project

JOB = """
import polars as pl

from etl import CheckpointPolicy, Job, ValueState
from jobs._numbers import Numbers
from sinks import PostgresTable, UpsertSink


def remember(row, state):
    if row["n"] == 5:
        state.last.clear()
    else:
        state.last.value = row["n"]


job = Job("kept", checkpoint=CheckpointPolicy(interval_s=60), parallelism=2)
numbers = job.read("numbers", Numbers(count=COUNT)).with_columns(key=pl.col("n") % 4)
memory = numbers.key_by("key").process("memory", remember, state={"last": ValueState("int8")})
memory.select("n").write("nothing", UpsertSink(PostgresTable("nothing", key=["n"], create=True)))
firsts = numbers.deduplicate("firsts", "key").select("n")
firsts.write("firsts_out", UpsertSink(PostgresTable("firsts", key=["n"], create=True)))
"""


@pytest.fixture
def kept(stored: Project) -> Project:
    """A store with a savepoint of a job with state, and a later checkpoint."""
    for count in (3, 6):
        stored.write("jobs/kept.py", JOB.replace("COUNT", str(count)))
        done = stored.etl("run", "--quiet", "jobs.kept")
        assert done.returncode == 0, done.stderr
        if count == 3:
            assert stored.etl("savepoint", "create", "kept", "early").returncode == 0
    return stored


def test_keys_that_differ_are_counted_by_operator(kept: Project) -> None:
    shown = kept.etl("state", "diff", "kept", "early", "2")
    assert (shown.returncode, shown.stderr) == (0, "")
    header, *lines = shown.stdout.splitlines()
    assert header.split() == ["OPERATOR", "KEYS", "ADDED", "REMOVED", "CHANGED", "UNCHANGED"]
    assert [line.split() for line in lines] == [["firsts", "1", "0", "0", "3"], ["memory", "1", "1", "1", "1"]]


def test_keys_that_differ_are_listed_as_json_lines(kept: Project) -> None:
    shown = kept.etl("state", "diff", "kept", "1", "2", "memory", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    found = sorted((json.loads(line) for line in shown.stdout.splitlines()), key=lambda one: str(one["key"]))
    assert found == [
        {"operator": "memory", "change": "changed", "key": {"key": 0}, "before": {"last": 0}, "after": {"last": 4}},
        {"operator": "memory", "change": "removed", "key": {"key": 1}, "before": {"last": 1}, "after": None},
        {"operator": "memory", "change": "added", "key": {"key": 3}, "before": None, "after": {"last": 3}},
    ]


def test_checkpoint_differs_in_nothing_from_itself(kept: Project) -> None:
    assert kept.etl("state", "diff", "kept", "2", "2", "--json").stdout == ""
    lines = kept.etl("state", "diff", "kept", "early", "1").stdout.splitlines()[1:]
    assert [line.split() for line in lines] == [["firsts", "0", "0", "0", "3"], ["memory", "0", "0", "0", "3"]]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nobody", "1", "2"], 'no job named "nobody" has run on this store; known: kept'),
        (["kept", "1", "late"], 'there is no savepoint or kept checkpoint "late"; there are: early, 1, 2'),
        (
            ["kept", "1", "2", "no"],
            'operator "no" of job "kept" has no state, before or after; those that have: firsts, memory',
        ),
    ],
)
def test_what_is_not_there_is_refused(kept: Project, arguments: list[str], problem: str) -> None:
    refused = kept.etl("state", "diff", *arguments)
    assert (refused.returncode, refused.stderr) == (2, f"etl: error: {problem}\n")


def test_missing_chunk_is_told(kept: Project) -> None:
    with psycopg.connect(kept.environ["ETL_DATABASE_URL"], autocommit=True) as connection:
        deleted = connection.execute(
            "DELETE FROM etl.state WHERE uid = 'memory' AND checkpoint_id = 2 AND key_group ="
            " (SELECT max(key_group) FROM etl.state WHERE uid = 'memory' AND checkpoint_id = 2)"
        )
    assert deleted.rowcount == 1
    refused = kept.etl("state", "diff", "kept", "early", "2", "memory")
    assert refused.returncode == 70
    assert "etl.state: checkpoint 2 has counted" in refused.stderr
