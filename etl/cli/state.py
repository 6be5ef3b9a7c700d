"""``etl state``: what the operators of a job remember, as of its last completed checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import click

from etl.cli.connecting import load_settings, open_store, query
from etl.cli.output import format_bytes, format_table, write_json, write_line, write_out
from etl.cli.state_diff import diff
from etl.cli.state_rows import StateRow, spelled_rows, to_json
from etl.cli.status import jsonable, unknown_job
from etl.errors import ConfigurationError
from etl.settings import Settings
from etl.state import Fragment
from etl.store.database import Connection
from etl.store.state import OperatorState, operator_states, restore

_OPERATORS = """
    SELECT operator, key_groups, chunks, bytes::int8 AS bytes, last_changed,
           to_char(event_time AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US') AS event_time, late_rows
      FROM etl.operator_states WHERE job = %(job)s ORDER BY operator
"""
_KNOWN = "SELECT name FROM etl.job WHERE name = %(job)s"
_HEAD = """
    SELECT h.job_id, h.incarnation, h.checkpoint_id, c.states
      FROM etl.head h
      JOIN etl.job j USING (job_id)
      LEFT JOIN etl.checkpoint c USING (job_id, incarnation, checkpoint_id)
     WHERE j.name = %s
"""
_HEADERS = ("OPERATOR", "KEY GROUPS", "CHUNKS", "SIZE", "LAST CHANGED IN CHECKPOINT")
_TIME_HEADERS = ("CLOSED UP TO", "LATE ROWS")
"""Where an operator goes by event time."""


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    job_id: str
    incarnation: int
    checkpoint_id: int


@click.group()
def state() -> None:
    """Show and export what operators remember, and compare it between checkpoints."""


@state.command()
@click.argument("job")
@click.argument("operator", required=False)
@click.option("--limit", type=click.IntRange(1, 100_000), default=20, show_default=True, help="How many keys.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def show(job: str, operator: str | None, limit: int, as_json: bool) -> None:
    """Show how much each operator of JOB (its name) remembers; with OPERATOR (its uid), the first keys."""
    settings = load_settings()
    if operator is None:
        _show_operators(settings, job, as_json=as_json)
        return
    rows = list(itertools.islice(_rows(settings, job, operator), limit))
    if as_json:
        write_out(to_json(rows, indent=2))
    elif rows:
        headers = [name for part in rows[0].values() for name in part]
        write_out(
            format_table(headers, [[_cell(value) for part in row.values() for value in part.values()] for row in rows])
        )
    else:
        write_line(f'operator "{operator}" remembers nothing')


@state.command()
@click.argument("job")
@click.argument("operator")
def export(job: str, operator: str) -> None:
    """Print everything that OPERATOR (its uid) of JOB (its name) remembers, as JSON Lines, a line for each key."""
    for row in _rows(load_settings(), job, operator):
        write_out(to_json(row))


state.add_command(diff)


def _show_operators(settings: Settings, job: str, *, as_json: bool) -> None:
    rows = query(settings, _OPERATORS, {"job": job})
    if not rows and not query(settings, _KNOWN, {"job": job}):
        raise unknown_job(settings, job)
    if as_json:
        write_json([jsonable(row) for row in rows], indent=2)
    elif rows:
        headers = _HEADERS + (_TIME_HEADERS if any(row["event_time"] for row in rows) else ())
        write_out(format_table(headers, [_operator_cells(row)[: len(headers)] for row in rows], numeric=headers[1:]))
    else:
        write_line(f'no operator of job "{job}" has stored anything')


def _operator_cells(row: Mapping[str, Any]) -> tuple[Any, ...]:
    last_changed, event_time = row["last_changed"], row["event_time"]
    size = (row["key_groups"], row["chunks"], format_bytes(row["bytes"]))
    return (row["operator"], *size, last_changed or "-", event_time or "-", row["late_rows"])


def _rows(settings: Settings, job: str, operator: str) -> Iterator[StateRow]:
    return spelled_rows(operator, _fragments(settings, job, operator))


def _fragments(settings: Settings, job: str, operator: str) -> Sequence[Fragment]:
    from etl.transaction import transaction

    with ExitStack() as stack:
        store = stack.enter_context(open_store(settings))
        connection = stack.enter_context(store.database.connect("etl:cli"))
        # One snapshot: a run may complete the next checkpoint and prune meanwhile.
        stack.enter_context(transaction(connection))
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        checkpoint, states = _head(connection, settings, job)
        if operator not in states:
            known = ", ".join(sorted(states)) or "none"
            raise ConfigurationError(
                f'operator "{operator}" of job "{job}" has no state at checkpoint {checkpoint.checkpoint_id}; those'
                f" that have: {known}"
            )
        return restore(connection, checkpoint, {operator: states[operator]})[operator]


def _head(connection: Connection, settings: Settings, job: str) -> tuple[_Checkpoint, Mapping[str, OperatorState]]:
    row = connection.execute(_HEAD, [job]).fetchone()
    if row is None:
        raise unknown_job(settings, job)
    *key, states = row
    return _Checkpoint(*key), operator_states(states or {})


def _cell(value: Any) -> str:
    return "NULL" if value is None else str(value)
