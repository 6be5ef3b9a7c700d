"""The job whose state is measured: sum and count by key; files and checkpoints come from the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import polars as pl

from etl import CheckpointPolicy, Job, ValueState
from etl.sources import CsvFiles
from etl.stream import Stream
from etl.transformation import Row
from sinks import PostgresTable, UpsertSink

_ALL = 1_000_000
_SUMS = {"key": "int8", "total": "numeric(38,2)", "rows": "int8"}


def _add(payment: Row, state: Any) -> Iterator[Row]:
    state.total.value = (state.total.value or Decimal("0.00")) + payment["amount"]
    state.rows.value = (state.rows.value or 0) + 1
    yield {"key": payment["key"], "total": state.total.value, "rows": state.rows.value}


def _totals(payments: Stream, by: str) -> Stream:
    keyed = payments.key_by("key")
    if by == "expressions":
        return keyed.aggregate("totals", total=pl.col("amount").sum(), rows=pl.len())
    states = {name: ValueState(_SUMS[name]) for name in ("total", "rows")}
    return keyed.process("totals", _add, state=states, schema=_SUMS)


def _policy() -> CheckpointPolicy:
    interval_s, rows = float(os.environ["ETL_BENCHMARK_INTERVAL_S"]), os.environ.get("ETL_BENCHMARK_CHECKPOINT_ROWS")
    if rows is None:
        return CheckpointPolicy(interval_s)
    # Nothing is dropped: what all checkpoints have written is to be counted afterwards.
    return CheckpointPolicy(interval_s, rows=int(rows), keep=_ALL)


job = Job("state", checkpoint=_policy())
_totals(
    job.read(
        "payments",
        CsvFiles(
            os.environ["ETL_BENCHMARK_CSV"].split(os.pathsep),
            schema={"key": "int8", "amount": "numeric(12,2)"},
        ),
    ),
    os.environ["ETL_BENCHMARK_BY"],
).write("totals_table", UpsertSink(PostgresTable("totals", key=["key"])))
