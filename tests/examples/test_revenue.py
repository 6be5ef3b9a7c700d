"""Two kinds of files, local times, JSON and taxes against an independent computation."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from tests.examples.conftest import ExampleProject

COLUMNS = ("id", "ordered_at", "amount", "tax_percent", "details", "channel", "tax")


def expected_rows(project: Path) -> Iterator[tuple[Any, ...]]:
    """The orders in the order of their ids, computed without the framework."""
    for channel, zone in (("web", None), ("till", ZoneInfo("Europe/Berlin"))):
        for path in sorted((project / "jobs" / "orders" / channel).glob("*.csv")):
            with path.open(encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    yield expected_row(row, channel, zone)


def expected_row(row: dict[str, str], channel: str, zone: ZoneInfo | None) -> tuple[Any, ...]:
    ordered_at = datetime.fromisoformat(row["ordered_at"])
    if zone is not None:
        ordered_at = ordered_at.replace(tzinfo=zone)
    amount = Decimal(row["amount"]) if row["amount"] else None
    percent = int(row["tax_percent"])
    tax = None if amount is None else amount - amount / (1 + Decimal(percent) / 100)
    rounded = None if tax is None else tax.quantize(Decimal("0.01"), ROUND_HALF_EVEN)
    details = json.loads(row["details"]) if row["details"] else None
    return int(row["id"]), ordered_at.astimezone(UTC), amount, percent, details, channel, rounded


def by_id(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted(rows, key=lambda row: row[0])


def test_revenue_is_loaded_exactly(examples: ExampleProject) -> None:
    summary = examples.run("jobs.revenue")

    expected = by_id(list(expected_rows(examples.dir)))
    refunds = [row for row in expected if row[2] is not None and row[2] < 0]
    assert by_id(examples.rows("orders", *COLUMNS)) == expected
    assert by_id(examples.rows("refunds", *COLUMNS)) == refunds
    assert summary["rows_read"] == 9
    assert summary["rows_written"] == {"orders": 9, "refunds": 2}


def test_revenue_reads_only_what_is_new_when_files_grow_and_come(examples: ExampleProject) -> None:
    examples.run("jobs.revenue")
    web = examples.dir / "jobs" / "orders" / "web"
    with (web / "2024-03-31.csv").open("a") as file:
        file.write("7,2024-04-01T00:00:00Z,1.19,19,\n")
    (web / "2024-04-01.csv").write_text(
        "amount,id,ordered_at,tax_percent,details\n-1.07,8,2024-04-01T10:00:00Z,7,null\n"
    )

    summary = examples.run("jobs.revenue")

    assert summary["rows_read"] == 2
    assert summary["rows_written"] == {"orders": 2, "refunds": 1}
    assert by_id(examples.rows("orders", *COLUMNS)) == by_id(list(expected_rows(examples.dir)))
