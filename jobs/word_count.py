"""How often each word occurs in the names of the world's airports; it goes on counting when the file grows."""

from collections.abc import Iterator
from typing import Any

import polars as pl

from etl import Job
from jobs.datasets import AIRPORTS, PackagedCsv
from sinks import PostgresTable, UpsertSink


def words(airport: dict[str, Any]) -> Iterator[dict[str, str]]:
    """The words of a name, in lower case."""
    for word in (airport["name"] or "").lower().split():
        yield {"word": word}


job = Job("word_count", parallelism=2)
source = PackagedCsv("data/airports.csv", AIRPORTS, package="airportsdata", member="airports.csv")
found = job.read("airports_csv", source).flat_map(words, schema={"word": "text"})
counted = found.key_by("word").aggregate("count", times=pl.len())
counted.write("word_count", UpsertSink(PostgresTable("word_count", key=["word"], create=True)))
