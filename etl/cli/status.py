"""``etl status``: where each job stands, read from the store's views for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from etl.cli.connecting import load_settings, query
from etl.cli.output import format_table, write_json, write_line, write_out
from etl.errors import ConfigurationError
from etl.settings import Settings

_JOBS = """
    SELECT jobs.job, jobs.running, jobs.owner_host, jobs.owner_backend, jobs.epoch, jobs.incarnation, jobs.checkpoint,
           jobs.last_completed_at, jobs.failures, jobs.last_run, jobs.last_status, jobs.last_error,
           runs.started_at, runs.rows_read, runs.rows_written
      FROM etl.jobs AS jobs
      LEFT JOIN etl.runs AS runs ON runs.run_id = jobs.last_run
     WHERE %(job)s::text IS NULL OR jobs.job = %(job)s
     ORDER BY jobs.job
"""

_POSITIONS = """
    SELECT uid, split, position, checkpoint FROM etl.positions WHERE job = %(job)s ORDER BY uid, split
"""

_POSITION_VALUE_LENGTH_MAX = 32
_HEADERS = ("JOB", "STATE", "CHECKPOINT", "COMPLETED AT", "LAST RUN", "ROWS READ", "ROWS WRITTEN")


@click.command()
@click.argument("job", required=False)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: a list, or one object with positions when JOB is given."
)
def status(job: str | None, as_json: bool) -> None:
    """Show where each job stands; with JOB (its name) also the positions of its sources."""
    settings = load_settings()
    rows = query(settings, _JOBS, {"job": job})
    if job is None:
        _print_all(rows, as_json)
        return
    if not rows:
        raise unknown_job(settings, job)
    _print_one(rows[0], query(settings, _POSITIONS, {"job": job}), as_json)


def unknown_job(settings: Settings, job: str) -> ConfigurationError:
    """The error for a name that the store does not know, with the names that it does."""
    known = [str(row["job"]) for row in query(settings, "SELECT job FROM etl.jobs ORDER BY job", {})]
    return ConfigurationError(f'no job named "{job}" has run on this store; known: {", ".join(known) or "none"}')


def format_time(value: datetime | None) -> str | None:
    """A time as people read it: to the second, in this machine's zone, with its offset."""
    return value.astimezone().isoformat(" ", "seconds") if value else None


def total_rows(rows_written: Mapping[str, int] | None) -> int | None:
    """Rows written to all sinks together."""
    return None if rows_written is None else sum(rows_written.values())


def _print_all(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        write_json([jsonable(row) for row in rows], indent=2)
    elif rows:
        write_out(
            format_table(_HEADERS, [_cells(row) for row in rows], numeric=("CHECKPOINT", "ROWS READ", "ROWS WRITTEN"))
        )
    else:
        write_line("no job has run on this store yet")


def _print_one(row: Mapping[str, Any], positions: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        write_json({**jsonable(row), "positions": [dict(position) for position in positions]}, indent=2)
        return
    lines = [format_table(("FIELD", "VALUE"), [(name, _shown(value)) for name, value in row.items()])]
    if positions:
        cells = [
            (each["uid"], each["split"], _short_position(each["position"]), each["checkpoint"]) for each in positions
        ]
        lines.append(format_table(("SOURCE", "SPLIT", "POSITION", "CHECKPOINT"), cells, numeric=("CHECKPOINT",)))
    write_out("\n\n".join(lines))


def jsonable(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with times as ISO 8601."""
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in row.items()}


def _cells(row: Mapping[str, Any]) -> tuple[object, ...]:
    written = total_rows(row["rows_written"])
    return (
        row["job"],
        _state_of(row),
        row["checkpoint"],
        format_time(row["last_completed_at"]),
        row["last_status"],
        row["rows_read"],
        written,
    )


def _state_of(row: Mapping[str, Any]) -> str:
    if row["running"]:
        return "running"
    # A run that has no session and has told no end was killed, or is waiting to try again.
    return "interrupted" if row["last_status"] == "running" else "idle"


def _short_position(position: Mapping[str, Any]) -> str:
    """A position in one line, its hashes by their first digits; ``--json`` has them in full."""
    return ", ".join(f"{name} {_abbreviated(value)}" for name, value in position.items())


def _abbreviated(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _POSITION_VALUE_LENGTH_MAX else f"{text[:8]}…"


def _shown(value: object) -> object:
    if isinstance(value, datetime):
        return format_time(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {count}" for key, count in value.items()) or None
    return value
