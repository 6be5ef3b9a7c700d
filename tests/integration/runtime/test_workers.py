"""Worker processes: the same results as threads, and an exact target whatever becomes of a process."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

from etl.errors import ConfigurationError
from etl.runtime.loader import JobLoader
from etl.runtime.run import RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.telemetry import Event, Telemetry
from etl.store.database import Database
from tests.integration.runtime import test_joins, test_windows, worker_jobs
from tests.support.databases import fresh_database
from tests.support.waiting import wait_until

COUNT = 100
Contents = list[list[tuple[Any, ...]]]


class Run:
    """A run, and what is seen of its workers.

    Attributes:
        pids: Of the workers by number, those of the last attempt.
        started: All processes.
        warnings: What the user was told.
        summary: What came of it.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *arguments: str,
        workers: int = 2,
        drain: bool = False,
        at: Callable[[Run], object] | None = None,
        step: str = "",
        occurrence: int = 1,
    ) -> None:
        self.pids: dict[int, int] = {}
        self.started: list[int] = []
        self.warnings: list[str] = []
        self._seen: Counter[str] = Counter()
        self._at, self._step, self._occurrence = at, step, occurrence
        loader = JobLoader(worker_jobs.__name__, name, arguments)
        options = RunOptions(workers=workers, drain=drain, loader=loader, warn=self.warnings.append)
        telemetry = Telemetry()
        telemetry.subscribe(self._listen)
        try:
            self.summary = run_job(loader.load(), Database(url, "store"), {}, options, telemetry, StopSignal())
        finally:
            assert [pid for pid in self.started if Path(f"/proc/{pid}").exists()] == []

    def _listen(self, event: Event) -> None:
        if event.name == "worker.started":
            self.pids[event.fields["worker"]] = event.fields["pid"]
            self.started.append(event.fields["pid"])
        self._seen[event.name] += 1
        if event.name == self._step and self._seen[event.name] == self._occurrence:
            assert self._at is not None
            self._at(self)


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(statement).fetchall()


def contents(url: str) -> Contents:
    return [sorted(query(url, f"SELECT * FROM {table}")) for table in worker_jobs.TABLES]


def everything(url: str, tables: Sequence[str]) -> dict[str, Counter[tuple[Any, ...]]]:
    """The rows of tables, in no order."""
    return {table: Counter(query(url, f"SELECT * FROM {table}")) for table in tables}


def expected(count: int) -> Contents:
    """What the job of that many rows yields."""
    sums = dict.fromkeys(range(worker_jobs.KEYS), 0)
    running: list[tuple[int, int, int]] = []
    firsts: dict[int, tuple[int, int]] = {}
    for row in [row for id_ in range(count) if id_ != 4 for row in worker_jobs.spread({"id": id_})]:
        sums[row["key"]] += row["id"]
        running.append((row["id"], row["key"], sums[row["key"]]))
        firsts.setdefault(row["key"], (row["id"], row["key"]))
    ids = [[id_ for id_, _, _ in running if id_ % worker_jobs.BUCKETS == one] for one in range(worker_jobs.BUCKETS)]
    buckets = [(bucket, sum(of_bucket), len(of_bucket)) for bucket, of_bucket in enumerate(ids)]
    return [sorted(running), buckets, sorted(firsts.values())]


def stored(url: str) -> list[tuple[Any, ...]]:
    columns = "uid, key_group, checkpoint_id, sequence, rows, content"
    return query(url, f"SELECT {columns} FROM etl.state ORDER BY 1, 2, 3")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def kill(run: Run) -> None:
    os.kill(run.pids[1], signal.SIGKILL)
    # Not before it is gone: at the last steps the run could come to its end first.
    wait_until(lambda: _state_of(run.pids[1]) in ("", "Z"), "end of the worker")


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


@pytest.fixture
def other_url(server_url: str, store_template: str) -> Iterator[str]:
    with fresh_database(server_url, store_template) as url:
        yield url


