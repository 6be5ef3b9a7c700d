"""Orders and payments of several days, over runs of which one is killed, against all pairs of them."""

from __future__ import annotations

import csv
import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.examples.conftest import ExampleProject
from tests.support.waiting import wait_until

HOUR, PROMISE = timedelta(hours=1), timedelta(minutes=5)
TABLES = {
    "paid_orders": ("id", "ordered_at", "amount", "payment", "paid_at", "paid"),
    "unpaid_orders": ("id", "ordered_at", "amount"),
    "stray_payments": ("payment", "paid_at", "paid", "order_id"),
}


def files_of(examples: ExampleProject, what: str) -> Path:
    return examples.dir / "jobs" / "shop" / what


def rows_of(examples: ExampleProject, what: str) -> list[dict[str, Any]]:
    found = []
    for path in sorted(files_of(examples, what).glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            found += list(csv.DictReader(file))
    return found


def invent(examples: ExampleProject, day: int, *, seed: int, count: int) -> None:
    """A day of orders, most of them paid in time, some twice, some too late, some never; both in disorder."""
    chance = random.Random(seed)
    begin = datetime(2024, 5, day, tzinfo=UTC)
    orders: list[tuple[datetime, str]] = []
    payments: list[tuple[datetime, str]] = []
    for number in range(count):
        at = begin + timedelta(seconds=chance.randrange(22 * 3600))
        order = day * 1_000_000 + number
        orders.append((at, f"{order},{at.isoformat()},{chance.randrange(10_000) / 100:.2f}"))
        for payment in range(chance.choice((0, 1, 1, 1, 2))):
            # One in seven is too late, and the hour itself is not.
            paid_at = at + chance.choice((HOUR, timedelta(0), *[chance.random() * HOUR] * 4, HOUR + PROMISE))
            payments.append((paid_at, f"{order}-{payment},{order},{paid_at.isoformat()},1.00"))
    for what, header, lines in (("orders", "id,ordered_at,amount", orders),
                                ("payments", "payment,order_id,paid_at,paid", payments)):  # fmt: skip
        ordered = sorted(lines, key=lambda one: one[0] + chance.random() * PROMISE)
        content = "".join(f"{line}\n" for line in [header, *(line for _, line in ordered)])
        (files_of(examples, what) / f"2024-05-{day}.csv").write_text(content)


def expected(examples: ExampleProject) -> dict[str, Counter[Any]]:
    """By going through all orders and payments at once."""
    orders = rows_of(examples, "orders")
    payments = rows_of(examples, "payments")
    by_order: dict[str, list[dict[str, Any]]] = {}
    for payment in payments:
        by_order.setdefault(payment["order_id"], []).append(payment)
    found: dict[str, Counter[Any]] = {name: Counter() for name in TABLES}
    taken: set[str] = set()
    for order in orders:
        ordered_at = datetime.fromisoformat(order["ordered_at"])
        in_time = [
            payment
            for payment in by_order.get(order["id"], [])
            if timedelta(0) <= datetime.fromisoformat(payment["paid_at"]) - ordered_at <= HOUR
        ]
        taken.update(payment["payment"] for payment in in_time)
        for payment in in_time:
            found["paid_orders"][shown({**order, **payment}, "paid_orders")] += 1
        if not in_time:
            found["unpaid_orders"][shown(order, "unpaid_orders")] += 1
    for payment in payments:
        if payment["payment"] not in taken:
            found["stray_payments"][shown(payment, "stray_payments")] += 1
    return found


def shown(row: dict[str, Any], table: str) -> tuple[str, ...]:
    values = (row[name] or None for name in TABLES[table])
    return tuple(str(datetime.fromisoformat(value)) if value and "T" in value else str(value) for value in values)


def written(examples: ExampleProject) -> dict[str, Counter[Any]]:
    return {
        table: Counter(tuple(map(str, row)) for row in examples.rows(table, *columns))
        for table, columns in TABLES.items()
    }


def test_orders_and_payments_find_each_other_over_runs(examples: ExampleProject) -> None:
    examples.run("jobs.payments")
    found = written(examples)
    assert [row[0] for row in sorted(found["unpaid_orders"])] == ["3"]
    assert [row[0] for row in sorted(found["stray_payments"])] == ["p3", "p6", "p7"]
    assert [row[3] for row in sorted(found["paid_orders"])] == ["p1", "p2", "p4", "p5", "p8"]

    invent(examples, 18, seed=1, count=8_000)
    with examples.started("jobs.payments") as process:
        begun = "SELECT count(*) FROM etl.run WHERE status = 'running'"
        wait_until(lambda: process.poll() is not None or examples.count(begun), "a run", timeout_s=60)
    process.wait()
    invent(examples, 19, seed=2, count=500)
    examples.run("jobs.payments", "--workers", "2")
    before, all_of_it = written(examples), expected(examples)
    assert all(before[table] <= all_of_it[table] for table in TABLES)

    examples.run("jobs.payments", "--drain")
    assert written(examples) == expected(examples)
    for late in ("late_orders", "late_payments"):
        assert examples.count(f"SELECT count(*) FROM {late}") == 0
