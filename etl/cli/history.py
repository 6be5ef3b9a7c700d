"""``etl history``: past runs, newest first, read from the store's view for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from etl.cli.connecting import load_settings, query
from etl.cli.output import format_duration, format_table, write_json, write_line, write_out
from etl.cli.status import format_time, jsonable, total_rows, unknown_job

_RUNS = """
    SELECT run_id, job, status, started_at, ended_at, duration_s::float8 AS duration_s, rows_read, rows_written,
           rows_rejected, checkpoint, restarts, exit_code, error
      FROM etl.runs
     WHERE %(job)s::text IS NULL OR job = %(job)s
     ORDER BY run_id DESC
     LIMIT %(limit)s
"""

_HEADERS = (
    "RUN",
    "JOB",
    "STATUS",
    "STARTED AT",
    "DURATION",
    "ROWS READ",
    "ROWS WRITTEN",
    "CHECKPOINT",
    "RESTARTS",
    "EXIT",
    "ERROR",
)
_NUMERIC = ("RUN", "DURATION", "ROWS READ", "ROWS WRITTEN", "CHECKPOINT", "RESTARTS", "EXIT")
_ERROR_LENGTH_MAX = 80


@click.command()
@click.argument("job", required=False)
@click.option("--limit", type=click.IntRange(1, 100_000), default=20, show_default=True, help="How many runs.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def history(job: str | None, limit: int, as_json: bool) -> None:
    """Show past runs, newest first; of JOB (its name) or of all jobs."""
    settings = load_settings()
    rows = query(settings, _RUNS, {"job": job, "limit": limit})
    if not rows and job is not None:
        raise unknown_job(settings, job)
    if as_json:
        write_json([jsonable(row) for row in rows], indent=2)
    elif rows:
        write_out(format_table(_HEADERS, [_cells(row) for row in rows], numeric=_NUMERIC))
    else:
        write_line("no run on this store yet")


def _cells(row: Mapping[str, Any]) -> tuple[object, ...]:
    duration = None if row["duration_s"] is None else format_duration(row["duration_s"])
    counts = (row["rows_read"], total_rows(row["rows_written"]), row["checkpoint"], row["restarts"], row["exit_code"])
    return (
        row["run_id"],
        row["job"],
        row["status"],
        format_time(row["started_at"]),
        duration,
        *counts,
        _shortened(row["error"]),
    )


def _shortened(error: str | None) -> str | None:
    if error is None or len(error) <= _ERROR_LENGTH_MAX:
        return error
    return f"{error[: _ERROR_LENGTH_MAX - 1]}…"
