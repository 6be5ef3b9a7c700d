"""Airports of the world by their ICAO code: quoted fields, names in many scripts, empty texts that mean NULL."""

import polars as pl

from etl import Job
from jobs.datasets import AIRPORTS, PackagedCsv
from sinks import PostgresTable, UpsertSink

job = Job("airports")
source = PackagedCsv("data/airports.csv", AIRPORTS, package="airportsdata", member="airports.csv")

# The file quotes its empty fields, so they are read as empty texts: only an unquoted field can be NULL by itself.
optional = [pl.col(name).replace("", None) for name in ("iata", "city", "subd", "lid")]
airports = job.read("airports_csv", source).with_columns(*optional)
airports.write("airports", UpsertSink(PostgresTable("airports", key=["icao"], create=True)))
