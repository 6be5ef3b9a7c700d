"""Lines of a crontab."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from etl.cli.crontab import crontab_line, etl_command
from etl.errors import ConfigurationError


def test_crontab_line_changes_to_the_project_and_is_quiet() -> None:
    line = crontab_line("*/5 * * * *", "jobs.orders", Path("/srv/etl"), ["/venv/bin/etl"], "skip")

    assert line == "*/5 * * * * cd /srv/etl && /venv/bin/etl run --quiet --if-running skip jobs.orders"


def test_crontab_line_quotes_paths_for_the_shell_and_percent_signs_for_cron() -> None:
    line = crontab_line("0 3 * * 1-5", "/a b/100%.py", Path("/srv/my project"), ["/v/etl"], "wait")

    assert line == (r"0 3 * * 1-5 cd '/srv/my project' && /v/etl run --quiet --if-running wait '/a b/100\%.py'")


@pytest.mark.parametrize("schedule", ["every day", "* * * *", "61 * * * *", "* * * * *\n* * * * * rm -rf /"])
def test_crontab_line_refuses_what_is_no_schedule(schedule: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^jobs.orders: "):
        crontab_line(schedule, "jobs.orders", Path("/srv"), ["/v/etl"], "skip")


def test_crontab_line_refuses_a_path_with_a_line_break() -> None:
    with pytest.raises(ConfigurationError, match="a line break cannot stand in a crontab"):
        crontab_line("* * * * *", "jobs.orders", Path("/srv/a\nb"), ["/v/etl"], "skip")


def test_etl_command_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert etl_command() == [str(tmp_path / "python"), "-m", "etl.cli"]

    (tmp_path / "etl").touch()
    assert etl_command() == [str(tmp_path / "etl")]
