"""The gate's share of the soak, and that it finds what is wrong and can show it again."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from etl.errors import ConfigurationError
from etl.store.embedded.binaries import find_bindir
from tests.faults.described import Operation, Way
from tests.faults.fault import RunRequest
from tests.faults.jobs import declare
from tests.soak.invention import numbered_jobs, plan_job
from tests.soak.plan import Alone, Beside, Crashed, JobPlan, Met, OnTheWire, Overtaken, Together

SEEDS = (1, 2)
CYCLES = 150
"""Of each seed; together the gate's share."""

TELLING_SEED = 15119
"""Its first job leaves a unit that must be dropped: whoever commits all that is prepared has rows too many."""

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 280.0


@pytest.fixture(scope="module")
def embedded() -> None:
    """Servers are killed and stopped: those of the soak are always its own."""
    try:
        find_bindir(os.environ)
    except ConfigurationError as error:
        pytest.skip(str(error))


def soak(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.soak", "--workers", "1", "--json", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def summary(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found = json.loads(process.stdout)
    assert isinstance(found, dict)
    return found


def plans(seed: int, cycles: int) -> Sequence[JobPlan]:
    return [plan_job(seed, number) for number in numbered_jobs(seed, cycles)]


@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize("seed", SEEDS)
def test_random_cycles_leave_everything_there_once(seed: int) -> None:
    planned = plans(seed, CYCLES)

    process = soak("--cycles", str(CYCLES), "--seed", str(seed))

    assert process.returncode == 0, process.stderr
    told = summary(process)
    cycles = sum(len(plan.cycles) for plan in planned)
    assert (told["seed"], told["jobs"], told["cycles"], told["failures"]) == (seed, len(planned), cycles, 0)
    assert cycles >= CYCLES
    assert told["runs"] >= cycles
    assert set(told["faults"]) >= {"kill -9", "sessions terminated", "SIGTERM", "exception", "server killed"}


@pytest.mark.usefixtures("embedded")
def test_broken_engine_is_found_and_shown_again() -> None:
    process = soak("--cycles", "1", "--seed", str(TELLING_SEED), "--mutant", "COMMIT_ALL")

    assert process.returncode == 1, process.stderr
    told = summary(process)
    assert (told["jobs"], told["failures"]) == (1, 1)
    found = "\n".join(["FAILURE in cycle 2", *plan_job(TELLING_SEED, 0).lines(), "Traceback"])
    assert found in process.stderr
    assert "the target has rows of checkpoint 1, and the store knows none after 0" in process.stderr
    (again,) = re.findall(r"^again: python (.*)$", process.stderr, re.MULTILINE)
    assert again == f"-m tests.soak --seed {TELLING_SEED} --job 0 --mutant COMMIT_ALL"
    replayed = subprocess.run(
        [sys.executable, *shlex.split(again)], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert replayed.returncode == 1, replayed.stderr
    assert found in replayed.stderr
    assert replayed.stdout == ""


@pytest.mark.usefixtures("embedded")
def test_sound_engine_passes_the_job_in_which_the_broken_one_fails() -> None:
    process = soak("--seed", str(TELLING_SEED), "--job", "0")

    assert process.returncode == 0, process.stderr
    told = summary(process)
    assert (told["jobs"], told["cycles"], told["failures"], told["faults"]) == (1, 3, 0, {"kill -9": 1})


def test_same_seed_and_number_make_the_same_plan() -> None:
    assert plan_job(5, 17) == plan_job(5, 17)
    assert plan_job(5, 17) != plan_job(6, 17)
    assert plan_job(5, 17) != plan_job(5, 18)


def test_plans_are_valid_jobs_and_leave_nothing_out() -> None:
    made = [plan_job(1, number) for number in range(200)]

    for plan in made:
        declare(RunRequest("described", "job", "", "", "", described=plan.described)).graph()
    nodes = [node.operation for plan in made for node in plan.described.nodes]
    sinks = {(sink.way, sink.keyed, sink.versioned, sink.other) for plan in made for sink in plan.described.sinks}
    happenings = {type(cycle.happening) for plan in made for cycle in plan.cycles}
    assert set(nodes) == set(Operation)
    assert sinks == {
        (way, keyed, versioned, other)
        for way in Way
        for keyed, versioned in ((False, False), (True, False), (True, True))
        for other in (False, True)
        if (keyed or way is not Way.UPSERT) and (not other or way is not Way.TRANSACTIONAL)
    }
    assert happenings == {Alone, Beside, Crashed, Met, OnTheWire, Overtaken, Together}
    assert {len(plan.described.sources) for plan in made} == {len(plan.described.sinks) for plan in made} == {1, 2, 3}
    assert {plan.watched for plan in made} == {False, True}
    assert {plan.described.keep for plan in made} == {3, 5, 1000}
