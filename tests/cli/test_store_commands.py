"""``etl status``, ``etl history`` and ``etl db``."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from etl.store.embedded import EmbeddedServer
from etl.store.migrations import HEAD
from tests.cli.conftest import TIMEOUT_S, Project, await_file, started
from tests.support.databases import fresh_database
from tests.support.waiting import wait_until

HISTORY_KEYS = [
    "run_id", "job", "status", "started_at", "ended_at", "duration_s", "rows_read", "rows_written", "rows_rejected",
    "checkpoint", "restarts", "exit_code", "error",
]  # fmt: skip


@pytest.fixture
def used(stored: Project) -> Project:
    """A store on which one job has run well and another one has failed."""
    stored.job("good")
    stored.job("bad", "count=25, bad=13")
    assert stored.etl("run", "--quiet", "jobs.good", "jobs.bad").returncode == 65
    return stored


def test_status_shows_where_each_job_stands(used: Project) -> None:
    done = used.etl("status")

    header, bad, good = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert header.split()[:3] == ["JOB", "STATE", "CHECKPOINT"]
    assert bad.split() == ["bad", "idle", "0", "-", "failed", "0", "0"]
    assert good.split()[:3] == ["good", "idle", "1"]
    assert good.split()[-3:] == ["succeeded", "25", "25"]


def test_status_tells_a_killed_run_from_one_that_works(stored: Project, tmp_path: Path) -> None:
    stored.job("numbers", sink=f", marker={str(tmp_path / 'written')!r}")
    with started(stored, "run", "--follow", "jobs.numbers") as process:
        await_file(tmp_path / "written", process)
        working = stored.etl("status").stdout.splitlines()[1]
        process.kill()
        process.wait()
    with psycopg.connect(stored.environ["ETL_DATABASE_URL"], autocommit=True) as connection:
        owners = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '%:owner'"
        wait_until(lambda: not connection.execute(owners).fetchall(), "the end of the killed run's session")
    killed = stored.etl("status").stdout.splitlines()[1]
    assert (working.split()[1], killed.split()[1]) == ("running", "interrupted")
    assert stored.etl("run", "--quiet", "jobs.numbers").returncode == 0
    assert stored.etl("status").stdout.splitlines()[1].split()[1] == "idle"


def test_status_of_a_job_shows_its_positions(used: Project) -> None:
    shown = used.etl("status", "good").stdout
    document = json.loads(used.etl("status", "good", "--json").stdout)

    assert "table: 25" in shown
    assert shown.splitlines()[-1].split() == ["numbers", "all", "next", "25", "1"]
    assert (document["job"], document["checkpoint"], document["running"]) == ("good", 1, False)
    assert document["rows_written"] == {"table": 25}
    assert document["positions"] == [{"uid": "numbers", "split": "all", "position": {"next": 25}, "checkpoint": 1}]


def test_status_as_json_is_a_list(used: Project) -> None:
    assert [entry["job"] for entry in json.loads(used.etl("status", "--json").stdout)] == ["bad", "good"]


@pytest.mark.parametrize("command", ["status", "history"])
def test_unknown_job_is_refused_with_the_known_ones(used: Project, command: str) -> None:
    done = used.etl(command, "god")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'etl: error: no job named "god" has run on this store; known: bad, good\n'


@pytest.mark.parametrize("command", ["status", "history"])
def test_empty_store_is_no_error(stored: Project, command: str) -> None:
    done = stored.etl(command)

    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (0, "", 1)
    assert json.loads(stored.etl(command, "--json").stdout) == []


def test_history_shows_runs_newest_first(used: Project) -> None:
    used.etl("run", "--quiet", "jobs.good")

    runs = json.loads(used.etl("history", "--json").stdout)

    assert [list(run) for run in runs] == [HISTORY_KEYS] * 3
    assert [(run["job"], run["status"], run["exit_code"], run["rows_read"]) for run in runs] == [
        ("good", "succeeded", 0, 0),
        ("bad", "failed", 65, 0),
        ("good", "succeeded", 0, 25),
    ]
    assert runs[2]["rows_written"] == {"table": 25}
    assert runs[1]["error"] == "number 13 is bad"


def test_history_is_limited_to_a_job_and_a_number(used: Project) -> None:
    used.etl("run", "--quiet", "jobs.good")

    header, newest = used.etl("history", "good", "--limit", "1").stdout.splitlines()

    assert header.split()[:3] == ["RUN", "JOB", "STATUS"]
    assert newest.split()[1:3] == ["good", "succeeded"]


def test_db_upgrade_creates_the_schema_once(project: Project, database_url: str) -> None:
    before = project.etl("db", "current", ETL_DATABASE_URL=database_url)
    first = project.etl("db", "upgrade", ETL_DATABASE_URL=database_url)
    second = project.etl("db", "upgrade", ETL_DATABASE_URL=database_url)
    after = project.etl("db", "current", ETL_DATABASE_URL=database_url)

    assert (before.returncode, before.stdout) == (2, "absent\n")
    assert first.stdout.startswith(f"schema etl of database store: absent -> {HEAD} (host=")
    assert second.stdout.startswith(f"schema etl of database store is at revision {HEAD} already (host=")
    assert (after.returncode, after.stdout) == (0, f"{HEAD}\n")


def test_db_upgrade_reaches_a_named_database(stored: Project, server_url: str) -> None:
    with fresh_database(server_url) as other:
        done = stored.etl("db", "upgrade", "--database", "reporting", ETL_DATABASE_URL_REPORTING=other)

        with psycopg.connect(other) as connection:
            assert connection.execute("SELECT version_num FROM etl.alembic_version").fetchone() == (HEAD,)
    assert done.returncode == 0


def test_db_upgrade_refuses_an_unknown_name(stored: Project) -> None:
    done = stored.etl("db", "upgrade", "--database", "nowhere")

    assert done.returncode == 2
    assert "'nowhere' is not configured" in done.stderr


def test_store_of_a_newer_version_is_refused(stored: Project, store_url: str) -> None:
    with psycopg.connect(store_url, autocommit=True) as connection:
        connection.execute("UPDATE etl.alembic_version SET version_num = '9999'")

    for arguments in (["status"], ["db", "upgrade"]):
        done = stored.etl(*arguments)
        assert done.returncode == 2
        assert "is at revision 9999, newer than this version knows" in done.stderr


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A state directory that the account of the embedded server can reach, which pytest's own cannot be."""
    with tempfile.TemporaryDirectory(prefix="etl-cli-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory) / "state"


def test_commands_without_any_database_use_the_embedded_server(project: Project, state_dir: Path) -> None:
    project.job("numbers")
    state = {"ETL_STATE_DIR": str(state_dir)}

    first = project.etl("run", "--json", "jobs.numbers", **state)
    second = project.etl("status", "numbers", "--json", **state)

    assert (first.returncode, second.returncode) == (0, 0)
    assert json.loads(first.stdout)["rows_written"] == {"table": 25}
    (position,) = json.loads(second.stdout)["positions"]
    assert position == {"uid": "numbers", "split": "all", "position": {"next": 25}, "checkpoint": 1}


def test_run_goes_on_when_the_embedded_server_dies(project: Project, state_dir: Path, tmp_path: Path) -> None:
    marker = tmp_path / "written"
    project.job("numbers", sink=f", marker={str(marker)!r}")
    state = {"ETL_STATE_DIR": str(state_dir)}
    with started(project, "run", "--follow", "--json", "jobs.numbers", **state) as process:
        await_file(marker, process)
        server = EmbeddedServer(state_dir).status()
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        assert process.stderr is not None
        assert any("attempt failed, restart 1 of" in line for line in process.stderr)
        marker.unlink()
        # The first unit was open when the server died: it is read and written again on the repaired one.
        await_file(marker, process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=TIMEOUT_S)

    summary = json.loads(out)
    assert (process.returncode, summary["status"], summary["rows_written"]) == (0, "stopped", {"table": 25}), err
    assert summary["restarts"] >= 1
