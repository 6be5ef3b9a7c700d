"""The job that is measured; which file and which sink come from the environment."""

from __future__ import annotations

import os

from etl import CheckpointPolicy, Job
from etl.sink import Sink
from etl.sources import CsvFiles
from sinks import PostgresTable, TransactionalSink, TwoPhaseCommitSink, UpsertSink, WriteAheadSink


def _sink(kind: str) -> Sink:
    table = PostgresTable("events")
    match kind:
        case "transactional":
            return TransactionalSink(table)
        case "two-phase":
            return TwoPhaseCommitSink(table)
        case "write-ahead":
            return WriteAheadSink(table)
        case _:
            return UpsertSink(PostgresTable("events", key=["id"]))


job = Job("load", checkpoint=CheckpointPolicy(interval_s=1.0))
job.read(
    "events",
    CsvFiles(
        os.environ["ETL_BENCHMARK_CSV"],
        schema={
            "id": "int8",
            "ts": "timestamptz",
            "user": "text",
            "amount": "numeric(12,2)",
            "flag": "bool",
            "note": "text",
        },
    ),
).write("events_table", _sink(os.environ["ETL_BENCHMARK_SINK"]))
