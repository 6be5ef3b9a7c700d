"""``etl run --workers`` as a process: the same job, signals to all of its processes, code that changes meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import Project, await_file, rows, started

JOB = """
import os, sys
from pathlib import Path
from etl import Job, RestartPolicy
from jobs._numbers import Numbers, Table
from jobs._rules import changed

job = Job("numbers", restart=RestartPolicy(attempts=3, delay_s=0.01))
numbers = job.read("numbers", Numbers(25)).map(changed)
numbers.write("table", Table("numbers", marker="written"))
"""
RULES = """
import os
from pathlib import Path

def changed(row):
    Path(f"process-{os.getpid()}").touch()
    return {"n": row["n"] * 2}
"""
DOUBLED = [2 * number for number in range(25)]


@pytest.fixture
def doubling(stored: Project) -> Project:
    stored.write("jobs/doubling.py", JOB)
    stored.write("jobs/_rules.py", RULES)
    return stored


def processes(project: Project) -> list[int]:
    """Those in which the function was called."""
    return [int(path.name.partition("-")[2]) for path in project.dir.glob("process-*")]


@pytest.mark.parametrize("job", ["jobs.doubling", "jobs/doubling.py", "jobs.doubling:job"])
def test_functions_run_in_a_process_of_their_own(doubling: Project, store_url: str, job: str) -> None:
    done = doubling.etl("run", "--workers", "2", "--json", job)

    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["rows_read"], summary["rows_written"], summary["restarts"]) == (25, {"table": 25}, 0)
    assert rows(store_url, "numbers") == DOUBLED
    (pid,) = processes(doubling)
    assert not Path(f"/proc/{pid}").exists()


def test_workers_leave_signals_to_the_main_process(doubling: Project, store_url: str) -> None:
    with following(doubling) as process:
        (worker,) = processes(doubling)
        for signum in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker, signum)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)

    assert process.returncode == 0, err
    assert (json.loads(out)["status"], json.loads(out)["restarts"]) == ("stopped", 0)
    assert rows(store_url, "numbers") == DOUBLED
    assert not Path(f"/proc/{worker}").exists()


def test_restart_with_changed_code_is_refused(doubling: Project) -> None:
    with following(doubling) as process:
        rules = doubling.write("jobs/_rules.py", RULES.replace("* 2", "* 3"))
        (worker,) = processes(doubling)
        os.kill(worker, signal.SIGKILL)
        _, err = process.communicate(timeout=60)

    assert process.returncode == 2
    assert f"numbers: {rules} was changed since the run began: run again, with one state of the code" in err


def test_traceback_of_a_worker_is_kept(doubling: Project, tmp_path: Path) -> None:
    doubling.write("jobs/_rules.py", RULES.replace('row["n"] * 2', 'row["nothing"]'))

    done = doubling.etl("run", "--workers", "1", "--quiet", "jobs.doubling")

    assert done.returncode == 70
    (kept,) = (tmp_path / "state/etl/tracebacks").iterdir()
    assert "_rules.py" in kept.read_text()


@contextmanager
def following(project: Project) -> Iterator[subprocess.Popen[str]]:
    """A run with a worker that follows its source and has written something already."""
    with started(project, "run", "--workers", "1", "--follow", "--json", "jobs.doubling") as process:
        await_file(project.dir / "written", process)
        yield process
