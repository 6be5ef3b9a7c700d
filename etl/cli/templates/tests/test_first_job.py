"""What the job makes of orders, without a database: python -m pytest"""

from datetime import UTC, datetime
from decimal import Decimal

from etl.testing import assert_same_result, checkpoint, crash, play, rows

from jobs.first_job import job


def order(number: int, customer: str, city: str, day: int, status: str = "paid") -> dict[str, object]:
    return {
        "id": number,
        "ordered_at": datetime(2024, 5, day, tzinfo=UTC),
        "customer": customer,
        "city": city,
        "amount": Decimal("9.99"),
        "status": status,
    }


SCRIPT = [
    rows("orders", order(1, "Zoë", "Malmö", 1), order(2, "Li", "上海", 1, status="open"), missing_null=True),
    checkpoint(),
    rows("orders", order(3, "Zoë", "København", 2), missing_null=True),
    crash(),
]


def test_paid_orders_are_appended_once() -> None:
    assert [row["id"] for row in play(job, SCRIPT).output["paid_orders"]] == [1, 3]


def test_customers_have_the_city_of_their_newest_order() -> None:
    customers = play(job, SCRIPT).table("customers")

    assert {customer: row["city"] for (customer,), row in customers.items()} == {"Zoë": "København", "Li": "上海"}


def test_batches_checkpoints_and_crashes_make_no_difference() -> None:
    assert_same_result(job, SCRIPT)
