"""Orders of a web shop and of a till in one table, with taxes in exact decimals; cron runs it every five minutes."""

from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any

import polars as pl

from etl import Job
from etl.sources import CsvFiles
from sinks import PostgresTable, TransactionalSink, WriteAheadSink

ORDER = {
    "id": "int8",
    "ordered_at": "timestamptz",
    "amount": "numeric(12,2)",
    "tax_percent": "int2",
    "details": "jsonb",
}
TAXED = {**ORDER, "channel": "text", "tax": "numeric(12,2)"}


def taxed(order: dict[str, Any]) -> dict[str, Any]:
    """The order with the tax that its amount includes; an order without an amount yet has no tax yet."""
    amount, percent = order["amount"], order["tax_percent"]
    tax = None if amount is None else amount * percent / (100 + percent)
    order["tax"] = None if tax is None else tax.quantize(Decimal("0.01"), ROUND_HALF_EVEN)
    return order


job = Job("revenue", schedule="*/5 * * * *")
web = job.read("web", CsvFiles("jobs/orders/web/*.csv", ORDER)).with_columns(channel=pl.lit("web"))
# The till writes local times without a zone.
till_files = CsvFiles("jobs/orders/till/*.csv", ORDER, timezone="Europe/Berlin")
till = job.read("till", till_files).with_columns(channel=pl.lit("till"))
orders = web.union(till).map(taxed, schema=TAXED)

# Needs no prepared transactions, and the table could be in any other database.
orders.write("orders", WriteAheadSink(PostgresTable("orders", create=True)))
# Rows and positions commit in one transaction: the table must be in the store's database.
refunds = orders.filter(pl.col("amount") < 0)
refunds.write("refunds", TransactionalSink(PostgresTable("refunds", create=True)))
