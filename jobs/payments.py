"""Orders with the payments of their first hour, and what found no partner in that time; cron runs it."""

from datetime import timedelta

import polars as pl

from etl import EventTime, Job
from etl.sources import CsvFiles
from sinks import PostgresTable, TwoPhaseCommitSink

ORDER = {"id": "int8", "ordered_at": "timestamptz", "amount": "numeric(12,2)"}
PAYMENT = {"payment": "text", "order_id": "int8", "paid_at": "timestamptz", "paid": "numeric(12,2)"}

job = Job("payments", schedule="*/5 * * * *", parallelism=2)
# One file a day, in which a row may come up to five minutes behind others.
ordered = EventTime("ordered_at", out_of_orderness=timedelta(minutes=5), in_sequence=True)
paid = EventTime("paid_at", out_of_orderness=timedelta(minutes=5), in_sequence=True)
orders = job.read("orders", CsvFiles("jobs/shop/orders/*.csv", ORDER), event_time=ordered)
payments = job.read("payments", CsvFiles("jobs/shop/payments/*.csv", PAYMENT), event_time=paid)

in_time = orders.key_by("id").interval_join(
    "in_time",
    payments.key_by("order_id"),
    time=("ordered_at", "paid_at"),
    lower=timedelta(0),
    upper=timedelta(hours=1),
    how="full",
)

# Without a payment once an hour is over, and payments without an order of the hour before: NULL on the other side.
is_order, is_payment = pl.col("ordered_at").is_not_null(), pl.col("paid_at").is_not_null()
paid_orders = in_time.filter(is_order & is_payment)
paid_orders.write("paid_orders", TwoPhaseCommitSink(PostgresTable("paid_orders", create=True)))
unpaid = in_time.filter(~is_payment).select("id", "ordered_at", "amount")
unpaid.write("unpaid_orders", TwoPhaseCommitSink(PostgresTable("unpaid_orders", create=True)))
stray = in_time.filter(~is_order).select("payment", "paid_at", "paid", order_id="id")
stray.write("stray_payments", TwoPhaseCommitSink(PostgresTable("stray_payments", create=True)))
# Whoever comes later than promised has no partner any more.
in_time.late.write("late_orders", TwoPhaseCommitSink(PostgresTable("late_orders", create=True)))
in_time.late_right.write("late_payments", TwoPhaseCommitSink(PostgresTable("late_payments", create=True)))
