"""Alerts over several runs against those that are found in all payments at once."""

from __future__ import annotations

import csv
import itertools
import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

from tests.examples.conftest import CHECKOUT, ExampleProject

MINUTE, PROMISE = timedelta(minutes=1), timedelta(seconds=30)
Payment = tuple[datetime, str, Decimal]
Alert = tuple[str, datetime, datetime, Decimal]


def made_up(acquirer: str, begin: datetime, count: int) -> list[Payment]:
    """Payments of six cards in the order in which an acquirer writes them down; no two are of the same moment."""
    chance = random.Random(f"{acquirer} {begin.isoformat()}")
    found, now = list[Payment](), begin
    for number in range(count):
        now += timedelta(seconds=chance.randint(0, 8), microseconds=1000)
        behind = timedelta(seconds=chance.choice([0, 0, 0, 5, 28]))
        at = now.replace(microsecond=ord(acquirer) + 200 * number) - behind
        amount = chance.choice(["0.50", "0.99", "1.00", "20.00", "500.00", "500.01", "1200.00"])
        found.append((at, f"card-{chance.randint(1, 6)}", Decimal(amount)))
    return found


def lines(payments: list[Payment]) -> str:
    return "".join(f"{at.isoformat()},{card},{amount}\n" for at, card, amount in payments)


def file_of(directory: Path, acquirer: str) -> Path:
    return directory / "jobs" / "cards" / f"acquirer-{acquirer}.csv"


def payments_in(directory: Path) -> list[Payment]:
    found = list[Payment]()
    for path in sorted((directory / "jobs" / "cards").glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            found += [
                (datetime.fromisoformat(row["at"]), row["card"], Decimal(row["amount"])) for row in csv.DictReader(file)
            ]
    return found


def alerts(payments: list[Payment], *, until: datetime | None = None) -> list[Alert]:
    """Pairs of neighbouring payments with a card, of which the second was made before a moment."""
    found = list[Alert]()
    for card in {card for _, card, _ in payments}:
        mine = sorted(payment for payment in payments if payment[1] == card)
        for (tried_at, _, tried), (at, _, amount) in itertools.pairwise(mine):
            if tried < 1 and amount > 500 and at - tried_at < MINUTE and (until is None or at < until):
                found.append((card, tried_at, at, amount))
    return sorted(found)


def watermark(directory: Path) -> datetime:
    """That of the file which is read last, in whole seconds."""
    with file_of(directory, "b").open(encoding="utf-8", newline="") as file:
        latest = max(datetime.fromisoformat(row["at"]) for row in csv.DictReader(file))
    return (latest - PROMISE).replace(microsecond=0)


def check(examples: ExampleProject, payments: list[Payment], *, until: datetime | None = None) -> None:
    expected = alerts(payments, until=until)
    assert expected
    assert sorted(examples.rows("alerts", "card", "tried_at", "at", "amount")) == expected


BEGIN = datetime(2024, 5, 17, 12, tzinfo=UTC)


def test_alerts_go_on_from_run_to_run(examples: ExampleProject) -> None:
    for number in range(3):
        if number:
            for acquirer in "ab":
                with file_of(examples.dir, acquirer).open("a", encoding="utf-8", newline="") as file:
                    file.write(lines(made_up(acquirer, BEGIN + timedelta(minutes=10 * number), 120)))
        summary = examples.run("jobs.fraud")
        assert summary["rows_read"] == 240
        check(examples, payments_in(examples.dir), until=watermark(examples.dir))

    examples.run("jobs.fraud", "--drain")
    everything = payments_in(examples.dir)
    check(examples, everything)
    assert examples.rows("late_card_payments", "card") == []

    late = (BEGIN, "card-1", Decimal("700.00"))
    with file_of(examples.dir, "a").open("a", encoding="utf-8", newline="") as file:
        file.write(lines([late]))
    examples.run("jobs.fraud")
    check(examples, everything)
    assert examples.rows("late_card_payments", "at", "card", "amount") == [late]


def write_example() -> None:
    """The files of the example; ``python -m tests.examples.test_fraud`` writes them."""
    for acquirer in "ab":
        content = "at,card,amount\n" + lines(made_up(acquirer, BEGIN, 120))
        file_of(CHECKOUT, acquirer).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    write_example()