def test_rows_are_dealt_out_to_workers_and_all_come_back(store_url: str) -> None:
    run = Run(store_url, "dealt", str(COUNT), "3", workers=2)

    assert (run.summary.error, run.summary.rows_read, run.warnings) == (None, COUNT, [])
    assert [id_ for (id_,) in query(store_url, "SELECT id FROM high ORDER BY id")] == list(range(COUNT))
    assert [id_ for (id_,) in query(store_url, "SELECT -id FROM low ORDER BY 1")] == list(range(COUNT))
    processes = query(store_url, "SELECT DISTINCT split_part(name, ' ', 2)::int FROM high ORDER BY 1")
    assert [pid for (pid,) in processes] == sorted(run.pids.values())


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_yield_and_remember_what_threads_do(store_url: str, other_url: str, workers: int) -> None:
    for count in (31, COUNT):
        run = Run(store_url, "totals", str(count), "4", workers=workers)
        threads = Run(other_url, "totals", str(count), "4", workers=0)

        assert (run.summary.error, run.summary.restarts, run.warnings) == (None, 0, [])
        assert len(run.started) == workers
        assert threads.started == []
        assert contents(store_url) == contents(other_url) == expected(count)
        assert stored(store_url) == stored(other_url)
        assert run.summary.rows_written == threads.summary.rows_written


def test_windows_and_their_late_rows_are_those_of_threads(store_url: str, other_url: str, tmp_path: Path) -> None:
    stream = test_windows.Stream(tmp_path)
    tables = ("hours", "late", "recent", "sessions")
    for late in (0, 7):
        stream.write(120, late=late)
        for url, workers in ((store_url, 2), (other_url, 0)):
            assert Run(url, "windows", str(tmp_path), "3", workers=workers).summary.error is None

        found = everything(store_url, tables)
        assert found == everything(other_url, tables)
    assert found["late"].total() == 7
    assert stored(store_url) == stored(other_url)


def test_join_of_two_inputs_is_that_of_threads(store_url: str, other_url: str, tmp_path: Path) -> None:
    shop = test_joins.Shop(tmp_path, [], [])
    for part in range(2):
        shop.invent(part, seed=part)
        for url, workers in ((store_url, 2), (other_url, 0)):
            assert Run(url, "joined", str(tmp_path), "3", workers=workers, drain=part == 1).summary.error is None
    found = everything(store_url, ("joined", "late", "late_right"))
    assert found == everything(other_url, ("joined", "late", "late_right"))
    assert found["joined"] == test_joins.all_pairs(shop)


def test_workers_and_parallelism_may_change_from_run_to_run(store_url: str) -> None:
    places = [("4", 2), ("3", 0), ("2", 3), ("1", 1), ("5", 2)]
    for number, (parallelism, workers) in enumerate(places, start=1):
        run = Run(store_url, "totals", str(number * 20), parallelism, workers=workers)
        assert run.summary.error is None
        assert contents(store_url) == expected(number * 20)


def test_no_more_workers_are_started_than_have_work(store_url: str) -> None:
    run = Run(store_url, "totals", "20", "1", workers=9)
    assert len(run.started) == 4
    assert contents(store_url) == expected(20)


@pytest.mark.parametrize("step, occurrence", [("worker.started", 2), ("state.snapshotting", 2), ("commit.end", 9)])
def test_run_recovers_from_a_killed_worker(store_url: str, step: str, occurrence: int) -> None:
    run = Run(store_url, "totals", str(COUNT), "4", at=kill, step=step, occurrence=occurrence)

    assert (run.summary.error, run.summary.restarts) == (None, 1)
    assert contents(store_url) == expected(COUNT)
    (warning,) = run.warnings
    killed = run.started[0]
    assert f"worker 1 (process {killed}) was ended by SIGKILL (kill -9, or the system ran out of memory)" in warning


def test_run_recovers_from_a_function_that_ends_its_process(store_url: str, tmp_path: Path) -> None:
    run = Run(store_url, "ending", str(COUNT), "4", str(tmp_path / "mark"))

    assert (run.summary.error, run.summary.restarts) == (None, 1)
    assert contents(store_url) == expected(COUNT)
    assert "ended with exit code 3" in run.warnings[0]


