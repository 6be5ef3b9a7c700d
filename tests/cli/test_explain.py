"""``etl explain``: without a database."""

from __future__ import annotations

import json

from tests.cli.conftest import Project

JOB = """
import polars as pl
from etl import Job
from jobs._numbers import Numbers, Table

job = Job("numbers", schedule="0 * * * *")
left = job.read("left", Numbers(count=5))
right = job.read("right", Numbers(count=5))
both = left.filter(pl.col("n") > 1).union(right)
both.write("all", Table("numbers"))
both.select("n", m=pl.col("n") + 1).write("reported", Table("report", other="reporting"))
"""


def test_explain_draws_the_graph_with_columns_and_guarantees(project: Project) -> None:
    project.write("jobs/numbers.py", JOB)

    done = project.etl(
        "explain", "jobs.numbers", ETL_DATABASE_URL_REPORTING="postgresql://me:secret@db.example/reports"
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "secret" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[:18] == [
        "Job numbers (jobs.numbers)",
        "  mode exactly-once; a checkpoint every 10s; schedule 0 * * * *",
        "",
        "Graph",
        "  source left: the numbers below 5",
        "  │     n int8",
        '  └─ filter-1: filter [(col("n")) > (dyn int: 1)]',
        "     │     the same columns",
        "     └─ to union-1, see below",
        "  source right: the numbers below 5",
        "  │     n int8",
        "  └─ union-1: union",
        "     │     the same columns",
        "     ├─ sink all: table numbers",
        '     └─ select-1: select col("n"), [(col("n")) + (dyn int: 1)].alias("m")',
        "        │     n int8, m int8",
        "        └─ sink reported: table report",
        "",
    ]
    assert "  all: exactly-once; writes to the store (embedded server)" in lines
    assert "  reported: exactly-once; writes to database reporting (host=db.example dbname=reports user=me)" in lines
    assert "    - checkpoints are aligned (mode exactly-once)" in lines
    assert any(line.startswith("cannot be replayed  any sink") and "at-most-once" in line for line in lines)


def test_explain_prints_json(project: Project) -> None:
    project.write("jobs/numbers.py", JOB)

    document = json.loads(project.etl("explain", "jobs/numbers.py", "--json").stdout)

    assert list(document) == ["job", "module", "mode", "schedule", "checkpoint", "nodes", "guarantees", "table"]
    assert [node["id"] for node in document["nodes"]] == [
        "left",
        "right",
        "filter-1",
        "union-1",
        "all",
        "select-1",
        "reported",
    ]
    assert document["nodes"][5]["schema"] == {"n": "int8", "m": "int8"}
    assert document["nodes"][3]["inputs"] == ["filter-1", "right"]
    assert [(each["sink"], each["guarantee"], each["database"]) for each in document["guarantees"]] == [
        ("all", "exactly-once", "the store (embedded server)"),
        ("reported", "exactly-once", "database reporting (not configured)"),
    ]


def test_explain_lists_everything_that_is_wrong(project: Project) -> None:
    project.write("jobs/empty.py", 'from etl import Job\njob = Job("empty", schedule="never")\n')

    done = project.etl("explain", "jobs.empty")

    assert (done.returncode, done.stdout) == (2, "")
    first, *findings = done.stderr.splitlines()
    assert first == 'etl: error: job "empty": 3 problem(s)'
    assert [finding.split(":")[0] for finding in findings] == ["  - schedule", "  - job", "  - job"]


def test_explain_says_in_how_many_subtasks(project: Project) -> None:
    job = JOB.replace('"right", Numbers(count=5)', '"right", Numbers(count=5), parallelism=3')
    project.write("jobs/numbers.py", job.replace("union(right)", "union(right.rebalance(2).filter(pl.col('n') > 2))"))

    lines = project.etl("explain", "jobs.numbers").stdout.splitlines()
    nodes = json.loads(project.etl("explain", "jobs.numbers", "--json").stdout)["nodes"]

    assert "  source right: the numbers below 5, in 3 subtasks" in lines
    assert "  └─ rebalance-1: rebalance over 2 subtask(s)" in lines
    found = {node["id"]: node["parallelism"] for node in nodes}
    assert [found[one] for one in ("left", "right", "rebalance-1", "filter-2", "union-1", "all")] == [1, 3, 2, 2, 1, 1]
