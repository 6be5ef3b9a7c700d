"""Quoted fields and Unicode against an independent reading of the same file."""

from __future__ import annotations

import csv
import importlib.util
from decimal import Decimal
from pathlib import Path

from tests.examples.conftest import ExampleProject

TEXTS = ("icao", "iata", "name", "city", "subd", "country", "tz", "lid")
NUMBERS = ("elevation", "lat", "lon")
OPTIONAL = {"iata", "city", "subd", "lid"}


def expected_rows() -> list[tuple[str | Decimal | None, ...]]:
    found = importlib.util.find_spec("airportsdata")
    assert found is not None
    assert found.origin is not None
    with Path(found.origin).with_name("airports.csv").open(encoding="utf-8", newline="") as file:
        return [
            (
                *(None if name in OPTIONAL and row[name] == "" else row[name] for name in TEXTS),
                *(Decimal(row[name]) for name in NUMBERS),
            )
            for row in csv.DictReader(file)
        ]


def test_airports_are_loaded_exactly(examples: ExampleProject) -> None:
    summary = examples.run("jobs.airports")

    stored = examples.rows("airports", *TEXTS, *NUMBERS)
    assert sorted(stored, key=lambda row: row[0]) == sorted(expected_rows(), key=lambda row: str(row[0]))
    assert summary["rows_written"] == {"airports": len(stored)}


def test_airports_keep_namibia_apart_from_null(examples: ExampleProject) -> None:
    examples.run("jobs.airports")

    assert examples.count("SELECT count(*) FROM airports WHERE country = 'NA'") > 0
    assert examples.count("SELECT count(*) FROM airports WHERE country IS NULL") == 0
