"""Cards that are tried with a small payment and then used for a large one within a minute; cron runs it."""

from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

from etl import EventTime, Job, Timer, ValueState
from etl.sources import CsvFiles
from sinks import PostgresTable, TwoPhaseCommitSink

PAYMENT = {"at": "timestamptz", "card": "text", "amount": "numeric(12,2)"}
ALERT = {"card": "text", "tried_at": "timestamptz", "at": "timestamptz", "amount": "numeric(12,2)"}

SMALL, LARGE, SPAN = Decimal(1), Decimal(500), timedelta(minutes=1)


def watch(payment: dict[str, Any], state: Any) -> Iterator[dict[str, Any]]:
    """An alert for a large payment right after a small one; a small one is remembered for a minute."""
    tried_at = state.tried_at.value
    if tried_at is not None and payment["amount"] > LARGE:
        yield {"card": payment["card"], "tried_at": tried_at, "at": payment["at"], "amount": payment["amount"]}
    state.tried_at.clear()
    state.timers.clear()
    if payment["amount"] < SMALL:
        state.tried_at.value = payment["at"]
        state.timers.set(payment["at"] + SPAN)


def forget(_minute: Timer, state: Any) -> None:
    """The minute is over."""
    state.tried_at.clear()


job = Job("fraud", schedule="*/5 * * * *")
files = CsvFiles("jobs/cards/*.csv", PAYMENT)
# Each acquirer has a file; within it a payment comes at most half a minute after one that was made later.
payments = job.read("payments", files, event_time=EventTime("at", out_of_orderness=timedelta(seconds=30)))
alerts = payments.key_by("card").process(
    "watch",
    watch,
    state={"tried_at": ValueState("timestamptz")},
    schema=ALERT,
    time="at",
    in_order=True,
    on_timer=forget,
)
alerts.write("alerts", TwoPhaseCommitSink(PostgresTable("alerts", create=True)))
alerts.late.write("late_card_payments", TwoPhaseCommitSink(PostgresTable("late_card_payments", create=True)))
