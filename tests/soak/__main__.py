"""``python -m tests.soak``: plays random jobs in several processes and says what came of them."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from tests.model.mutants import Mutant
from tests.soak.invention import numbered_jobs, plan_job
from tests.soak.worker import Played, work
from tests.support.servers import SessionDirectory, sweep_dead_sessions

PROGRESS_S = 10.0
CYCLES = 300


@dataclass(slots=True)
class Totals:
    """What came of all jobs so far."""

    seed: int
    started_s: float = field(default_factory=time.monotonic)
    cycles: int = 0
    jobs: int = 0
    runs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failures: int = 0

    def add(self, played: Played) -> None:
        """Count a job."""
        self.jobs += 1
        self.cycles += played.cycles
        self.runs += played.runs
        self.faults.update(played.faults)
        self.failures += bool(played.failure)

    @property
    def duration_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.started_s

    def line(self) -> str:
        """Progress."""
        speed = self.cycles / max(self.duration_s, 0.001)
        return f"{self.cycles} cycles, {self.jobs} jobs, {speed:.1f} cycles/s, {self.failures} failure(s)"

    def to_json(self) -> str:
        """The summary."""
        return json.dumps(
            {
                "seed": self.seed,
                "cycles": self.cycles,
                "jobs": self.jobs,
                "runs": self.runs,
                "faults": dict(sorted(self.faults.items())),
                "duration_s": round(self.duration_s, 1),
                "failures": self.failures,
            }
        )


class Crew:
    """The workers, and which job each of them plays.

    Args:
        size: How many.
        seed: Of the soak.
        mutant: What is wrong with the engine.
    """

    def __init__(self, size: int, seed: int, mutant: Mutant | None) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[SpawnProcess] = []
        self._idle: list[Connection] = []
        self._busy: dict[Connection, int] = {}
        for _ in range(size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=work, args=(theirs, seed, mutant))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._idle.append(ours)

    def play(self, numbers: Iterator[int], ends_s: float) -> Iterator[Played | None]:
        """Play these jobs until a time; yields what came of each, and None now and then."""
        more = True
        while True:
            while more and self._idle:
                number = next(numbers, None) if time.monotonic() < ends_s else None
                more = number is not None
                if number is not None:
                    self._order(self._idle.pop(), number)
            if not self._busy:
                return
            for connection in wait(list(self._busy), 1.0):
                assert isinstance(connection, Connection)
                yield self._result(connection)
            yield None

    def _order(self, worker: Connection, number: int) -> None:
        self._busy[worker] = number
        worker.send(number)

    def _result(self, worker: Connection) -> Played:
        number = self._busy.pop(worker)
        try:
            played = worker.recv()
        except EOFError:
            worker.close()
            return Played(number, 0, 0, failure="the worker's process has ended; see above")
        assert isinstance(played, Played)
        self._idle.append(worker)
        return played

    def close(self) -> None:
        """Send them home."""
        for worker in (*self._idle, *self._busy):
            worker.close()
        for process in self._processes:
            process.join()


@contextmanager
def crew(size: int, seed: int, mutant: Mutant | None) -> Iterator[Crew]:
    """Workers for the block, in a directory for their servers."""
    sweep_dead_sessions()
    directory = SessionDirectory()
    try:
        made = Crew(size, seed, mutant)
        try:
            yield made
        finally:
            made.close()
    finally:
        directory.remove()


def main() -> int:
    """The command."""
    options = _options()
    # The workers' servers are ended also when somebody ends the soak.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    totals = Totals(options.seed)
    _say(f"seed {options.seed}, {options.workers} worker(s)")
    numbers = iter([options.job]) if options.job is not None else _numbers(options)
    ends_s = totals.started_s + 60 * options.minutes
    due_s = totals.started_s + PROGRESS_S
    with crew(options.workers, options.seed, options.mutant and Mutant[options.mutant]) as workers:
        for played in workers.play(numbers, ends_s):
            if played is not None:
                totals.add(played)
                if played.failure:
                    _tell(options, played)
            if time.monotonic() >= due_s:
                due_s += PROGRESS_S
                _say(totals.line())
    _say(f"{totals.line()} in {totals.duration_s:.0f} s")
    if options.json:
        print(totals.to_json())
    return 1 if totals.failures else 0


def _numbers(options: argparse.Namespace) -> Iterator[int]:
    return count() if options.cycles is None else numbered_jobs(options.seed, options.cycles)


def _tell(options: argparse.Namespace, played: Played) -> None:
    again = ["python", "-m", "tests.soak", "--seed", str(options.seed), "--job", str(played.job)]
    if options.mutant is not None:
        again += ["--mutant", options.mutant]
    plan = plan_job(options.seed, played.job).lines()
    at = f"FAILURE in cycle {played.cycles + 1}"
    _say("\n".join([at, *plan, played.failure.rstrip(), f"again: {shlex.join(again)}", ""]))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--cycles", type=int, help=f"play jobs until there were so many (default: {CYCLES})")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32), help="decides everything but the time")
    parser.add_argument("--job", type=int, help="play this one job alone")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no job after so many")
    parser.add_argument("--json", action="store_true", help="print a summary object on stdout")
    parser.add_argument("--mutant", choices=Mutant.__members__, help="break the engine on purpose")
    options = parser.parse_args()
    if options.job is not None:
        options.workers = 1
    elif options.cycles is None and options.minutes == float("inf"):
        options.cycles = CYCLES
    return options


if __name__ == "__main__":
    sys.exit(main())
