"""``etl crontab``."""

from __future__ import annotations

import sys
from pathlib import Path

from etl.cli.crontab import etl_command
from tests.cli.conftest import Project


def test_crontab_prints_a_line_for_each_scheduled_job(project: Project) -> None:
    project.job("hourly", job=', schedule="0 * * * *"')
    project.job("manual")

    done = project.etl("crontab", "--if-running", "wait", ETL_DATABASE_URL="postgresql://me:secret@db.example/store")

    assert (done.returncode, done.stderr) == (0, "")
    assert "secret" not in done.stdout
    *comments, line = done.stdout.splitlines()
    assert all(comment.startswith("#") for comment in comments)
    command = " ".join(etl_command())
    assert line == f"0 * * * * cd {project.dir} && {command} run --quiet --if-running wait jobs.hourly"
    assert Path(sys.executable).is_absolute()


def test_crontab_prints_nothing_when_a_job_cannot_be_loaded(project: Project) -> None:
    project.job("hourly", job=', schedule="0 * * * *"')
    project.write("jobs/broken.py", "nothing\n")

    done = project.etl("crontab")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "etl: error: no crontab was printed: 1 problem(s)"


def test_crontab_refuses_a_named_job_without_schedule(project: Project) -> None:
    project.job("manual")

    done = project.etl("crontab", "jobs.manual")

    assert done.returncode == 2
    assert done.stderr == (
        'etl: error: job manual has no schedule; declare one: Job("manual", schedule="*/5 * * * *")\n'
    )


def test_crontab_without_schedules_says_how_to_declare_one(project: Project) -> None:
    project.job("manual")

    done = project.etl("crontab")

    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("no job has a schedule")
