"""``etl savepoint``: checkpoints that are kept under a name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Event

import click

from etl.cli.connecting import load_settings, open_store, query
from etl.cli.output import format_table, write_json, write_line, write_out
from etl.cli.status import format_time, jsonable, total_rows, unknown_job
from etl.clock import SystemClock
from etl.settings import Settings
from etl.store import savepoints
from etl.store.database import StoreConnection

_SAVEPOINTS = """
    SELECT job, savepoint, checkpoint, created_at, completed_at, rows_written_total
      FROM etl.savepoints
     WHERE %(job)s::text IS NULL OR job = %(job)s
     ORDER BY job, checkpoint, savepoint
"""
_JOB = "SELECT job_id FROM etl.job WHERE name = %(job)s"
_HEADERS = ("JOB", "SAVEPOINT", "CHECKPOINT", "COMPLETED AT", "ROWS WRITTEN UNTIL THEN")


@click.group()
def savepoint() -> None:
    """Keep checkpoints under a name, to go back to with ``etl run --from``."""


@savepoint.command()
@click.argument("job")
@click.argument("name")
@click.option("--stop", is_flag=True, help="End the run with it: it reads no further, and exits with 0.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1, max=86_400),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the run.",
)
def create(job: str, name: str, stop: bool, timeout_s: float) -> None:
    """Keep a checkpoint of JOB (its name) as NAME: a new one while it runs, else the last one."""
    settings = load_settings()
    with _store(settings) as connection:
        job_id = _job_id(settings, job)
        number = savepoints.take(
            connection, job_id, name, stop=stop, timeout_s=timeout_s, clock=SystemClock(), cancelled=Event()
        )
    write_line(f'savepoint "{name}" of job "{job}" is checkpoint {number}')


@savepoint.command(name="list")
@click.argument("job", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_savepoints(job: str | None, as_json: bool) -> None:
    """List the savepoints of JOB (its name) or of all jobs, oldest first."""
    settings = load_settings()
    rows = query(settings, _SAVEPOINTS, {"job": job})
    if not rows and job is not None:
        _job_id(settings, job)
    if as_json:
        write_json([jsonable(row) for row in rows], indent=2)
    elif rows:
        cells = [
            (
                row["job"],
                row["savepoint"],
                row["checkpoint"],
                format_time(row["completed_at"]),
                total_rows(row["rows_written_total"]),
            )
            for row in rows
        ]
        write_out(format_table(_HEADERS, cells, numeric=("CHECKPOINT", "ROWS WRITTEN UNTIL THEN")))
    else:
        write_line("no savepoint")


@savepoint.command()
@click.argument("job")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def drop(job: str, names: tuple[str, ...]) -> None:
    """Drop savepoints of JOB (its name); the next runs remove what only they needed."""
    settings = load_settings()
    with _store(settings) as connection:
        savepoints.drop(connection.driver, _job_id(settings, job), names)


@contextmanager
def _store(settings: Settings) -> Iterator[StoreConnection]:
    with ExitStack() as stack:
        store = stack.enter_context(open_store(settings))
        yield stack.enter_context(store.database.session("etl:cli"))


def _job_id(settings: Settings, job: str) -> str:
    found = query(settings, _JOB, {"job": job})
    if not found:
        raise unknown_job(settings, job)
    return str(found[0]["job_id"])
