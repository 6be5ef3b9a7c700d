"""A transactional sink that writes alone: one COPY stays open over a unit, and ends before it has prepared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest

from etl.runtime.transactions import StoreTransactions
from etl.schema import Schema
from etl.sink import SinkContext
from etl.transaction import commit
from sinks import PostgresTable, TransactionalSink
from sinks.postgres_writer import COPY_ROWS_MAX
from tests.support_sinks.stage import Stage

SCHEMA = Schema.declare({"id": "int8"})


@pytest.fixture
def stage(store_url: str) -> Iterator[Stage]:
    stage = Stage(store_url, SCHEMA)
    stage.admin.execute("CREATE TABLE kept (id int8 PRIMARY KEY)")
    yield stage
    stage.close()


@pytest.fixture
def transactions(stage: Stage) -> Iterator[StoreTransactions]:
    ledger = stage.ledger(1)
    with stage.database.connect("fence") as connection:
        ledger.fence(connection)
    transactions = StoreTransactions(lambda: stage.database.open("store"), ledger, stage.emit, exclusive=True)
    yield transactions
    transactions.close()


@pytest.fixture
def context(stage: Stage, transactions: StoreTransactions) -> SinkContext:
    return replace(stage.context(), transactions=transactions)


def _batch(first: int) -> pa.RecordBatch:
    ids = pa.array(range(first, first + COPY_ROWS_MAX), pa.int64())
    return pa.RecordBatch.from_arrays([ids], names=["id"])


def _complete(transactions: StoreTransactions, checkpoint_id: int) -> None:
    with transactions.completing(checkpoint_id) as session:
        commit(session.driver)


def test_rows_of_several_batches_commit_with_the_checkpoint(
    stage: Stage, transactions: StoreTransactions, context: SinkContext
) -> None:
    writer = TransactionalSink(PostgresTable("kept")).create_writer(context)
    for checkpoint_id in (1, 2):
        first = checkpoint_id * 10 * COPY_ROWS_MAX
        writer.write(_batch(first))
        writer.write(_batch(first + COPY_ROWS_MAX))
        writer.prepare_commit(checkpoint_id)
        assert stage.scalars("SELECT count(*) FROM kept") == [(checkpoint_id - 1) * 2 * COPY_ROWS_MAX]
        _complete(transactions, checkpoint_id)
        assert stage.scalars("SELECT count(*) FROM kept") == [checkpoint_id * 2 * COPY_ROWS_MAX]
    writer.close()
    assert writer.rows == 4 * COPY_ROWS_MAX


def test_unit_that_was_not_prepared_leaves_nothing(
    stage: Stage, transactions: StoreTransactions, context: SinkContext
) -> None:
    writer = TransactionalSink(PostgresTable("kept")).create_writer(context)
    writer.write(_batch(0))
    writer.close()
    transactions.close()
    assert stage.scalars("SELECT count(*) FROM kept") == [0]
