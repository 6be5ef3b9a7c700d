"""Plays against real runs: the same rows, the same tables, the same state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import polars as pl
import psycopg
import pyarrow as pa
import pytest
from psycopg.rows import dict_row

from etl import CheckpointPolicy, Job, ListState, ValueState
from etl.operators.exact import batch_of_values
from etl.runtime.run import RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.telemetry import Telemetry
from etl.schema import Schema
from etl.source import Source, SourceContext, SourceReader, SplitEnumerator
from etl.store.database import Database
from etl.testing import checkpoint, crash, play, rescale, rows
from etl.testing.harness.ends import ScriptEnumerator, ScriptReader
from etl.transformation import Row
from sinks import PostgresTable, TwoPhaseCommitSink, UpsertSink


@dataclass(frozen=True, slots=True)
class Given(Source):
    """Reads rows that are given, so many in a batch."""

    columns: dict[str, str]
    rows: Sequence[Row]
    batch_rows: int = 3

    @property
    def schema(self) -> Schema:
        return Schema.declare(self.columns)

    def create_enumerator(self, context: SourceContext) -> SplitEnumerator:
        return ScriptEnumerator()

    def create_reader(self, context: SourceContext) -> SourceReader:
        return ScriptReader([self._batch(first) for first in range(0, len(self.rows), self.batch_rows)])

    def _batch(self, first: int) -> pa.RecordBatch:
        some = self.rows[first : first + self.batch_rows]
        return batch_of_values([row[name] for row in some for name in self.columns], self.schema)


def run(url: str, job: Job) -> None:
    assert run_job(job, Database(url, "store"), {}, RunOptions(warn=print), Telemetry(), StopSignal()).exit_code == 0


def table(url: str, name: str, order: str) -> list[Row]:
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        return connection.execute(f"SELECT * FROM {name} ORDER BY {order}".encode()).fetchall()


def jumps(row: Row, state: Any) -> list[Row]:
    state.seen.append(row["id"])
    before, state.last.value = state.last.value, row["amount"]
    return [row] if before is not None and row["amount"] > 2 * before else []


@pytest.mark.parametrize("parallelism", [1, 3])
def test_play_has_what_a_run_writes_and_remembers(store_url: str, parallelism: int) -> None:
    payments = [
        {"id": number, "card": f"card-{number % 5}", "amount": Decimal(number * 37 % 50) / 4} for number in range(40)
    ]
    source = Given({"id": "int8", "card": "text", "amount": "numeric(12,2)"}, payments)
    job = Job("payments", checkpoint=CheckpointPolicy(interval_s=60.0, rows=10), parallelism=parallelism)
    cards = job.read("payments", source).key_by("card")
    states: dict[str, Any] = {"last": ValueState("numeric(12,2)"), "seen": ListState("int8")}
    cards.process("jumping", jumps, state=states).write(
        "jumps", TwoPhaseCommitSink(PostgresTable("jumps", create=True))
    )
    totals = cards.aggregate("sums", total=pl.col("amount").sum(), largest=pl.col("amount").max(), times=pl.len())
    totals.write("totals", UpsertSink(PostgresTable("totals", key=["card"], create=True)))

    result = play(
        job,
        [rows("payments", *payments[:15]), checkpoint(), rows("payments", *payments[15:]), crash(), rescale(2)],
        batch_rows=4,
    )
    run(store_url, job)

    assert sorted(result.output["jumps"], key=lambda row: row["id"]) == table(store_url, "jumps", "id")
    assert len(result.output["jumps"]) >= 5
    assert sorted(result.table("totals").values(), key=lambda row: row["card"]) == table(store_url, "totals", "card")
    assert {card: row["total"] for (card,), row in result.state("sums").items()} == {
        row["card"]: row["total"] for row in table(store_url, "totals", "card")
    }


def test_values_of_a_play_are_those_that_a_run_writes(store_url: str) -> None:
    values: Row = {
        "int2": -32768,
        "int4": 2**31 - 1,
        "int8": -(2**63),
        "float4": 0.5,
        "float8": 0.1,
        "numeric(38,10)": Decimal("-1234567890123456789012345678.0123456789"),
        "bool": True,
        "text": "Zoë 🎁\n\\N",
        "varchar(3)": "çß ",
        "date": date(1, 1, 1),
        "time": time(23, 59, 59, 999999),
        "timestamp": datetime(9999, 12, 31, 23, 59, 59, 999999),
        "timestamptz": datetime(2024, 3, 31, 2, 30, 0, 1, tzinfo=UTC),
        "uuid": "00000000-0000-4000-8000-00000000000a",
        "jsonb": '{"a": [1.10, null]}',
        "bytea": b"\0\xff",
        "numeric(4,1)[]": [Decimal("1.5"), None],
        "text[]": [],
    }
    columns = {f"c{number}": type_ for number, type_ in enumerate(values)}
    row = dict(zip(columns, values.values(), strict=True))
    nothing: Row = dict.fromkeys(columns)
    job = Job("values")
    job.read("source", Given(columns, [row, nothing])).write(
        "sink", TwoPhaseCommitSink(PostgresTable("exact", create=True))
    )

    output = play(job, [rows("source", row, nothing)]).output["sink"]
    run(store_url, job)

    written = table(store_url, "exact", "c0")
    names = {type_: name for name, type_ in columns.items()}
    for row in written:
        row[names["uuid"]] = None if row[names["uuid"]] is None else str(row[names["uuid"]])
    for row in output:
        row[names["jsonb"]] = None if row[names["jsonb"]] is None else json.loads(row[names["jsonb"]])
    assert output == written
    assert _spelled(output) == _spelled(written)


def _spelled(rows: Sequence[Row]) -> list[list[tuple[type, str]]]:
    return [[(type(value), str(value)) for value in row.values()] for row in rows]
