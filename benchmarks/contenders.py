"""What is measured against what: the product's sinks, and what a user would write by hand instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from benchmarks.process import Measured, measure
from benchmarks.server import Server, etl_command, product_environ

_SETTERS = ", ".join(f'"{name}" = EXCLUDED."{name}"' for name in ("ts", "user", "amount", "flag", "note"))
_JOB = Path(__file__).with_name("job.py")


class Start(StrEnum):
    """What the table holds before a load."""

    EMPTY = "empty"
    FILLED = "filled"


@dataclass(frozen=True, slots=True)
class Task:
    """One load of one file into one database.

    Attributes:
        server: Where it takes place.
        url: The database: fresh, migrated, with the table.
        csv: The file.
        work_dir: A directory for what the product leaves behind.
    """

    server: Server
    url: str
    csv: Path
    work_dir: Path


Load = Callable[[Task], Measured]


@dataclass(frozen=True, slots=True)
class Pair:
    """A sink, the baseline it is compared with, and the most that their ratio may be.

    Attributes:
        name: The sink, and what it does.
        upserts: Whether it is run with the number of rows for upserts.
        start: What the table holds before a load.
        product: The sink's load.
        baseline_name: What it is compared with.
        baseline: The load that is.
        bound: Most that the product's time may be of the baseline's.
    """

    name: str
    upserts: bool
    start: Start
    product: Load
    baseline_name: str
    baseline: Load
    bound: float


def copy(task: Task) -> Measured:
    r"""``psql \copy`` of the file into the table."""
    return measure([*task.server.psql(task.url), "-c", _copy_into("events", task.csv)], task.work_dir)


def staged_upsert(task: Task) -> Measured:
    """COPY to a temporary table and one INSERT … ON CONFLICT, in one transaction: the fastest of several ways.

    Tried and slower, or no faster: an unlogged staging table, sorting by the key, more memory for sorting.
    """
    statements = [
        "SET temp_buffers = '400MB'",
        "BEGIN",
        "CREATE TEMP TABLE staged (LIKE events) ON COMMIT DROP",
        _copy_into("staged", task.csv),
        f"INSERT INTO events SELECT * FROM staged ON CONFLICT (id) DO UPDATE SET {_SETTERS}",
        "COMMIT",
    ]
    arguments = [part for statement in statements for part in ("-c", statement)]
    return measure([*task.server.psql(task.url), *arguments], task.work_dir)


def _copy_into(table: str, csv: Path) -> str:
    return f"\\copy {table} FROM '{csv}' CSV HEADER"


def product(kind: str) -> Load:
    """``etl run`` of a job with one sink."""

    def load(task: Task) -> Measured:
        variables = {"ETL_BENCHMARK_CSV": str(task.csv), "ETL_BENCHMARK_SINK": kind}
        environ: Mapping[str, str] = {**product_environ(task.url, task.work_dir), **variables}
        return measure([*etl_command(), "run", str(_JOB), "--json"], task.work_dir, environ)

    return load


COPY_NAME = "psql \\copy"
STAGED_NAME = "staged upsert"
PAIRS = (
    Pair("transactional", False, Start.EMPTY, product("transactional"), COPY_NAME, copy, 1.00),
    Pair("two-phase", False, Start.EMPTY, product("two-phase"), COPY_NAME, copy, 1.00),
    Pair("write-ahead", False, Start.EMPTY, product("write-ahead"), COPY_NAME, copy, 1.25),
    Pair("upsert of new rows", True, Start.EMPTY, product("upsert"), STAGED_NAME, staged_upsert, 1.05),
    Pair("upsert of existing rows", True, Start.FILLED, product("upsert"), STAGED_NAME, staged_upsert, 1.05),
)
