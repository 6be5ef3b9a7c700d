"""Visits of a web site from the logs of its hosts: clicks with less than half an hour between them; cron runs it."""

from datetime import timedelta

import polars as pl

from etl import EventTime, Job, Session
from etl.sources import CsvFiles
from sinks import PostgresTable, TransactionalSink

CLICK = {"at": "timestamptz", "visitor": "text", "page": "text"}

job = Job("sessions", schedule="*/5 * * * *")
logs = CsvFiles("jobs/clicks/*.csv", CLICK)
# A host writes down a click when it has answered it, so a slow answer comes behind later clicks.
clicks = job.read("clicks", logs, event_time=EventTime("at", out_of_orderness=timedelta(seconds=10)))

by_visitor = clicks.filter(pl.col("visitor").is_not_null()).key_by("visitor")
visits = by_visitor.window(Session(timedelta(minutes=30)), time="at").aggregate(
    "sessions",
    clicks=pl.len(),
    entry=pl.col("page").sort_by("at").first(),
    exit=pl.col("page").sort_by("at").last(),
)
# A visit is over, and written, when the logs have come half an hour beyond it; others wait for the next run.
visits.write("visits", TransactionalSink(PostgresTable("visits", create=True)))
visits.late.write("late_clicks", TransactionalSink(PostgresTable("late_clicks", create=True)))
