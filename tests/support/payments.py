"""A small job with state, for tests of what plays it."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import polars as pl

from etl.job import Job
from etl.keyed_process import ValueState
from etl.transformation import Row
from sinks import PostgresTable, TwoPhaseCommitSink, UpsertSink
from tests.support.declarations import DeclaredSource

COLUMNS = {"card": "text", "amount": "numeric(12,2)"}


def payment(card: str, amount: str) -> Row:
    return {"card": card, "amount": Decimal(amount)}


def jumps(row: Row, state: Any) -> Iterator[Row]:
    """Payments that are more than ten times as high as the one before with the same card."""
    before, state.last.value = state.last.value, row["amount"]
    if before is not None and row["amount"] > 10 * before:
        yield row


def payments_job(function: Any = jumps, parallelism: int = 1) -> Job:
    """Jumps are appended; the total of each card is upserted."""
    job = Job("payments", parallelism=parallelism)
    payments = job.read("payments", DeclaredSource(COLUMNS)).key_by("card")
    payments.process("last_payment", function, state={"last": ValueState("numeric(12,2)")}).write(
        "jumps", TwoPhaseCommitSink(PostgresTable("jumps"))
    )
    payments.aggregate("sums", total=pl.col("amount").sum(), payments=pl.len()).write(
        "totals", UpsertSink(PostgresTable("totals", key=["card"]))
    )
    return job
