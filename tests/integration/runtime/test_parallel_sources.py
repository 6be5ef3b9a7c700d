"""Sources that several subtasks read: the same result at any number of them, and over a change of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import psycopg
import pytest

from etl import CheckpointMode, CheckpointPolicy, Job, RestartPolicy
from etl.errors import RecordError, TransientError
from etl.runtime.run import RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.summary import RunSummary
from etl.runtime.telemetry import Event, Telemetry
from etl.sources import CsvFiles
from etl.store.database import Database
from etl.store.tables import RunStatus
from sinks import PostgresTable, TwoPhaseCommitSink, UpsertSink

COLUMNS = {"id": "int8", "key": "int4"}
COUNT = "SELECT count(*)::int FROM rows"
FILES = {f"{number}.csv": number % 7 * 10 + 1 for number in range(24)}
"""Rows by name of a file."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    first = 0
    for name, rows in FILES.items():
        append(tmp_path / name, range(first, first + rows))
        first += rows
    return tmp_path


def append(path: Path, ids: range) -> None:
    header = "" if path.exists() else "id,key\n"
    with path.open("a") as file:
        file.write(header + "".join(f"{id_},{id_ % 5}\n" for id_ in ids))


def declared(directory: Path, parallelism: int, rows: int = 40, **options: Any) -> Job:
    policy = CheckpointPolicy(interval_s=60.0, rows=rows, keep=1000)
    job = Job("files", checkpoint=policy, restart=RestartPolicy(attempts=3, delay_s=0.01, delay_max_s=0.01), **options)
    job.base_dir = directory
    stream = job.read("files", CsvFiles("*.csv", COLUMNS, batch_rows=4), parallelism=parallelism)
    stream.write("rows", TwoPhaseCommitSink(PostgresTable("rows", create=True)))
    if job.mode is not CheckpointMode.AT_MOST_ONCE:
        totals = stream.key_by("key").aggregate("totals", total=pl.col("id").sum(), parallelism=2)
        totals.write("by_key", UpsertSink(PostgresTable("totals", key=["key"], create=True)))
    return job


def run(url: str, job: Job, listen: Callable[[Event], None] | None = None, **options: Any) -> RunSummary:
    telemetry = Telemetry()
    if listen is not None:
        telemetry.subscribe(listen)
    stop = options.pop("stop", None) or StopSignal()
    return run_job(job, Database(url, "store"), {}, RunOptions(**options), telemetry, stop)


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(statement).fetchall()


def check(url: str, rows: int) -> None:
    assert query(url, "SELECT id FROM rows ORDER BY id") == [(id_,) for id_ in range(rows)]
    totals = [(key, sum(range(key, rows, 5))) for key in range(5)]
    assert query(url, "SELECT key, total FROM totals ORDER BY key") == totals


@pytest.mark.parametrize("parallelism", [1, 2, 4, 30])
def test_many_files_come_to_the_same_at_any_parallelism(store_url: str, directory: Path, parallelism: int) -> None:
    readers: set[Any] = set()
    job = declared(directory, parallelism)

    def listen(event: Event) -> None:
        if event.name == "source.barrier":
            readers.add(event.fields["uid"])

    summary = run(store_url, job, listen)
    total = sum(FILES.values())
    assert (summary.exit_code, summary.rows_read) == (0, total)
    check(store_url, total)
    assert readers == ({"files"} if parallelism == 1 else {f"files[{number}]" for number in range(parallelism)})
    ends = query(store_url, "SELECT split, position->>'offset', position->>'size' FROM etl.positions")
    assert len(ends) == len(FILES)
    assert all(offset == size for _, offset, size in ends)
    assert query(store_url, "SELECT sum(rows_read)::int8, count(*) > 5 FROM etl.checkpoints") == [(total, True)]

    again = run(store_url, declared(directory, parallelism))
    assert (again.rows_read, again.checkpoint) == (0, summary.checkpoint)


@pytest.mark.parametrize("mode", CheckpointMode)
def test_every_mode_reads_in_parallel(store_url: str, directory: Path, mode: CheckpointMode) -> None:
    assert run(store_url, declared(directory, 3, mode=mode)).exit_code == 0
    assert query(store_url, "SELECT id FROM rows ORDER BY id") == [(id_,) for id_ in range(sum(FILES.values()))]


def test_parallelism_changes_from_run_to_run(store_url: str, directory: Path) -> None:
    completed = 0
    for parallelism in (2, 4, 1, 3, 2):
        checkpoints = 0

        def listen(event: Event) -> None:
            nonlocal checkpoints
            if event.name == "commit.end":
                checkpoints += 1
                if checkpoints == 3:
                    raise RecordError("enough for this run")

        summary = run(store_url, declared(directory, parallelism), listen)
        assert summary.exit_code == 65
        completed += summary.rows_read
        assert 0 < completed < sum(FILES.values())
    assert run(store_url, declared(directory, 4)).rows_read == sum(FILES.values()) - completed
    check(store_url, sum(FILES.values()))


