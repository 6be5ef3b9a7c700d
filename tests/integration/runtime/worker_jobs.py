"""Jobs whose functions run in worker processes, which import this module anew.

Arguments are texts, as they are sent to the workers.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl

from etl import CheckpointPolicy, Job, RestartPolicy, ValueState
from etl.errors import RecordError
from sinks import PostgresTable, TwoPhaseCommitSink, UpsertSink
from tests.integration.runtime import test_joins, test_windows
from tests.support.scripted import Numbers

Row = dict[str, Any]
KEYS = 7
BUCKETS = 3
TABLES = ("running", "totals", "firsts")
STUMBLING_BLOCK = 42
"""At the row with this id something happens."""


def spread(row: Row) -> Iterator[Row]:
    """Each number, and its successor when it is even."""
    yield {"id": row["id"], "key": row["id"] % KEYS}
    if row["id"] % 2 == 0:
        yield {"id": row["id"] + 1, "key": (row["id"] + 1) % KEYS}


def totals(count: str, parallelism: str) -> Job:
    """Functions over rows, functions that remember, and exchanges by different keys."""
    return _totals(count, parallelism, lambda _id: None)


def _totals(count: str, parallelism: str, before: Callable[[int], None], timeout_s: float = 60.0) -> Job:
    def running(row: Row, state: Any) -> Iterator[Row]:
        before(row["id"])
        state.sum.value = (state.sum.value or 0) + row["id"]
        yield {"id": row["id"], "key": row["key"], "sum": state.sum.value}

    policy = CheckpointPolicy(interval_s=60.0, rows=10, timeout_s=timeout_s)
    restart = RestartPolicy(attempts=2, delay_s=0.02, delay_max_s=0.1)
    job = Job("totals", checkpoint=policy, restart=restart, parallelism=int(parallelism))
    numbers = job.read("numbers", Numbers(int(count), batch_rows=3))
    numbers_spread = numbers.filter(pl.col("id") != 4).flat_map(spread, schema={"id": "int8", "key": "int8"})
    sums = numbers_spread.key_by("key").process(
        "running", running, state={"sum": ValueState("int8")}, schema={"id": "int8", "key": "int8", "sum": "int8"}
    )
    sums.write("running_out", TwoPhaseCommitSink(PostgresTable("running", create=True)))
    by_bucket = sums.with_columns(bucket=pl.col("id") % BUCKETS).key_by("bucket")
    counted = by_bucket.aggregate("totals", total=pl.col("id").sum(), rows=pl.len())
    counted.write("totals_out", UpsertSink(PostgresTable("totals", key=["bucket"], create=True)))
    firsts = numbers_spread.deduplicate("firsts", "key", parallelism=1)
    firsts.write("firsts_out", TwoPhaseCommitSink(PostgresTable("firsts", create=True)))
    return job


def _raise_value_error() -> None:
    raise ValueError("this number brings bad luck")


def _raise_unprintable() -> None:
    raise ValueError("no text can hold \udc80, and no database \0")


def _raise_record_error() -> None:
    raise RecordError("this number cannot be carried", uid="numbers", split="numbers")


STUMBLES: dict[str, Callable[[], None]] = {
    "value error": _raise_value_error,
    "unprintable": _raise_unprintable,
    "record error": _raise_record_error,
    "os error": lambda: Path("/nowhere/at/all").rmdir(),
    "sys.exit": lambda: sys.exit(5),
}
"""What the same function does in threads as well."""


def stumbling(count: str, parallelism: str, how: str) -> Job:
    """The function raises, each time."""
    return _totals(count, parallelism, lambda id_: STUMBLES[how]() if id_ == STUMBLING_BLOCK else None)


def ending(count: str, parallelism: str, mark: str) -> Job:
    """The function ends its process, as long as there is no file of that name."""

    def end(id_: int) -> None:
        if id_ == STUMBLING_BLOCK and not Path(mark).exists():
            Path(mark).touch()
            os._exit(3)

    return _totals(count, parallelism, end)


def ending_always(count: str, parallelism: str) -> Job:
    """The function ends its process, each time."""
    return _totals(count, parallelism, lambda id_: os._exit(3) if id_ == STUMBLING_BLOCK else None)


def hanging(count: str, parallelism: str, mark: str, timeout_s: str) -> Job:
    """The function does not return, as long as there is no file of that name."""

    def hang(id_: int) -> None:
        if id_ == STUMBLING_BLOCK and not Path(mark).exists():
            Path(mark).touch()
            time.sleep(3600)

    return _totals(count, parallelism, hang, float(timeout_s))


def impatient(count: str, parallelism: str, timeout_s: str) -> Job:
    """Nothing happens, but checkpoints must be quick."""
    return _totals(count, parallelism, lambda _id: None, float(timeout_s))


def talking(count: str, parallelism: str) -> Job:
    """The function prints and warns."""

    def talk(id_: int) -> None:
        if id_ == STUMBLING_BLOCK:
            print(f"process {os.getpid()} has come to {id_}", file=sys.stderr)
            warnings.warn("it was warned of", stacklevel=1)

    return _totals(count, parallelism, talk)


def renamed(count: str, parallelism: str, main: str) -> Job:
    """With another operator in the process that is not the main one."""
    job = totals(count, parallelism)
    extra = job.read("more", Numbers(int(count)))
    stream = extra.filter(pl.col("id") > 0) if os.getpid() == int(main) else extra.filter(pl.col("id") > 1)
    stream.write("more_out", TwoPhaseCommitSink(PostgresTable("more", create=True)))
    return job


def plain(count: str) -> Job:
    """Nothing but an expression."""
    job = Job("plain")
    numbers = job.read("numbers", Numbers(int(count))).filter(pl.col("id") > 0)
    numbers.write("out", TwoPhaseCommitSink(PostgresTable("plain", create=True)))
    return job


def _with_process(row: Row) -> Row:
    return {**row, "name": f"{row['name']} {os.getpid()}"}


def dealt(count: str, parallelism: str) -> Job:
    """Several subtasks read, and a function is called in several others, which pass their rows to as many again."""
    job = Job("dealt", checkpoint=CheckpointPolicy(interval_s=60.0, rows=10))
    numbers = job.read("numbers", Numbers(int(count)), parallelism=2)
    mapped = numbers.rebalance(int(parallelism)).map(_with_process)
    mapped.map(lambda row: {**row, "id": -row["id"]}).write(
        "low", TwoPhaseCommitSink(PostgresTable("low", create=True))
    )
    mapped.filter(pl.col("id") >= 0).write("high", TwoPhaseCommitSink(PostgresTable("high", create=True)))
    return job


def windows(directory: str, parallelism: str) -> Job:
    """Event time: watermarks, and late rows on the side."""
    return test_windows.job_of(Path(directory), int(parallelism))


def joined(directory: str, parallelism: str) -> Job:
    """Two inputs, by their own keys, and two side outputs."""
    return test_joins.interval_job(test_joins.Shop(Path(directory), [], []), int(parallelism))
