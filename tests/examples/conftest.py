"""A project with the example jobs in it, and ``etl`` as a process there, on the test session's server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import tuple_row

CHECKOUT = Path(__file__).parents[2]
TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class ExampleProject:
    """A copy of the example jobs.

    Attributes:
        dir: Where it is.
        url: The store's database.
        environ: What the processes see.
    """

    dir: Path
    url: str
    environ: Mapping[str, str]

    def run(self, job: str, *options: str) -> dict[str, Any]:
        """Run a job to its end, which must be a good one, and return its summary."""
        code, out, err = self.attempt(job, *options)
        assert code == 0, err
        summary: dict[str, Any] = json.loads(out)
        return summary

    def attempt(self, job: str, *options: str) -> tuple[int, str, str]:
        """Run a job to its end; returns the exit code and what was printed on stdout and stderr."""
        with self.started(job, *options) as process:
            out, err = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, out, err

    @contextmanager
    def started(self, job: str, *options: str) -> Iterator[subprocess.Popen[str]]:
        """A job under way, killed at the end of the block if it still runs."""
        command = [sys.executable, "-m", "etl.cli", "run", "--json", *options, job]
        with subprocess.Popen(
            command,
            cwd=self.dir,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Any]]:
        """An autocommit session in UTC."""
        with psycopg.connect(self.url, autocommit=True, row_factory=tuple_row) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            yield connection

    def rows(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """All rows of a table, in no order."""
        names = sql.SQL(", ").join(map(sql.Identifier, columns))
        with self.connection() as connection:
            return connection.execute(sql.SQL("SELECT {} FROM {}").format(names, sql.Identifier(table))).fetchall()

    def count(self, query: str) -> int:
        """The number that a query yields."""
        with self.connection() as connection:
            row = connection.execute(query.encode()).fetchone()
        assert row is not None
        return int(row[0])


@pytest.fixture
def examples(tmp_path: Path, store_url: str) -> ExampleProject:
    """The example jobs as a project of their own, so that nothing is written into the checkout."""
    project = tmp_path / "project"
    shutil.copytree(CHECKOUT / "jobs", project / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
    (project / "etl.toml").touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ETL_", "PG", "XDG_"))}
    environ = {
        **kept,
        "HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(CHECKOUT),
        "ETL_DATABASE_URL": store_url,
    }
    return ExampleProject(project, store_url, environ)