def test_attempt_that_failed_is_repeated_with_the_splits_handed_out_anew(store_url: str, directory: Path) -> None:
    failures = iter([5, 6, 7])
    batches = 0

    def listen(event: Event) -> None:
        nonlocal batches
        if event.name == "source.batch":
            batches += 1
            if batches % 40 == 0 and next(failures, None) is not None:
                raise TransientError("again")

    summary = run(store_url, declared(directory, 3), listen)
    assert (summary.exit_code, summary.restarts) == (0, 3)
    check(store_url, sum(FILES.values()))


def test_stop_takes_a_final_checkpoint_of_what_all_have_read(store_url: str, directory: Path) -> None:
    stop = StopSignal()

    def listen(event: Event) -> None:
        if event.name == "checkpoint.completed" and event.fields["checkpoint"] == 2:
            stop.request(2)

    summary = run(store_url, declared(directory, 3), listen, stop=stop)
    assert (summary.status, summary.exit_code) == (RunStatus.STOPPED, 130)
    assert query(store_url, "SELECT count(*) FROM rows") == [(summary.rows_read,)]
    assert run(store_url, declared(directory, 2)).exit_code == 0
    check(store_url, sum(FILES.values()))


def test_files_that_grow_are_followed_by_whoever_is_free(store_url: str, tmp_path: Path) -> None:
    """Each file grows many times, and new ones come, while three subtasks follow and checkpoints are taken."""
    stop, ended = StopSignal(), threading.Event()
    rounds, files, step = 12, 5, 3

    def write() -> None:
        first = 0
        for number in range(rounds):
            for file in range(files):
                append(tmp_path / f"{file if number else 0}.csv", range(first, first + step))
                first += step
            ended.wait(0.15)
        while not ended.wait(0.05):
            if query(store_url, "SELECT count(*) FROM rows") == [(first,)]:
                stop.request(15)
                return

    append(tmp_path / "0.csv", range(0))
    with psycopg.connect(store_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE rows (id int8, key int4)")
    job = declared(tmp_path, 3)
    job.checkpoint = CheckpointPolicy(interval_s=0.1, rows=7)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        summary = run(store_url, job, follow=True, stop=stop)
    finally:
        ended.set()
        writer.join()
    assert (summary.status, summary.rows_read) == (RunStatus.STOPPED, rounds * files * step)
    check(store_url, rounds * files * step)


@pytest.mark.parametrize("parallelism", [1, 3])
def test_rows_are_dealt_out_to_functions_and_all_come_back(store_url: str, directory: Path, parallelism: int) -> None:
    threads: set[str] = set()

    def noting(row: dict[str, Any]) -> dict[str, Any]:
        threads.add(threading.current_thread().name)
        return row

    job = Job("dealt", checkpoint=CheckpointPolicy(interval_s=60.0, rows=40))
    job.base_dir = directory
    stream = job.read("files", CsvFiles("*.csv", COLUMNS, batch_rows=4), parallelism=parallelism)
    mapped = stream.rebalance(4).map(noting)
    mapped.filter(pl.col("key") < 3).write("low", TwoPhaseCommitSink(PostgresTable("low", create=True)))
    mapped.filter(pl.col("key") >= 3).write("high", TwoPhaseCommitSink(PostgresTable("high", create=True)))
    assert run(store_url, job).exit_code == 0
    found = query(store_url, "SELECT id FROM (SELECT * FROM low UNION ALL SELECT * FROM high) AS found ORDER BY id")
    assert found == [(id_,) for id_ in range(sum(FILES.values()))]
    assert threads == {f"map-1[{number}]" for number in range(4)}


def test_one_file_is_read_in_parts_by_several_over_restarts_and_growth(store_url: str, tmp_path: Path) -> None:
    append(tmp_path / "0.csv", range(400))
    failures = iter([1, 2])
    batches = 0

    def listen(event: Event) -> None:
        nonlocal batches
        if event.name == "source.batch":
            batches += 1
            if batches % 60 == 0 and next(failures, None) is not None:
                raise TransientError("again")

    for parallelism, split_bytes, rows in ((3, 500, 400), (2, 900, 1000), (1, None, 1001)):
        append(tmp_path / "0.csv", range(query(store_url, COUNT)[0][0] if rows > 400 else 400, rows))
        restart = RestartPolicy(attempts=3, delay_s=0.01, delay_max_s=0.01)
        job = Job("parts", checkpoint=CheckpointPolicy(interval_s=60.0, rows=40), restart=restart)
        job.base_dir = tmp_path
        source = CsvFiles("*.csv", COLUMNS, batch_rows=4, split_bytes=split_bytes)
        job.read("file", source, parallelism=parallelism).write(
            "rows", TwoPhaseCommitSink(PostgresTable("rows", create=True))
        )
        assert run(store_url, job, listen).exit_code == 0
        assert query(store_url, "SELECT id FROM rows ORDER BY id") == [(id_,) for id_ in range(rows)]
    splits = [split for (split,) in query(store_url, "SELECT split FROM etl.positions")]
    assert "0.csv" in splits
    assert len(splits) > 6
