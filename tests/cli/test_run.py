"""``etl run`` as a process: summaries, exit codes, signals, databases."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.cli.conftest import TIMEOUT_S, Project, await_file, rows, started
from tests.support.databases import fresh_database

KEYS = ["job", "status", "rows_read", "rows_written", "rows_rejected", "checkpoint", "restarts", "duration_s"]


def summaries(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_run_prints_one_exact_summary_and_says_the_rest_on_stderr(stored: Project, store_url: str) -> None:
    stored.job("numbers")

    done = stored.etl("run", "jobs.numbers", "--json")

    (summary,) = summaries(done)
    duration_s = summary.pop("duration_s")
    assert done.returncode == 0
    assert list(summary) == KEYS[:-1]
    assert summary == {
        "job": "numbers",
        "status": "succeeded",
        "rows_read": 25,
        "rows_written": {"table": 25},
        "rows_rejected": 0,
        "checkpoint": 1,
        "restarts": 0,
    }
    assert 0 < duration_s < TIMEOUT_S
    assert rows(store_url, "numbers") == list(range(25))
    started, ended = done.stderr.splitlines()
    assert started == "numbers: started"
    assert ended.startswith("numbers: succeeded: 25 rows read; table 25 rows written; checkpoint 1; ")


def test_run_again_writes_nothing(stored: Project, store_url: str) -> None:
    stored.job("numbers")
    stored.etl("run", "jobs.numbers")

    (summary,) = summaries(stored.etl("run", "jobs/numbers.py", "--json"))

    assert (summary["status"], summary["rows_read"], summary["rows_written"]) == ("succeeded", 0, {"table": 0})
    assert rows(store_url, "numbers") == list(range(25))


def test_run_quietly_says_nothing_on_success(stored: Project) -> None:
    stored.job("numbers")

    done = stored.etl("run", "--quiet", "jobs.numbers")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_run_quietly_says_what_failed(stored: Project) -> None:
    stored.job("numbers", "count=25, bad=13")

    done = stored.etl("run", "--quiet", "jobs.numbers")

    assert (done.returncode, done.stdout) == (65, "")
    assert done.stderr == "etl: error: numbers: number 13 is bad\n"


def test_run_of_bad_data_makes_nothing_visible(stored: Project, store_url: str) -> None:
    stored.job("numbers", "count=25, bad=13")

    done = stored.etl("run", "jobs.numbers", "--json")

    (summary,) = summaries(done)
    assert done.returncode == 65
    assert (summary["status"], summary["rows_read"], summary["rows_written"]) == ("failed", 0, {"table": 0})
    assert rows(store_url, "numbers") == []


def test_run_tries_every_job_and_exits_as_the_first_that_failed(stored: Project, store_url: str) -> None:
    stored.job("bad", "count=25, bad=13")
    stored.job("good")
    stored.write("jobs/broken.py", "nothing\n")

    done = stored.etl("run", "--json", "jobs.bad", "jobs.broken", "jobs.good")

    by_job = {summary["job"]: summary["status"] for summary in summaries(done)}
    assert done.returncode == 65
    assert by_job == {"bad": "failed", "jobs.broken": "failed", "good": "succeeded"}
    assert all(list(summary) == KEYS for summary in summaries(done))
    assert "etl: error: jobs/broken.py:1: NameError: name 'nothing' is not defined" in done.stderr.splitlines()
    assert rows(store_url, "good") == list(range(25))


def test_run_refuses_the_same_job_twice(stored: Project) -> None:
    stored.job("numbers")

    done = stored.etl("run", "jobs.numbers", "jobs/numbers.py")

    assert done.returncode == 2
    assert 'etl: error: jobs.numbers: a job named "numbers" was given before' in done.stderr


def test_run_without_migrated_schema_names_the_command(project: Project, database_url: str) -> None:
    project.job("numbers")

    done = project.etl("run", "jobs.numbers", ETL_DATABASE_URL=database_url)

    assert done.returncode == 2
    assert done.stderr == "etl: error: schema etl of database store does not exist; run: etl db upgrade\n"
    assert project.etl("db", "upgrade", ETL_DATABASE_URL=database_url).returncode == 0
    assert project.etl("run", "jobs.numbers", ETL_DATABASE_URL=database_url).returncode == 0


def test_run_without_reachable_database_exits_69_without_the_password(project: Project, tmp_path: Path) -> None:
    project.job("numbers")
    url = f"postgresql://me:s3cret@/db?host={tmp_path}&port=1"

    done = project.etl("run", "jobs.numbers", "--json", ETL_DATABASE_URL=url)

    (summary,) = summaries(done)
    assert (done.returncode, summary["status"]) == (69, "failed")
    assert done.stderr.startswith("etl: error: database store (host=")
    assert len(done.stderr.splitlines()) == 1
    assert "s3cret" not in done.stdout + done.stderr


def test_run_writes_to_a_named_database(stored: Project, server_url: str) -> None:
    stored.job("numbers", sink=', other="reporting"')

    missing = stored.etl("run", "jobs.numbers")
    with fresh_database(server_url) as other:
        behind = stored.etl("run", "jobs.numbers", ETL_DATABASE_URL_REPORTING=other)

    assert missing.returncode == 2
    assert "database 'reporting' is not configured" in missing.stderr
    assert behind.returncode == 2
    assert "etl db upgrade --database reporting" in behind.stderr


def test_run_of_a_defect_keeps_the_traceback(stored: Project, tmp_path: Path) -> None:
    stored.job("numbers", 'count="many"')

    done = stored.etl("run", "--quiet", "jobs.numbers")

    first, second = done.stderr.splitlines()
    (kept,) = (tmp_path / "state/etl/tracebacks").iterdir()
    assert done.returncode == 70
    assert "TypeError" in first
    assert second == f"  the traceback is in {kept}; --debug shows it here"
    assert "_numbers.py" in kept.read_text()
    assert "Traceback" in stored.etl("run", "--quiet", "--debug", "jobs.numbers").stderr


@contextmanager
def following(project: Project, marker: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that follows its source and has written something already."""
    project.job("numbers", sink=f", marker={str(marker)!r}")
    with started(project, "run", "--follow", "--json", "jobs.numbers") as process:
        await_file(marker, process)
        yield process


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_first_signal_ends_a_following_run_with_a_final_checkpoint(
    stored: Project, store_url: str, tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    with following(stored, tmp_path / "written") as process:
        process.send_signal(signum)
        out, err = process.communicate(timeout=TIMEOUT_S)

    summary = json.loads(out)
    assert process.returncode == code
    assert (summary["status"], summary["rows_read"], summary["rows_written"]) == ("stopped", 25, {"table": 25})
    assert f"{signum.name}: stopping after a final checkpoint; once more stops at once" in err.splitlines()
    assert rows(store_url, "numbers") == list(range(25))


def test_second_signal_ends_the_process_at_once(stored: Project, store_url: str, tmp_path: Path) -> None:
    with following(stored, tmp_path / "written") as process, psycopg.connect(store_url) as blocker:
        # A lock that the final checkpoint needs: it cannot complete while this transaction is open.
        blocker.execute("LOCK TABLE etl.checkpoint IN ACCESS EXCLUSIVE MODE")
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "stopping" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 143

    assert stored.etl("run", "jobs.numbers").returncode == 0
    assert rows(store_url, "numbers") == list(range(25))


def test_one_signal_ends_the_process_within_ten_seconds_when_the_final_checkpoint_hangs(
    stored: Project, store_url: str, tmp_path: Path
) -> None:
    with following(stored, tmp_path / "written") as process, psycopg.connect(store_url) as blocker:
        blocker.execute("LOCK TABLE etl.checkpoint IN ACCESS EXCLUSIVE MODE")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143

    assert stored.etl("run", "jobs.numbers").returncode == 0
    assert rows(store_url, "numbers") == list(range(25))


@pytest.mark.parametrize(
    ("options", "code", "status"),
    [
        ((), 75, "already-running"),
        (("--if-running", "fail"), 75, "already-running"),
        (("--if-running", "skip"), 0, "skipped"),
    ],
)
def test_run_beside_another_one_does_as_told(
    stored: Project, tmp_path: Path, options: tuple[str, ...], code: int, status: str
) -> None:
    with following(stored, tmp_path / "written"):
        done = stored.etl("run", "--json", *options, "jobs.numbers")

    (summary,) = summaries(done)
    assert (done.returncode, summary["status"], summary["rows_written"]) == (code, status, {})
    assert len(done.stderr.splitlines()) == 2


def test_run_waits_for_the_end_of_another_one(stored: Project, store_url: str, tmp_path: Path) -> None:
    with following(stored, tmp_path / "written") as owner:
        with started(stored, "run", "--json", "--if-running", "wait", "jobs.numbers") as waiting:
            assert waiting.stderr is not None
            lines = [waiting.stderr.readline() for _ in range(2)]
            assert lines[0] == "numbers: started\n"
            assert lines[1].startswith('numbers: waiting for its turn: job "numbers" is already running: epoch 1, ')
            owner.send_signal(signal.SIGTERM)
            out, _ = waiting.communicate(timeout=TIMEOUT_S)
        assert owner.wait(TIMEOUT_S) == 0

    assert (waiting.returncode, json.loads(out)["status"]) == (0, "succeeded")
    assert rows(store_url, "numbers") == list(range(25))


def test_following_runs_several_jobs_at_once(stored: Project, store_url: str, tmp_path: Path) -> None:
    stored.job("other", sink=f", marker={str(tmp_path / 'other')!r}")
    stored.job("numbers", sink=f", marker={str(tmp_path / 'numbers')!r}")
    with started(stored, "run", "--follow", "--json", "jobs.other", "jobs.numbers") as process:
        await_file(tmp_path / "other", process)
        await_file(tmp_path / "numbers", process)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=TIMEOUT_S)

    assert process.returncode == 0
    assert {json.loads(line)["job"] for line in out.splitlines()} == {"other", "numbers"}
    assert rows(store_url, "other") == rows(store_url, "numbers") == list(range(25))


