"""The entry point: help, version, mistakes at the keyboard."""

from __future__ import annotations

import resource
import subprocess
import sys

import click
import pytest

from etl.cli.main import COMMANDS, execute
from tests.cli.conftest import CHECKOUT, Project


def test_help_lists_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["--help"]) == 0

    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert all(f"{code}" in shown for code in (0, 2, 65, 69, 70, 75, 78, 130, 143))


def test_help_imports_nothing_but_click_and_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); from etl.cli.main import execute; execute(['--help']);"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)

    assert done.stderr.strip() == "['click', 'etl']"


def test_help_takes_at_most_a_fifth_of_a_second() -> None:
    def measure() -> float:
        # Processor time, which is the command's own: on an idle machine it takes no longer than that, and here it
        # would otherwise be blamed for what runs beside it.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "etl.cli", "--help"], cwd=CHECKOUT, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)

    assert min(measure() for _ in range(5)) <= 0.2


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "server"])
def test_command_in_the_table_is_the_one_it_names(name: str) -> None:
    command = COMMANDS[name].load()

    assert command.name == name
    assert isinstance(command, click.Group) == (name in ("state", "savepoint", "db", "server"))


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["--version"]) == 0
    assert capsys.readouterr().out.startswith("etl ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["foo"], "etl: error: No such command 'foo'; see etl --help"),
        (["run"], "etl: error: Missing argument 'JOB...'; see etl run --help"),
        (["list", "--bar"], "etl: error: No such option '--bar'; see etl list --help"),
    ],
)
def test_usage_error_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(arguments) == 2

    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", line + "\n")


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute([]) == 2
    assert "Commands:" in capsys.readouterr().err


def test_closed_stdout_ends_quietly_as_any_unix_tool(project: Project) -> None:
    project.job("numbers")
    shell = f"{sys.executable} -m etl.cli list --json | exec true; echo ${{PIPESTATUS[0]}}"

    done = subprocess.run(
        ["bash", "-c", shell], cwd=project.dir, env=dict(project.environ), capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() in ("0", "141")
    assert done.stderr == ""


def test_full_disk_under_stdout_is_an_error(project: Project) -> None:
    project.job("numbers")
    shell = f"{sys.executable} -m etl.cli list > /dev/full"

    done = subprocess.run(
        ["sh", "-c", shell], cwd=project.dir, env=dict(project.environ), capture_output=True, text=True, check=False
    )

    assert done.returncode == 70
    assert done.stderr == "etl: error: stdout cannot be written: No space left on device\n"
