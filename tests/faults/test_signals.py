"""SIGTERM and SIGINT to the command line, following real files into real tables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults import oracle
from tests.faults.arena import Arena
from tests.faults.jobs import KINDS
from tests.support.waiting import wait_until

COMMAND = """
import signal
# Workers of a parallel test session ignore it, and the command line leaves alone what its parent had ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from etl.cli.main import main
main()
"""
STOP_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0

JOB = """
from etl.policy import CheckpointPolicy
from etl.job import Job
from tests.faults.jobs import KINDS

job = Job({name!r}, checkpoint=CheckpointPolicy(interval_s=600, rows=5, keep=1000))
KINDS[{kind!r}].declare(job)
"""


@pytest.mark.parametrize("signum, exit_code", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize("kind", ["transactional", "two-phase", "write-ahead", "upsert"])
def test_following_run_ends_with_a_final_checkpoint(
    arena: Arena, tmp_path: Path, kind: str, signum: signal.Signals, exit_code: int
) -> None:
    request = arena.case(kind)
    _make_project(tmp_path, arena, request.job, kind)
    environment = {**os.environ, "ETL_DATABASE_URL": arena.store_url, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", COMMAND, "run", "--follow", "jobs.following"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            # Two checkpoints are taken for their rows; the last rows wait for the interval, or for the signal.
            _await_checkpoint(arena, request.job, 2)
            started_s = time.monotonic()
            process.send_signal(signum)
            _, told = process.communicate(timeout=STOP_TIMEOUT_S)
        finally:
            process.kill()

    assert process.returncode == exit_code, told
    assert time.monotonic() - started_s < STOP_TIMEOUT_S
    state = oracle.read_state(arena.store, request.job)
    read = state.rows(KINDS[kind], state.checkpoint)
    (target,) = KINDS[kind].targets
    assert oracle.visible_rows(arena, target) == target.expected(read)
    assert state.checkpoint in (2, 3)
    oracle.check_nothing_left(arena)


def _make_project(directory: Path, arena: Arena, job: str, kind: str) -> None:
    (directory / "jobs").mkdir()
    (directory / "jobs" / "__init__.py").touch()
    (directory / "jobs" / "following.py").write_text(JOB.format(name=job, kind=kind), encoding="utf-8")
    (directory / "etl.toml").touch()
    (directory / "orders").symlink_to(arena.input_dir / "orders")


def _await_checkpoint(arena: Arena, job: str, number: int) -> None:
    wait_until(
        lambda: oracle.read_state(arena.store, job).checkpoint >= number, f"checkpoint {number}", START_TIMEOUT_S
    )
