from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from etl.cli.main import execute
from tests.support.embedded import REPOSITORY, state_directory


@pytest.fixture(autouse=True)
def state_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No database is configured, and the server lies in a directory of this test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ETL_DATABASE_URL", raising=False)
    with state_directory() as path:
        monkeypatch.setenv("ETL_STATE_DIR", str(path))
        yield path


def test_server_runs_from_start_to_stop(capfd: pytest.CaptureFixture[str], state_dir: Path) -> None:
    home = state_dir / "postgresql"
    assert execute(["server", "status"]) == 69
    assert capfd.readouterr().out == f"not created yet: {home}\n"
    assert execute(["server", "start"]) == 0
    started = capfd.readouterr().out
    assert started.startswith(f"running: {home}, PostgreSQL 18, pid ")
    assert started.endswith(", kept running\n")
    assert execute(["server", "status"]) == 0
    assert capfd.readouterr().out == started
    for arguments in (["server", "url"], ["server", "url", "--tcp"]):
        assert execute(arguments) == 0
        with psycopg.connect(capfd.readouterr().out.strip()) as connection:
            assert connection.execute("SELECT current_database()").fetchone() == ("etl",)
    assert execute(["server", "stop"]) == 0
    assert capfd.readouterr().out == "stopped\n"
    assert execute(["server", "status"]) == 69
    assert capfd.readouterr().out == f"stopped: {home}, PostgreSQL 18\n"


def test_stop_says_that_it_is_in_use(capfd: pytest.CaptureFixture[str], state_dir: Path) -> None:
    from etl.store.embedded import EmbeddedServer

    with EmbeddedServer(state_dir):
        assert execute(["server", "stop"]) == 75
        assert capfd.readouterr().out == "in use: the last command that uses it stops it\n"
        assert execute(["server", "stop", "--force"]) == 0
        assert capfd.readouterr().out == "stopped\n"


def test_url_is_refused_when_stopped(capfd: pytest.CaptureFixture[str]) -> None:
    assert execute(["server", "url"]) == 69
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == 'etl: error: the embedded server is not running; "etl server start" starts it\n'


@pytest.mark.parametrize("command", ["start", "stop", "status", "url"])
def test_commands_refuse_when_a_database_is_configured(
    command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, state_dir: Path
) -> None:
    monkeypatch.setenv("ETL_DATABASE_URL", "postgresql://db.invalid/d")
    assert execute(["server", command]) == 2
    assert capfd.readouterr().err == "etl: error: a database is configured; the embedded server is not used\n"
    assert not state_dir.exists()


def test_help_imports_no_database_driver() -> None:
    program = "import sys, etl.cli.server; sys.exit('psycopg' in sys.modules or 'sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=False).returncode == 0
