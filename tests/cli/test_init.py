"""A new project: what is written, and that it runs."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from psycopg.rows import scalar_row

from etl.cli.init import template_files
from etl.cli.main import execute
from tests.cli.conftest import Project

CHECKOUT = Path(__file__).parents[2]
FILES = [
    ".gitignore",
    "README.md",
    "data/orders/2024-05-01.csv",
    "data/orders/2024-05-02.csv",
    "etl.toml",
    "jobs/__init__.py",
    "jobs/first_job.py",
    "tests/test_first_job.py",
]


def test_init_creates_a_project_and_says_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "my project"

    assert execute(["init", str(target)]) == 0

    created = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert created == FILES
    assert capsys.readouterr().out.splitlines() == [
        f"created 8 files in {target}",
        f"next: cd '{target}' && etl run jobs/first_job.py",
    ]


def test_init_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "etl.toml").write_text("mine")

    assert execute(["init", str(tmp_path)]) == 2

    assert [path.name for path in tmp_path.iterdir()] == ["etl.toml"]
    assert (tmp_path / "etl.toml").read_text() == "mine"
    assert f"  - {tmp_path / 'etl.toml'}: exists already" in capsys.readouterr().err


def test_example_data_has_what_real_data_has() -> None:
    texts = [content.decode() for name, content in template_files() if name.endswith(".csv")]

    records = [record for text in texts for record in csv.DictReader(text.splitlines(keepends=True))]
    assert len(records) == 9
    assert any("\n" in record["note"] for record in records)
    assert any('"' in record["note"] for record in records)
    assert any(record["amount"] == "" for record in records)
    assert any(not record["customer"].isascii() for record in records)


def test_tests_of_a_new_project_pass_without_a_database(tmp_path: Path) -> None:
    assert execute(["init", str(tmp_path)]) == 0
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ETL_", "PG", "PYTEST_"))}
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(CHECKOUT)}

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**environ, **state},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    assert not (tmp_path / "state").exists()


def test_new_project_runs_at_once(project: Project, store_url: str) -> None:
    (project.dir / "etl.toml").unlink()
    for file in (project.dir / "jobs").iterdir():
        file.unlink()
    assert project.etl("init").returncode == 0

    for paid_orders, customers in ((7, 9), (0, 0)):
        done = project.etl("run", "jobs/first_job.py", "--json", ETL_DATABASE_URL=store_url)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["rows_written"] == {"paid_orders": paid_orders, "customers": customers}

    with psycopg.connect(store_url, row_factory=scalar_row) as connection:
        assert connection.execute("SELECT id FROM paid_orders ORDER BY id").fetchall() == [
            1001, 1002, 1004, 1006, 1007, 1008, 1009,
        ]  # fmt: skip
        assert connection.execute("SELECT city FROM customers WHERE customer LIKE 'Zo%'").fetchall() == ["København"]
