"""What is released is complete: the wheel alone makes a project, migrates a store and runs a job."""

from __future__ import annotations

import csv
import json
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.packaging.conftest import CHECKOUT, Installation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def relative_files(directory: str, suffix: str) -> set[str]:
    return {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / directory).rglob(f"*{suffix}")}


def test_wheel_holds_the_packages_and_nothing_else(built: tuple[Path, Path, Path]) -> None:
    names = names_in(built[2])

    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"etl", "sinks"}
    assert {name for name in names if "__pycache__" in name or name.endswith(".pyc")} == set()


def test_wheel_holds_every_module_and_the_marks_of_typed_packages(built: tuple[Path, Path, Path]) -> None:
    names = names_in(built[2])

    assert (relative_files("etl", ".py") | relative_files("sinks", ".py")) - names == set()
    assert {"etl/py.typed", "sinks/py.typed"} <= names


def test_wheel_holds_the_migrations_inside_the_package(built: tuple[Path, Path, Path]) -> None:
    names = names_in(built[2])

    expected = relative_files("migrations", ".py") | relative_files("migrations", ".mako")
    assert {name.replace("migrations/", "etl/store/_migrations/", 1) for name in expected} <= names


def test_sdist_holds_what_is_needed_to_test_it(built: tuple[Path, Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    expected = {"README.md", "LICENSE", "CHANGELOG.md", "requirements-dev.lock", ".ci/run", "tests/conftest.py"}
    assert expected <= names
    assert relative_files("jobs", ".csv") <= names


def test_installed_packages_can_be_imported_without_warnings(installation: Installation) -> None:
    code = "import etl, sinks; [getattr(etl, name) for name in etl.__all__]; print(etl.__file__, sinks.__file__)"

    result = installation.run("python", "-I", "-W", "error", "-c", code)

    assert result.returncode == 0, result.stderr
    assert str(CHECKOUT) not in result.stdout


def test_installed_command_tells_its_version(installation: Installation) -> None:
    result = installation.run("etl", "--version")

    version = installation.wheel.name.split("-")[1]
    assert (result.returncode, result.stdout) == (0, f"etl {version}\n")


def test_installed_command_makes_a_project_and_runs_its_job(installation: Installation) -> None:
    made = installation.run("etl", "init", "demo")
    assert made.returncode == 0, made.stderr
    demo = installation.dir / "demo"

    first = installation.run("etl", "run", "--json", "jobs/first_job.py", cwd=demo)
    second = installation.run("etl", "run", "--json", "jobs/first_job.py", cwd=demo)

    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    summary = json.loads(first.stdout)
    assert summary["rows_read"] == sum(records_in(path) for path in (demo / "data" / "orders").glob("*.csv"))
    assert json.loads(second.stdout)["rows_read"] == 0
    with running_server(installation, demo) as url, psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT (SELECT count(*) FROM paid_orders), (SELECT count(*) FROM customers)"
        ).fetchone()
    assert row is not None
    assert row[0] == summary["rows_written"]["paid_orders"] > 0
    assert 0 < row[1] <= summary["rows_written"]["customers"]


def test_installed_command_stops_its_server_when_it_has_ended(installation: Installation) -> None:
    directory = installation.dir / "ended"
    assert installation.run("etl", "init", "ended").returncode == 0
    assert installation.run("etl", "run", "--quiet", "jobs/first_job.py", cwd=directory).returncode == 0

    status = installation.run("etl", "server", "status", cwd=directory)

    assert status.returncode == 69, status.stdout


def records_in(path: Path) -> int:
    with path.open(newline="") as file:
        return sum(1 for _ in csv.DictReader(file))


@contextmanager
def running_server(installation: Installation, project: Path) -> Iterator[str]:
    """The URL of the installation's server, up for the block."""
    started = installation.run("etl", "server", "start", cwd=project)
    assert started.returncode == 0, started.stderr
    try:
        yield installation.run("etl", "server", "url", cwd=project).stdout.strip()
    finally:
        stopped = installation.run("etl", "server", "stop", cwd=project)
    assert stopped.returncode == 0, stopped.stderr
