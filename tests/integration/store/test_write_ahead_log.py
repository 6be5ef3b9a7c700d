"""The write-ahead log: durable only when sealed, read back in order, cleaned by epoch."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from etl.errors import FencedError, InternalError
from etl.sink import Committable
from etl.store import lease as leases
from etl.store.database import Database
from etl.store.ledger import DatabaseLedger
from etl.store.write_ahead_log import DatabaseWriteAheadLog

MakeLog = Callable[[int], DatabaseWriteAheadLog]


@pytest.fixture
def make_log(store_url: str) -> MakeLog:
    store = Database(store_url, "store")
    with store.session("test") as session:
        job_id = leases.register_job(session, "job")

    def make(epoch: int) -> DatabaseWriteAheadLog:
        ledger = DatabaseLedger(job_id, 1, epoch, 0, keep=10)
        with store.connect("test") as connection:
            ledger.fence(connection)
        return DatabaseWriteAheadLog(
            lambda: store.connect("test"),
            ledger,
            uid="s",
            job_id=job_id,
            incarnation=1,
            epoch=epoch,
            sink_id=1,
            subtask=0,
        )

    return make


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"a": pa.array(values, pa.int64()), "b": pa.array([str(v) for v in values])})


def unit(checkpoint_id: int, epoch: int, rows: int = 0) -> Committable:
    return Committable("s", 0, checkpoint_id, epoch, rows, {})


def read(log: DatabaseWriteAheadLog, one: Committable) -> list[object]:
    with log.read(one) as batches:
        return [value for each in batches for value in each.column("a").to_pylist()]


def test_log_gives_back_batches_in_order(make_log: MakeLog) -> None:
    log = make_log(1)
    for start in range(12):
        log.append(1, batch(start * 2, start * 2 + 1))
    assert log.seal(1) == 24
    with log.read(unit(1, 1)) as batches:
        found = list(batches)
    assert found == [batch(start * 2, start * 2 + 1) for start in range(12)]
    log.close()


def test_log_keeps_nothing_that_was_not_sealed(make_log: MakeLog) -> None:
    log = make_log(1)
    log.append(1, batch(1))
    log.close()
    later = make_log(2)
    assert read(later, unit(1, 1)) == []
    later.close()


def test_seal_of_nothing_is_nothing(make_log: MakeLog) -> None:
    log = make_log(1)
    assert log.seal(1) == 0
    log.close()


def test_log_refuses_rows_of_another_checkpoint_than_the_open_one(make_log: MakeLog) -> None:
    log = make_log(1)
    log.append(1, batch(1))
    with pytest.raises(InternalError):
        log.append(2, batch(2))
    log.close()


def test_log_of_an_older_epoch_is_refused(make_log: MakeLog) -> None:
    former, _ = make_log(1), make_log(2)
    with pytest.raises(FencedError):
        former.append(1, batch(1))
    former.close()


def test_recovery_keeps_recorded_units_and_drops_the_rest_of_former_epochs(make_log: MakeLog) -> None:
    former = make_log(1)
    for number in (1, 2, 3):
        former.append(number, batch(number))
        former.seal(number)
    former.close()
    log = make_log(2)
    log.append(3, batch(30))
    log.seal(3)
    completed = [unit(2, 1, rows=1), unit(1, 1, rows=1)]
    log.discard_unfinished(completed)
    assert log.pending(completed) == [unit(1, 1, rows=1), unit(2, 1, rows=1)]
    assert read(log, unit(3, 1)) == []
    assert read(log, unit(3, 2)) == [30]
    log.close()


def test_prune_drops_one_unit_and_may_be_repeated(make_log: MakeLog) -> None:
    log = make_log(1)
    for number in (1, 2):
        log.append(number, batch(number))
        log.seal(number)
    log.prune(unit(1, 1))
    log.prune(unit(1, 1))
    assert read(log, unit(1, 1)) == []
    assert read(log, unit(2, 1)) == [2]
    log.close()
