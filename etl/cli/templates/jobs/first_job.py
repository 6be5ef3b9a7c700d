"""Orders from CSV files into two tables, exactly once."""

import polars as pl

from etl import Job
from etl.sources import CsvFiles
from sinks import PostgresTable, TransactionalSink, UpsertSink

job = Job("first_job", schedule="*/5 * * * *")

orders = job.read(
    "orders",
    CsvFiles(
        "data/orders/*.csv",
        schema={
            "id": "int8",
            "ordered_at": "timestamptz",
            "customer": "text",
            "city": "text",
            "amount": "numeric(12,2)",
            "status": "text",
            "note": "text",
        },
    ),
)

# Every paid order is appended; rows and reading positions commit in one transaction.
paid = orders.filter(pl.col("status") == "paid")
paid.write("paid_orders", TransactionalSink(PostgresTable("paid_orders", create=True)))

# One row a customer, replaced by what the newest line says.
customers = orders.select("customer", "city", "ordered_at")
customers.write("customers", UpsertSink(PostgresTable("customers", key=["customer"], create=True)))
