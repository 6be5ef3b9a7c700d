"""``etl savepoint``: made of idle and of running jobs, listed, dropped."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg

from tests.cli.conftest import TIMEOUT_S, Project, await_file, rows, started


def test_savepoint_of_an_idle_job(stored: Project) -> None:
    stored.job("numbers")
    assert stored.etl("run", "--quiet", "jobs.numbers").returncode == 0
    made = stored.etl("savepoint", "create", "numbers", "first")
    assert (made.returncode, made.stdout, made.stderr) == (
        0,
        "",
        'savepoint "first" of job "numbers" is checkpoint 1\n',
    )
    again = stored.etl("savepoint", "create", "numbers", "first")
    assert again.returncode == 2
    assert again.stderr == ('etl: error: savepoint "first" exists already, of checkpoint 1; choose another name\n')
    (listed,) = json.loads(stored.etl("savepoint", "list", "numbers", "--json").stdout)
    assert {name: listed[name] for name in ("job", "savepoint", "checkpoint", "rows_written_total")} == {
        "job": "numbers",
        "savepoint": "first",
        "checkpoint": 1,
        "rows_written_total": {"table": 25},
    }
    header, line = stored.etl("savepoint", "list").stdout.splitlines()
    assert header.split()[:3] == ["JOB", "SAVEPOINT", "CHECKPOINT"]
    assert (line.split()[:3], line.split()[-1]) == (["numbers", "first", "1"], "25")
    assert stored.etl("savepoint", "drop", "numbers", "first").returncode == 0
    empty = stored.etl("savepoint", "list", "numbers")
    assert (empty.returncode, empty.stdout, empty.stderr) == (0, "", "no savepoint\n")


def test_savepoint_of_a_job_that_has_completed_nothing(stored: Project) -> None:
    stored.job("numbers", "count=25, bad=3")
    assert stored.etl("run", "--quiet", "jobs.numbers").returncode == 65
    refused = stored.etl("savepoint", "create", "numbers", "early")
    assert (refused.returncode, refused.stderr) == (
        2,
        "etl: error: the job has completed no checkpoint yet; run it first\n",
    )


def test_unknown_job_is_refused(stored: Project) -> None:
    for command in (["create", "nobody", "x"], ["list", "nobody"], ["drop", "nobody", "x"]):
        refused = stored.etl("savepoint", *command)
        assert refused.returncode == 2
        assert 'no job named "nobody" has run on this store' in refused.stderr


def test_savepoint_of_a_running_job_then_the_end_with_another(stored: Project, tmp_path: Path) -> None:
    stored.job(
        "numbers",
        sink=f", marker={str(tmp_path / 'written')!r}",
        job=", checkpoint=CheckpointPolicy(interval_s=3600)",
    )
    text = (stored.dir / "jobs/numbers.py").read_text()
    stored.write("jobs/numbers.py", text.replace("import Job", "import CheckpointPolicy, Job"))
    with started(stored, "run", "--follow", "--json", "jobs.numbers") as process:
        await_file(tmp_path / "written", process)
        made = stored.etl("savepoint", "create", "numbers", "on-the-way")
        assert (made.returncode, made.stderr) == (0, 'savepoint "on-the-way" of job "numbers" is checkpoint 1\n')
        ended = stored.etl("savepoint", "create", "numbers", "end", "--stop")
        assert (ended.returncode, ended.stderr) == (0, 'savepoint "end" of job "numbers" is checkpoint 2\n')
        out, _ = process.communicate(timeout=TIMEOUT_S)
        summary = json.loads(out)
        assert (process.returncode, summary["status"], summary["checkpoint"]) == (0, "stopped", 2)
    assert rows(stored.environ["ETL_DATABASE_URL"], "numbers") == list(range(25))


def test_run_goes_back_only_when_told_what_becomes_of_the_rows(stored: Project) -> None:
    url = stored.environ["ETL_DATABASE_URL"]
    stored.job("numbers")
    assert stored.etl("run", "--quiet", "jobs.numbers").returncode == 0
    assert stored.etl("savepoint", "create", "numbers", "first").returncode == 0
    stored.job("numbers", "count=40")
    assert stored.etl("run", "--quiet", "jobs.numbers").returncode == 0

    refused = stored.etl("run", "jobs.numbers", "--from", "first")

    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == (
        'etl: error: numbers: 1 checkpoint(s) were completed after checkpoint 1, with 15 row(s) of sink "table" (table'
        " numbers: they will be there twice). From there on everything is read and written again: delete those rows"
        " first where that matters, or let them be, and say so with --keep-written"
    )
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DELETE FROM numbers WHERE n >= 25")
    done = stored.etl("run", "jobs.numbers", "--from", "first", "--keep-written", "--json")
    assert (done.returncode, json.loads(done.stdout)["rows_written"]) == (0, {"table": 15}), done.stderr
    assert rows(url, "numbers") == list(range(40))


def test_run_refuses_options_that_do_not_go_together(stored: Project) -> None:
    stored.job("one")
    stored.job("two")
    many = stored.etl("run", "jobs.one", "jobs.two", "--from", "first")
    assert many.returncode == 2
    assert "--from goes back with one job" in many.stderr
    alone = stored.etl("run", "jobs.one", "--keep-written")
    assert alone.returncode == 2
    assert "--keep-written says what --from NAME does" in alone.stderr