def test_run_gives_up_on_a_function_that_ends_its_process_each_time(store_url: str) -> None:
    run = Run(store_url, "ending_always", str(COUNT), "4")

    assert (run.summary.exit_code, run.summary.restarts) == (70, 2)
    assert run.summary.error is not None
    assert run.summary.error.endswith("ended with exit code 3")
    assert len(run.started) == 6


def test_worker_that_stands_still_fails_the_checkpoint_and_is_killed(store_url: str) -> None:
    def stop(run: Run) -> None:
        os.kill(run.pids[2], signal.SIGSTOP)

    run = Run(store_url, "impatient", str(COUNT), "4", "8", at=stop, step="source.batch", occurrence=12)

    assert (run.summary.error, run.summary.restarts) == (None, 1)
    assert "did not complete within 8 s; waiting for" in run.warnings[0]
    assert contents(store_url) == expected(COUNT)


def test_worker_that_stands_still_after_the_last_checkpoint_fails_the_attempt(store_url: str) -> None:
    def stop(run: Run) -> None:
        os.kill(run.pids[2], signal.SIGSTOP)

    # A source asks for a checkpoint after four batches of three rows; the ninth has what is left.
    run = Run(store_url, "impatient", str(COUNT), "4", "8", at=stop, step="commit.end", occurrence=9)

    assert (run.summary.error, run.summary.restarts) == (None, 1)
    assert "did not end within 8 s after the last checkpoint" in run.warnings[0]
    assert contents(store_url) == expected(COUNT)


def test_function_that_does_not_return_does_not_keep_its_process(store_url: str, tmp_path: Path) -> None:
    run = Run(store_url, "hanging", str(COUNT), "4", str(tmp_path / "mark"), "8")

    assert (run.summary.error, run.summary.restarts) == (None, 1)
    assert contents(store_url) == expected(COUNT)


@pytest.mark.parametrize("how", worker_jobs.STUMBLES)
def test_function_that_raises_fails_as_in_threads(store_url: str, other_url: str, how: str) -> None:
    run = Run(store_url, "stumbling", str(COUNT), "4", how)
    threads = Run(other_url, "stumbling", str(COUNT), "4", how, workers=0)

    assert threads.summary.error is not None
    assert run.summary.error == threads.summary.error
    assert run.summary.exit_code == threads.summary.exit_code
    assert type(run.summary.cause) is type(threads.summary.cause)
    assert run.warnings == threads.warnings
    assert run.summary.cause is not None
    assert "worker_jobs.py" in str(run.summary.cause.__cause__)


def test_error_of_a_listener_is_raised_at_the_step_of_a_worker(store_url: str) -> None:
    def fail(_run: Run) -> None:
        raise ConfigurationError("not now")

    run = Run(store_url, "totals", str(COUNT), "4", at=fail, step="state.snapshotted", occurrence=2)

    assert (run.summary.error, run.summary.exit_code) == ("not now", 2)


def test_what_functions_print_passes_through(store_url: str, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(store_url, "talking", str(COUNT), "4")

    assert run.summary.error is None
    printed = capfd.readouterr().err
    talker = next(pid for pid in run.started if f"process {pid} has come to 42\n" in printed)
    assert talker != os.getpid()
    assert "UserWarning: it was warned of" in printed


def test_worker_refuses_a_job_that_is_another_one_there(store_url: str) -> None:
    run = Run(store_url, "renamed", str(COUNT), "2", str(os.getpid()))

    assert run.summary.exit_code == 2
    assert run.summary.error is not None
    assert run.summary.error.startswith('"filter-2" is filter ')
    assert "in a worker: a job must be declared the same whenever its module is imported" in run.summary.error


def test_run_leaves_no_open_files(store_url: str) -> None:
    Run(store_url, "totals", "20", "4")
    before = open_files()
    Run(store_url, "totals", "40", "4", at=kill, step="source.batch", occurrence=3)
    assert open_files() == before


def test_workers_without_work_are_not_started(store_url: str) -> None:
    run = Run(store_url, "plain", "20", workers=3)

    assert (run.summary.error, run.started) == (None, [])
    assert run.warnings == ["it calls no Python functions and keeps no state: there is nothing for workers to do"]
    assert query(store_url, "SELECT count(*), sum(id) FROM plain") == [(19, sum(range(1, 20)))]
