"""The fixture ``etl_chaos`` in a pytest session of a user's project."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module

import psycopg

from tests.cli.conftest import CHECKOUT, TIMEOUT_S, Project

PLUGIN = "etl.cli.pytest_plugin"
JOB = """
import uuid
from etl import Job
from jobs._numbers import Numbers
from sinks import PostgresTable, TwoPhaseCommitSink

job = Job("numbers")
numbers = job.read("source", Numbers(25)){more}
numbers.write("numbers", TwoPhaseCommitSink(PostgresTable("numbers", create=True)))
"""
TEST = """
def test_numbers_survive_crashes(etl_chaos):
    etl_chaos("jobs.numbers"{options}).assert_exact()
"""


def run_pytest(project: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A session of the project, with warnings as errors and no plugin but this one."""
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", PLUGIN, "-p", "no:cacheprovider", *arguments]
    # Otherwise the plugin would be loaded a second time where the project is installed.
    environ = {**project.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, cwd=project.dir, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def declare(project: Project, more: str = "", options: str = "") -> None:
    project.write("jobs/numbers.py", JOB.format(more=more))
    project.write("checks/test_numbers.py", TEST.format(options=options))


def test_job_that_survives_passes(stored: Project) -> None:
    declare(stored, options=', rows=20, occurrences=1, steps=["checkpoint.completed", "run.ended"]')

    done = run_pytest(stored)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    with psycopg.connect(stored.environ["ETL_DATABASE_URL"]) as connection:
        assert connection.execute("SELECT to_regclass('numbers'), (SELECT count(*) FROM etl.job)").fetchone() == (
            None,
            0,
        )


def test_job_that_does_not_fails_and_shows_the_report(stored: Project) -> None:
    declare(stored, '.map(lambda row: {"id": str(uuid.uuid4())}, schema={"id": "text"})')

    done = run_pytest(stored)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "numbers: two undisturbed runs differ: 25 rows, differs (25 missing, 25 too many), in id" in done.stdout
    assert "suspect: map <lambda> at jobs/numbers.py:8" in done.stdout
    assert "numbers: not deterministic (numbers); nothing was killed" in done.stdout
    assert "report.py" not in done.stdout


def test_job_that_cannot_be_tested_is_an_error_and_no_pass(stored: Project) -> None:
    stored.job("numbers")
    stored.write("checks/test_numbers.py", TEST.format(options=""))

    done = run_pytest(stored)

    assert done.returncode == 1
    assert "Table cannot be aimed at a scratch target" in done.stdout


def test_project_is_that_of_the_test_wherever_pytest_is_started(stored: Project) -> None:
    declare(stored, '.map(lambda row: {"id": str(uuid.uuid4())}, schema={"id": "text"})')
    elsewhere = Project(stored.dir.parent, stored.environ)

    done = run_pytest(elsewhere, str(stored.dir / "checks"))

    assert "nothing was killed" in done.stdout, done.stdout + done.stderr


def test_plugin_imports_nothing_until_it_is_used() -> None:
    code = (
        f"import sys, pytest; before = set(sys.modules); import {PLUGIN};"
        "print(sorted(set(sys.modules) - before - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "['etl', 'etl.cli', 'etl.cli.pytest_plugin']"


def test_package_announces_the_plugin() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]

    assert project["entry-points"]["pytest11"] == {"etl": PLUGIN}
    assert callable(import_module(PLUGIN).etl_chaos)


def test_fixture_is_listed_with_its_meaning(stored: Project) -> None:
    done = run_pytest(stored, "--fixtures")

    assert "etl_chaos" in done.stdout
    assert "kill a job at every step, on scratch copies, and compare" in done.stdout
