"""A process that plays one job after the other, on a server of its own."""

from __future__ import annotations

import shutil
import signal
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from tests.faults.crashing import CrashingServer
from tests.model.mutants import Mutant
from tests.soak.invention import plan_job
from tests.soak.player import Player
from tests.soak.stage import Stage, open_stage


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a job.

    Attributes:
        job: Its number.
        cycles: How many of its cycles were played.
        runs: How many runs were started.
        faults: What has happened, by kind.
        failure: What is wrong, empty when nothing is.
    """

    job: int
    cycles: int
    runs: int
    faults: dict[str, int] = field(default_factory=dict)
    failure: str = ""


def work(orders: Connection, seed: int, mutant: Mutant | None) -> None:
    """Play the jobs whose numbers come, until nobody is there any more who would ask.

    Args:
        orders: Numbers come in, results go out.
        seed: Of the soak.
        mutant: What is wrong with the engine.
    """
    # Who presses Ctrl-C means the soak, which then sends its workers home.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _server() as server, tempfile.TemporaryDirectory(prefix="etl-soak-") as directory:
        while True:
            # After a failure everything is made anew: what it has left must not be blamed on the next job.
            with open_stage(server, Path(directory), mutant) as stage:
                if not _play_until_failure(orders, stage, seed):
                    return


def _play_until_failure(orders: Connection, stage: Stage, seed: int) -> bool:
    """False when there is nothing more to play."""
    while True:
        try:
            number = orders.recv()
        except EOFError:
            return False
        played = play(stage, seed, number)
        orders.send(played)
        if played.failure:
            return True


def play(stage: Stage, seed: int, number: int) -> Played:
    """Play one job."""
    before = stage.runs
    player = Player(stage, plan_job(seed, number))
    failure = ""
    try:
        player.play()
    except Exception as error:  # noqa: BLE001 - told by whoever asked for the job
        failure = "".join(traceback.format_exception(error))
        stage.arena.clean()
    finally:
        shutil.rmtree(stage.arena.input_dir / f"job-{number}")
    return Played(number, player.played, stage.runs - before, dict(+player.faults), failure)


@contextmanager
def _server() -> Iterator[CrashingServer]:
    server = CrashingServer()
    try:
        yield server
    finally:
        server.close()
