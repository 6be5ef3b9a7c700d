"""Who adds up payments by key: the product by expressions and by a function, polars, and Bytewax."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import Load, Task
from benchmarks.process import Measured, measure
from benchmarks.server import etl_command, product_environ

BYTEWAX = "0.21.1"
INTERVAL_S = 1.0
NEVER_S = 100_000.0
"""No run takes so long: its only checkpoint is that of its end."""

_JOB, _POLARS, _BYTEWAX = (
    Path(__file__).with_name(name) for name in ("state_job.py", "polars_totals.py", "bytewax_totals.py")
)


@dataclass(frozen=True, slots=True)
class Product:
    """``etl run`` of the job.

    Attributes:
        by: ``expressions`` or ``function``.
        interval_s: Seconds from checkpoint to checkpoint.
        checkpoint_rows: A checkpoint after so many rows as well, and all of them are kept; None for neither.
        before: Files that the job has read in an earlier run.
    """

    by: str = "expressions"
    interval_s: float = INTERVAL_S
    checkpoint_rows: int | None = None
    before: tuple[Path, ...] = ()

    def __call__(self, task: Task) -> Measured:
        """Run it to its end."""
        environ = {
            **product_environ(task.url, task.work_dir),
            "ETL_BENCHMARK_CSV": os.pathsep.join(map(str, (*self.before, task.csv))),
            "ETL_BENCHMARK_BY": self.by,
            "ETL_BENCHMARK_INTERVAL_S": str(self.interval_s),
        }
        if self.checkpoint_rows is not None:
            environ["ETL_BENCHMARK_CHECKPOINT_ROWS"] = str(self.checkpoint_rows)
        return measure([*etl_command(), "run", str(_JOB), "--json"], task.work_dir, environ)


def polars_totals(task: Task) -> Measured:
    """The whole file at once by polars, which prints what it found and writes nothing."""
    return measure([sys.executable, _POLARS, task.csv], task.work_dir)


def bytewax_totals(python: Path, *, recovers: bool) -> Load:
    """Bytewax in one process, with or without its recovery store."""

    def load(task: Task) -> Measured:
        arguments = [str(task.csv)]
        if recovers:
            recovery_dir = task.work_dir / f"recovery-{os.urandom(6).hex()}"
            recovery_dir.mkdir()
            arguments.append(str(recovery_dir))
        return measure([python, _BYTEWAX, *arguments], task.work_dir, {"ETL_DATABASE_URL": task.url})

    return load


def make_bytewax_python(cache_dir: Path) -> Path:
    """The interpreter of an environment with Bytewax, made when the cache does not hold it.

    It takes shape under another name: one that was left half made is never used.
    """
    environment = cache_dir / f"bytewax-{BYTEWAX}"
    if not environment.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        making = environment.with_name(f"{environment.name}.{os.getpid()}")
        measure([sys.executable, "-m", "venv", making], cache_dir)
        packages = [f"bytewax=={BYTEWAX}", "psycopg[binary]"]
        measure([making / "bin" / "python", "-m", "pip", "install", "--quiet", *packages], cache_dir)
        making.rename(environment)
    return environment / "bin" / "python"
