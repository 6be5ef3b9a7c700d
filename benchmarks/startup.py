"""How long the command line takes to answer, and a run that finds nothing new."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.contenders import Task, product
from benchmarks.data import create_table, csv_file
from benchmarks.process import Measured, measure
from benchmarks.report import Check, Report, machine, tell
from benchmarks.server import Server, etl_command, migrate, product_environ

HELP_BOUND_S = 0.2
IDLE_RUN_BOUND_S = 1.0
_ROWS = 1000


def run_startup(server: Server, rounds: int, cache_dir: Path, work_dir: Path) -> Report:
    """Run the benchmark: medians of so many rounds each."""
    with server.database() as name:
        url = server.database_url(name)
        migrate(url, work_dir)
        with server.connect(url) as connection:
            create_table(connection)
        task = Task(server, url, csv_file(cache_dir, server, url, _ROWS), work_dir)
        load = product("two-phase")
        load(task)  # reads everything there is
        checks = (
            _check("etl --help", rounds, HELP_BOUND_S, lambda: _help(task)),
            _check("etl run, nothing new", rounds, IDLE_RUN_BOUND_S, lambda: load(task)),
        )
    return Report("startup", checks, {}, {"rounds": rounds, **machine(server.version)})


def _help(task: Task) -> Measured:
    return measure([*etl_command(), "--help"], task.work_dir, product_environ(task.url, task.work_dir))


def _check(name: str, rounds: int, bound_s: float, once: Callable[[], Measured]) -> Check:
    samples = []
    for _ in range(rounds):
        samples.append(once().seconds)
        tell(f"{name}: {samples[-1]:.3f} s")
    return Check.of_samples(name, samples, bound_s, "s")