def test_summary_that_cannot_be_printed_is_an_error_of_a_run_that_is_done(stored: Project, store_url: str) -> None:
    stored.job("numbers")

    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*stored.command, "run", "--quiet", "--json", "jobs.numbers"],
            cwd=stored.dir, env=dict(stored.environ), stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip

    assert done.returncode == 70
    assert done.stderr == (
        "etl: error: the summary could not be printed, the jobs are done:"
        " stdout cannot be written: No space left on device\n"
    )
    assert rows(store_url, "numbers") == list(range(25))


@pytest.mark.parametrize(("closed", "lines"), [("<&-", 2), (">&-", 0), ("2>&-", 2), ("<&- >&- 2>&-", 0)])
def test_run_that_was_started_without_standard_streams_is_done(
    stored: Project, store_url: str, closed: str, lines: int
) -> None:
    stored.job("first")
    stored.job("second")
    command = shlex.join([*stored.command, "run", "--json", "jobs.first", "jobs.second"])

    done = subprocess.run(
        ["sh", "-c", f"{command} {closed}"],
        cwd=stored.dir, env=dict(stored.environ), capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) == lines
    assert rows(store_url, "first") == rows(store_url, "second") == list(range(25))


LATE = """
from dataclasses import dataclass

from etl import Job
from jobs._numbers import Numbers, Table


@dataclass(frozen=True)
class Late(Numbers):
    def create_reader(self, context):
        import polars

        return super().create_reader(context)


job = Job("late")
job.read("numbers", Late(count=25)).write("table", Table("late", marker={marker!r}))
"""


def test_interrupt_ends_a_run_that_imports_polars_when_it_works_already(
    stored: Project, store_url: str, tmp_path: Path
) -> None:
    stored.job("late")
    stored.write("jobs/late.py", LATE.format(marker=str(tmp_path / "written")))
    with started(stored, "run", "--follow", "--json", "jobs.late") as process:
        await_file(tmp_path / "written", process)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=10)

    assert process.returncode == 130
    assert json.loads(out)["status"] == "stopped"
    assert rows(store_url, "late") == list(range(25))
