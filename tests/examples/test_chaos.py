"""The example jobs survive a crash at every step of the protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.examples.conftest import ExampleProject

TIMEOUT_S = 280
THOROUGH = pytest.mark.skipif(not os.environ.get("ETL_FAULTS_THOROUGH"), reason="half a minute: ETL_FAULTS_THOROUGH=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "sinks"),
    [
        ("jobs.airports", {"airports": 200}),
        pytest.param("jobs.revenue", {"orders": 9, "refunds": 2}, marks=THOROUGH),
        pytest.param("jobs.sessions", {"visits": 3, "late_clicks": 0}, marks=THOROUGH),
        pytest.param("jobs.flights", {"flights": 200, "late_arrivals": 2}, marks=THOROUGH),
    ],
)
def test_example_is_exact_after_a_kill_at_every_step(examples: ExampleProject, job: str, sinks: dict[str, int]) -> None:
    command = [sys.executable, "-m", "etl.cli", "chaos", job, "--rows", "200", "--occurrences", "1", "--json"]
    done = subprocess.run(
        command, cwd=examples.dir, env=examples.environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["status"], report["untried"], report["wrong"]) == ("ok", 0, [])
    assert {uid: sink["rows"] for uid, sink in report["sinks"].items()} == sinks
    assert report["checkpoints"] >= 4
    cells = [cell for row in report["steps"] for cell in row["sinks"].values()]
    assert [cell["result"] for cell in cells] == ["ok"] * len(cells)
    assert len(report["steps"]) >= 25
    assert examples.count("SELECT count(*) FROM etl.job") == 0
    assert (
        examples.count(
            "SELECT count(*) FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema', 'etl')"
        )
        == 0
    )
