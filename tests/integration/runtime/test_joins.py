"""Joins over runs, files and parallelism, against all pairs of the rows in the files."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from etl import CheckpointPolicy, EventTime, Job
from etl.errors import RecordError
from etl.runtime.run import RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.summary import RunSummary
from etl.runtime.telemetry import Event, Telemetry
from etl.sources import CsvFiles
from etl.store.database import Database
from etl.stream import JoinStream
from sinks import PostgresTable, TwoPhaseCommitSink

START = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
DISORDER = timedelta(minutes=3)

Order = tuple[int | None, datetime, str]
Payment = tuple[int | None, datetime, int]


@dataclass(frozen=True, slots=True)
class Shop:
    """Files of orders and payments, each row out of order by at most :data:`DISORDER`."""

    dir: Path
    orders: list[Order]
    payments: list[Payment]

    def write(self, part: int, orders: Sequence[Order], payments: Sequence[Payment]) -> None:
        self.orders.extend(orders)
        self.payments.extend(payments)
        order_lines = "".join(f"{_text(key)},{at.isoformat()},{name}\n" for key, at, name in orders)
        (self.dir / f"orders-{part}.csv").write_text("id,at,name\n" + order_lines)
        payment_lines = "".join(f"{_text(key)},{at.isoformat()},{number}\n" for key, at, number in payments)
        (self.dir / f"payments-{part}.csv").write_text("order_id,paid_at,n\n" + payment_lines)

    def invent(self, part: int, *, seed: int) -> None:
        """Four hours of orders and payments; later parts follow in time."""
        chance = random.Random(seed)
        orders: list[tuple[timedelta, Order]] = []
        payments: list[tuple[timedelta, Payment]] = []
        for number in range(150):
            key = None if chance.random() < 0.05 else chance.randrange(40)
            at = 4 * HOUR * part + timedelta(seconds=chance.randrange(4 * 3600))
            orders.append((at, (key, START + at, f"o{part}-{number}")))
            paid_at = 4 * HOUR * part + timedelta(seconds=chance.randrange(4 * 3600))
            payments.append((paid_at, (key, START + paid_at, part * 1000 + number)))
        disorder = DISORDER.total_seconds()
        self.write(
            part,
            [order for _, order in sorted(orders, key=lambda one: one[0].total_seconds() + chance.random() * disorder)],
            [paid for _, paid in sorted(payments, key=lambda one: one[0].total_seconds() + chance.random() * disorder)],
        )

    def read(self, parallelism: int) -> tuple[Job, Any, Any]:
        job = Job("shop", checkpoint=CheckpointPolicy(interval_s=60.0, rows=40), parallelism=parallelism)
        time = {"out_of_orderness": DISORDER, "in_sequence": True}
        order = {"id": "int8", "at": "timestamptz", "name": "text"}
        payment = {"order_id": "int8", "paid_at": "timestamptz", "n": "int4"}
        order_files = CsvFiles(f"{self.dir}/orders-*.csv", order, batch_rows=7)
        payment_files = CsvFiles(f"{self.dir}/payments-*.csv", payment, batch_rows=11)
        orders = job.read("orders", order_files, event_time=EventTime("at", **time))  # type: ignore[arg-type]
        payments = job.read("payments", payment_files, event_time=EventTime("paid_at", **time))  # type: ignore[arg-type]
        return job, orders, payments


def _text(key: int | None) -> str:
    return "" if key is None else str(key)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path, [], [])


def write(stream: JoinStream) -> None:
    for name, rows in (("joined", stream), ("late", stream.late), ("late_right", stream.late_right)):
        rows.write(name, TwoPhaseCommitSink(PostgresTable(name, create=True)))


def interval_job(shop: Shop, parallelism: int = 1) -> Job:
    job, orders, payments = shop.read(parallelism)
    right = payments.key_by("order_id")
    write(orders.key_by("id").interval_join(
        "paid", right, time=("at", "paid_at"), lower=timedelta(0), upper=HOUR, how="full"))  # fmt: skip
    return job


def all_pairs(shop: Shop) -> Counter[Any]:
    found: list[Any] = []
    alone = set(range(len(shop.payments)))
    for key, at, name in shop.orders:
        partners = [
            number
            for number, (paid, paid_at, _) in enumerate(shop.payments)
            if key is not None and key == paid and at <= paid_at <= at + HOUR
        ]
        alone.difference_update(partners)
        found += [(key, at, name, *shop.payments[number][1:]) for number in partners]
        found += [] if partners else [(key, at, name, None, None)]
    found += [(shop.payments[number][0], None, None, *shop.payments[number][1:]) for number in alone]
    return Counter(found)


def run(url: str, job: Job, *, drain: bool = False, stop_at: tuple[str, int] = ("", 0)) -> RunSummary:
    seen: Counter[str] = Counter()

    def listen(event: Event) -> None:
        seen[event.name] += 1
        if (event.name, seen[event.name]) == stop_at:
            raise RecordError("stopped")

    telemetry = Telemetry()
    telemetry.subscribe(listen)
    return run_job(job, Database(url, "store"), {}, RunOptions(warn=print, drain=drain), telemetry, StopSignal())


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        return connection.execute(statement.encode()).fetchall()


def test_interval_join_over_runs_is_that_of_all_pairs(store_url: str, shop: Shop) -> None:
    for part, parallelism in enumerate((1, 4, 2)):
        shop.invent(part, seed=part)
        job = interval_job(shop, parallelism)
        # An attempt that fails in the middle leaves nothing behind.
        assert run(store_url, job, stop_at=("checkpoint.recorded", 3)).exit_code == 65
        assert run(store_url, interval_job(shop, parallelism)).exit_code == 0
        found = Counter(query(store_url, "SELECT * FROM joined"))
        assert found <= all_pairs(shop)
        assert (len(shop.orders), found.total() > 100 * (part + 1)) == (150 * (part + 1), True)
    ((waiting,),) = query(store_url, "SELECT sum(rows) FROM etl.state WHERE uid = 'paid' AND sequence = 0")
    assert waiting > 0
    assert run(store_url, interval_job(shop, 3), drain=True).exit_code == 0
    assert Counter(query(store_url, "SELECT * FROM joined")) == all_pairs(shop)
    assert query(store_url, "SELECT * FROM late") == query(store_url, "SELECT * FROM late_right") == []


def test_rows_behind_what_was_drained_are_late(store_url: str, shop: Shop) -> None:
    shop.invent(0, seed=7)
    assert run(store_url, interval_job(shop, 2), drain=True).exit_code == 0
    joined = all_pairs(shop)
    order, payment = (1, START, "late"), (1, START, 4711)
    shop.write(1, [order], [payment])
    assert run(store_url, interval_job(shop)).exit_code == 0
    assert Counter(query(store_url, "SELECT * FROM joined")) == joined
    assert query(store_url, "SELECT * FROM late") == [order]
    assert query(store_url, "SELECT * FROM late_right") == [payment]


def test_stream_is_joined_with_itself(store_url: str, shop: Shop) -> None:
    shop.invent(0, seed=3)
    job, orders, payments = shop.read(2)
    payments.write("payment_rows", TwoPhaseCommitSink(PostgresTable("payments", create=True)))
    keyed = orders.key_by("id")
    follow = {"lower": timedelta(seconds=1), "upper": HOUR}
    write(keyed.interval_join("again", keyed, time="at", **follow))
    assert run(store_url, job, drain=True).exit_code == 0
    expected = Counter(
        (key, at, name, at2, name2)
        for key, at, name in shop.orders
        for key2, at2, name2 in shop.orders
        if key is not None and key == key2 and timedelta(0) < at2 - at <= HOUR
    )
    assert Counter(query(store_url, "SELECT * FROM joined")) == expected
    assert expected.total() > 50


def as_of_job(shop: Shop, parallelism: int = 1) -> Job:
    job, orders, payments = shop.read(parallelism)
    versions = payments.key_by("order_id")
    write(orders.key_by("id").as_of_join("rated", versions, time=("at", "paid_at"), how="left"))
    return job


def all_versions(shop: Shop) -> Counter[Any]:
    """Versions that begin at the same time differ in nothing but their number: the last one in the files is valid."""
    found: list[Any] = []
    for key, at, name in shop.orders:
        begun = [
            (valid_from, place, number)
            for place, (of, valid_from, number) in enumerate(shop.payments)
            if key is not None and of == key and valid_from <= at
        ]
        found.append((key, at, name, max(begun)[0] if begun else None, max(begun)[2] if begun else None))
    return Counter(found)


def test_as_of_join_over_runs_finds_the_version_of_each_time(store_url: str, shop: Shop) -> None:
    for part, parallelism in enumerate((2, 1, 4)):
        shop.invent(part, seed=10 + part)
        job = as_of_job(shop, parallelism)
        assert run(store_url, job, stop_at=("state.snapshotted", 2)).exit_code == 65
        assert run(store_url, as_of_job(shop, parallelism)).exit_code == 0
        found = Counter(query(store_url, "SELECT * FROM joined"))
        assert found <= all_versions(shop)
        assert found.total() > 100 * (part + 1)
    assert run(store_url, as_of_job(shop, 3), drain=True).exit_code == 0
    assert Counter(query(store_url, "SELECT * FROM joined")) == all_versions(shop)
    assert query(store_url, "SELECT * FROM late") == query(store_url, "SELECT * FROM late_right") == []
    # Once all is drained, one version of each key is kept for what may come.
    shop.write(3, [(1, START + 100 * HOUR, "after")], [])
    assert run(store_url, as_of_job(shop), drain=True).exit_code == 0
    assert query(store_url, "SELECT * FROM late") == [(1, START + 100 * HOUR, "after")]
