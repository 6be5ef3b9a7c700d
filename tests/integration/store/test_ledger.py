"""Fence and ledger: outdated writers cannot write, and what was committed can be told."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from etl.errors import FenceBlockedError, FencedError
from etl.sink import Committable, Connection
from etl.store.database import Database
from etl.store.ledger import DatabaseLedger
from etl.transaction import begin, commit, commit_prepared, prepare, rollback_prepared, transaction

JOB = "0123456789abcdef"


def ledger(epoch: int, incarnation: int = 1, sink_id: int = 1, keep: int = 2) -> DatabaseLedger:
    return DatabaseLedger(JOB, incarnation, epoch, sink_id, keep)


def unit(checkpoint_id: int, epoch: int = 1) -> Committable:
    return Committable("s", 0, checkpoint_id, epoch, 3, {})


@pytest.fixture
def writer(store_url: str) -> Iterator[Connection]:
    with Database(store_url, "store").connect("test") as connection:
        yield connection


@pytest.fixture
def rival(store_url: str) -> Iterator[Connection]:
    with Database(store_url, "store").connect("test") as connection:
        yield connection


def test_fence_is_idempotent_for_its_epoch(writer: Connection) -> None:
    ledger(3).fence(writer)
    ledger(3).fence(writer)
    with transaction(writer):
        ledger(3).hold_fence(writer)


def test_fence_is_refused_when_a_newer_epoch_is_there(writer: Connection) -> None:
    ledger(3).fence(writer)
    with pytest.raises(FencedError):
        ledger(2).fence(writer)


def test_writer_of_an_older_epoch_is_refused(writer: Connection) -> None:
    ledger(1).fence(writer)
    ledger(2).fence(writer)
    with pytest.raises(FencedError), transaction(writer):
        ledger(1).hold_fence(writer)


def test_fence_is_blocked_by_a_prepared_transaction_until_it_is_resolved(writer: Connection, rival: Connection) -> None:
    ledger(1).fence(writer)
    begin(writer)
    ledger(1).hold_fence(writer)
    gid = f"etl:{JOB}:1:1:1:{writer.info.backend_pid}"
    prepare(writer, gid)
    with pytest.raises(FenceBlockedError):
        ledger(2).fence(rival)
    rollback_prepared(rival, gid)
    ledger(2).fence(rival)


def test_fence_ends_an_open_transaction_of_an_older_epoch(store_url: str, rival: Connection) -> None:
    with Database(store_url, "store").connect(f"etl:{JOB}:1:sink") as zombie:
        ledger(1).fence(rival)
        begin(zombie)
        ledger(1).hold_fence(zombie)
        ledger(2).fence(rival)
        with pytest.raises(psycopg.OperationalError):
            commit(zombie)


def test_ledger_tells_a_committed_unit_from_a_rolled_back_one(writer: Connection, rival: Connection) -> None:
    for number, gid in ((1, "etl-test:a"), (2, "etl-test:b")):
        begin(writer)
        ledger(1).record(writer, unit(number))
        prepare(writer, f"{gid}:{writer.info.backend_pid}")
    assert not ledger(1).is_recorded(rival, unit(1))
    commit_prepared(rival, f"etl-test:a:{writer.info.backend_pid}")
    rollback_prepared(rival, f"etl-test:b:{writer.info.backend_pid}")
    assert ledger(1).is_recorded(rival, unit(1))
    assert not ledger(1).is_recorded(rival, unit(2))


def test_ledger_row_belongs_to_one_epoch_and_one_incarnation(writer: Connection) -> None:
    with transaction(writer):
        ledger(1).record(writer, unit(1))
    assert not ledger(1).is_recorded(writer, unit(1, epoch=2))
    assert not ledger(1, incarnation=2).is_recorded(writer, unit(1))


def test_prune_keeps_the_newest_rows_of_its_own_sink(writer: Connection) -> None:
    with transaction(writer):
        for number in range(1, 6):
            ledger(1).record(writer, unit(number))
        ledger(1, sink_id=2).record(writer, unit(1))
    ledger(1).prune(writer, 5)
    rows = writer.execute("SELECT sink_id, checkpoint_id FROM etl.commit_ledger ORDER BY 1, 2").fetchall()
    assert rows == [(1, 3), (1, 4), (1, 5), (2, 1)]
