"""What must hold after each cycle, recomputed from the input files and the recorded positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from tests.faults.arena import Arena
from tests.faults.described import COLUMNS, DescribedJob, DescribedSink
from tests.faults.fault import RunRequest, RunResult
from tests.faults.oracle import check_nothing_left
from tests.soak import truth
from tests.soak.files import InputFile, Row, read_input
from tests.soak.truth import Rows
from tests.support.databases import one_snapshot

Connection = psycopg.Connection[Any]
Offsets = Mapping[str, int]
"""Byte offsets by split."""

ALL_KEPT = 1000
FENCED = 78


@dataclass(frozen=True, slots=True)
class Head:
    """A job as the store describes it.

    Attributes:
        job_id: Its id, empty when the job was never registered.
        epoch: Of the last run that claimed it.
        checkpoint: Number of the last completed checkpoint.
        offsets: By checkpoint, those that are kept, where reading goes on; and at 0 the beginning of everything.
    """

    job_id: str = ""
    epoch: int = 0
    checkpoint: int = 0
    offsets: Mapping[int, Offsets] = field(default_factory=lambda: {0: {}})


def read_head(connection: Connection, job: str, keep: int) -> Head:
    """Read the store; in one snapshot when the caller has one."""
    found = connection.execute(
        "SELECT job_id, epoch, checkpoint_id FROM etl.head JOIN etl.job USING (job_id) WHERE name = %s", [job]
    ).fetchone()
    if found is None:
        return Head()
    job_id, epoch, checkpoint = found
    moved = connection.execute(
        "SELECT checkpoint_id, split_id, (position->>'offset')::int8 FROM etl.position"
        " WHERE job_id = %s AND checkpoint_id <= %s ORDER BY checkpoint_id",
        [job_id, checkpoint],
    ).fetchall()
    offsets: dict[int, Offsets] = {0: {}}
    latest: dict[str, int] = {}
    for number in range(1, checkpoint + 1):
        latest |= {_split_name(split): offset for when, split, offset in moved if when == number}
        if number > checkpoint - keep:
            offsets[number] = dict(latest)
    return Head(job_id, epoch, checkpoint, offsets)


def _split_name(split: str) -> str:
    return "/".join(split.rsplit("/", 2)[-2:])


@dataclass(frozen=True, slots=True)
class World:
    """Files and tables of one job.

    Attributes:
        arena: The databases.
        request: Names the job.
        job: What it does.
    """

    arena: Arena
    request: RunRequest
    job: DescribedJob

    def files(self) -> dict[str, list[InputFile]]:
        """What there is to read, by source."""
        return {source: read_input(Path(self.request.input_dir), source) for source in self.job.sources}

    def head(self) -> Head:
        """What the store says now."""
        return read_head(self.arena.store, self.request.job, self.job.keep)

    def visible(self, sink: DescribedSink) -> Rows:
        """What readers of the table see."""
        return visible_rows(self.arena.other if sink.other else self.arena.store, sink)


def visible_rows(connection: Connection, sink: DescribedSink) -> Rows:
    """What readers of the table see."""
    columns = sql.SQL(", ").join(map(sql.Identifier, COLUMNS))
    query = sql.SQL("SELECT {} FROM {}").format(columns, sql.Identifier(sink.table))
    return Counter(connection.execute(query).fetchall())


class Reading:
    """What comes of the rows before and behind a cut.

    Args:
        job: What becomes of rows.
        files: What there is to read.
        head: Where the cuts are.
    """

    def __init__(self, job: DescribedJob, files: Mapping[str, Sequence[InputFile]], head: Head) -> None:
        self._job = job
        self._files = files
        self._head = head
        self._came: dict[int, Mapping[str, list[Row]]] = {}

    def came(self, checkpoint: int) -> Mapping[str, list[Row]]:
        """By sink, the rows that had come to it at a checkpoint."""
        if checkpoint not in self._came:
            self._came[checkpoint] = truth.arrivals(self._job, self.read(checkpoint))
        return self._came[checkpoint]

    def read(self, checkpoint: int) -> dict[str, list[Row]]:
        """By source, the rows that were read up to a checkpoint."""
        offsets = self._head.offsets[checkpoint]
        return {
            source: [row for file in files for row in file.rows_before(offsets.get(file.name, 0))]
            for source, files in self._files.items()
        }

    def coming(self) -> Mapping[str, list[Row]]:
        """By sink, the rows that come to it behind the head."""
        everything = {
            source: [row for file in files for row in file.rows_after(0)] for source, files in self._files.items()
        }
        came = self.came(self._head.checkpoint)
        # Not what comes of the unread rows alone: some operations remember those before.
        return {
            uid: list((Counter(rows) - Counter(came[uid])).elements())
            for uid, rows in truth.arrivals(self._job, everything).items()
        }

    def shown(self, sink: DescribedSink, checkpoint: int) -> Rows:
        """What the sink shows when all of a checkpoint and nothing else is visible."""
        return truth.shown(sink, self.came(checkpoint)[sink.uid])


# --- after any cycle --------------------------------------------------------------------------------------------------


def check_interrupted(world: World) -> Head:
    """Nobody is at work, but the server may still carry out what a dead process sent last."""
    sinks = sorted(world.job.sinks, key=lambda sink: not sink.other)
    with one_snapshot(world.arena.store):
        # The other database is looked at first: between the two looks a dead run can only get further by one step.
        seen = {sink: world.visible(sink) for sink in sinks}
        head = world.head()
    reading = Reading(world.job, world.files(), head)
    for sink, rows in seen.items():
        lag = int(sink.late) + int(sink.other)
        check_whole(sink, rows, reading, max(0, head.checkpoint - lag), head.checkpoint)
    return head


def check_whole(sink: DescribedSink, rows: Rows, reading: Reading, low: int, high: int) -> None:
    """What a sink shows is what it may show at one of these checkpoints."""
    if sink.early:
        check_early(sink, rows, reading, low, high)
        return
    allowed = {number: reading.shown(sink, number) for number in range(low, high + 1)}
    if rows not in allowed.values():
        told = "; ".join(f"at {number} {difference(rows, whole)}" for number, whole in allowed.items())
        raise AssertionError(f"{sink.uid} shows no union of whole checkpoints: {told}")


def check_early(sink: DescribedSink, rows: Rows, reading: Reading, low: int, high: int) -> None:
    """An upsert may show, of each key, what was recorded or what comes behind; never an older version than recorded.

    Units that were written and not recorded can have ended anywhere, and each run may have written another one.
    """
    recorded = {row[1]: row for row in reading.shown(sink, low)}
    possible = {*recorded.values(), *reading.coming()[sink.uid]}
    possible.update(row for number in range(low + 1, high + 1) for row in reading.came(number)[sink.uid])
    strange = [row for row in rows.elements() if row not in possible]
    assert not strange, f"{sink.uid} shows {strange}, which are neither recorded nor to come"
    assert max(rows.values(), default=1) == 1, f"{sink.uid} shows a row twice"
    lost = recorded.keys() - {row[1] for row in rows}
    assert not lost, f"{sink.uid} lost the keys {sorted(lost)}"
    if sink.versioned:
        back = [row for row in rows if row[1] in recorded and row[2] < recorded[row[1]][2]]
        assert not back, f"{sink.uid} went back to {back}"


def difference(rows: Rows, whole: Rows) -> str:
    """What is there too often and too rarely, in words."""
    return f"{list((rows - whole).elements())} too much and {list((whole - rows).elements())} missing"


def check_told(world: World, pid: int, result: RunResult) -> None:
    """What a run said of itself agrees with what is recorded of it."""
    recorded = world.arena.store.execute(
        "SELECT run_id, rows_read, rows_written, status, r.exit_code, restarts, coalesce(checkpoint_id, 0)"
        " FROM etl.run r JOIN etl.job j USING (job_id) WHERE name = %s AND pid = %s",
        [world.request.job, pid],
    ).fetchall()
    assert len(recorded) <= 1, f"a run is recorded several times: {recorded}"
    if not recorded or result.exit_code == FENCED:
        return
    ((run_id, rows_read, rows_written, status, exit_code, restarts, checkpoint),) = recorded
    assert result.rows_read == rows_read, f"the run says it read {result.rows_read} rows, the store {rows_read}"
    assert _positive(result.rows_written) == _positive(rows_written), "run and store differ in rows written"
    if status in ("succeeded", "stopped", "failed"):
        said = (result.exit_code, result.restarts, result.checkpoint)
        assert said == (exit_code, restarts, checkpoint), f"the run says {said}, the store otherwise"
        assert (status == "failed") == (exit_code != 0), f"a run that {status} has exit code {exit_code}"
    if world.job.keep == ALL_KEPT:
        (counted,) = world.arena.store.execute(
            "SELECT coalesce(sum(rows_read), 0) FROM etl.checkpoint WHERE run_id = %s", [run_id]
        ).fetchone() or (None,)
        assert counted == rows_read, f"the run's checkpoints have {counted} rows, the run {rows_read}"


def _positive(rows: Mapping[str, int]) -> dict[str, int]:
    return {uid: count for uid, count in rows.items() if count}


# --- after a run that says that everything is there -------------------------------------------------------------------


def check_read(world: World) -> Head:
    """Everything was read and everything is visible, once."""
    head = world.head()
    files = world.files()
    offsets = head.offsets[head.checkpoint]
    unread = {file.name for every in files.values() for file in every if file.rows_after(offsets.get(file.name, 0))}
    assert not unread, f"there is something unread in {sorted(unread)}"
    reading = Reading(world.job, files, head)
    for sink in world.job.sinks:
        rows, whole = world.visible(sink), reading.shown(sink, head.checkpoint)
        assert rows == whole, f"{sink.uid} is wrong after a run that ended well: {difference(rows, whole)}"
    return head


def check_done(world: World) -> Head:
    """Besides, the records tell the truth and nothing is left."""
    head = check_read(world)
    reading = Reading(world.job, world.files(), head)
    _check_history(world, head, reading)
    _check_totals(world, head, reading)
    _check_ledger(world, head)
    _check_owner(world, head)
    check_nothing_left(world.arena)
    return head


def _check_history(world: World, head: Head, reading: Reading) -> None:
    history = world.arena.store.execute(
        "SELECT checkpoint_id, epoch, rows_read, rows_written FROM etl.checkpoint WHERE job_id = %s ORDER BY 1",
        [head.job_id],
    ).fetchall()
    numbers = [number for number, *_ in history]
    oldest = max(1, head.checkpoint - world.job.keep + 1)
    assert numbers == list(range(oldest, head.checkpoint + 1)), f"the history of checkpoints has gaps: {numbers}"
    epochs = [epoch for _, epoch, *_ in history]
    assert epochs == sorted(epochs), f"epochs went back: {epochs}"
    assert all(epoch <= head.epoch for epoch in epochs), f"a checkpoint of {max(epochs)} at epoch {head.epoch}"
    for number, _, rows_read, rows_written in history:
        if number - 1 in head.offsets:
            before, after = (sum(map(len, reading.read(one).values())) for one in (number - 1, number))
            assert rows_read == after - before, (
                f"checkpoint {number} counts {rows_read} rows, {after - before} were read"
            )
            came = {uid: len(rows) - len(reading.came(number - 1)[uid]) for uid, rows in reading.came(number).items()}
            assert _positive(rows_written) == _positive(came), (
                f"checkpoint {number} says {rows_written}, it wrote {came}"
            )


def _check_totals(world: World, head: Head, reading: Reading) -> None:
    """Every row counts in one run, and every run has an epoch above the former ones."""
    runs = world.arena.store.execute(
        "SELECT epoch, rows_read, rows_written FROM etl.run WHERE job_id = %s ORDER BY run_id", [head.job_id]
    ).fetchall()
    epochs = [epoch for epoch, *_ in runs]
    assert epochs == sorted(set(epochs)), f"the epochs of runs are {epochs}"
    assert epochs[-1] <= head.epoch
    read = sum(map(len, reading.read(head.checkpoint).values()))
    assert sum(rows for _, rows, _ in runs) == read, f"the runs do not count the {read} rows once each"
    written: Counter[str] = Counter()
    for _, _, rows in runs:
        written.update(rows)
    came = {uid: len(rows) for uid, rows in reading.came(head.checkpoint).items()}
    assert _positive(written) == _positive(came), f"the runs say they wrote {dict(written)}, it was {came}"


def _check_ledger(world: World, head: Head) -> None:
    """Every recorded unit is in the ledger of its target, and nothing else is."""
    oldest = head.checkpoint - world.job.keep + 1
    unit = "sink_id, checkpoint_id, epoch, rows"
    recorded = world.arena.store.execute(
        f"SELECT {unit} FROM etl.committable JOIN etl.sink USING (job_id, uid) WHERE job_id = %s", [head.job_id]
    ).fetchall()
    ledger = f"SELECT {unit} FROM etl.commit_ledger WHERE job_id = %s AND checkpoint_id >= %s"
    connections = (world.arena.store, world.arena.other)
    committed = [row for one in connections for row in one.execute(ledger, [head.job_id, oldest]).fetchall()]
    assert sorted(committed) == sorted(recorded), "ledger and completed checkpoints differ"


def _check_owner(world: World, head: Head) -> None:
    owner = world.arena.store.execute("SELECT owner_pid FROM etl.head WHERE job_id = %s", [head.job_id]).fetchone()
    assert owner == (None,), f"the job is owned by {owner} and nobody runs"
    running = "SELECT run_id FROM etl.run WHERE job_id = %s AND status = 'running'"
    assert world.arena.store.execute(running, [head.job_id]).fetchall() == [], "a run that has ended counts as running"


# --- around a run that has nothing to do ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stillness:
    """What a run with nothing to do leaves as it is: every version of every row, every record of a checkpoint."""

    tables: Mapping[str, Sequence[Any]]
    records: Sequence[Sequence[Any]]

    @classmethod
    def of(cls, world: World) -> Stillness:
        """As it is now."""
        tables = {}
        for sink in world.job.sinks:
            connection = world.arena.other if sink.other else world.arena.store
            query = sql.SQL("SELECT ctid::text, xmin::text, * FROM {} ORDER BY 1").format(sql.Identifier(sink.table))
            tables[sink.uid] = connection.execute(query).fetchall()
        records = [
            connection.execute(
                sql.SQL(
                    "SELECT t.*, t.xmin::text FROM etl.{} t JOIN etl.job USING (job_id) WHERE name = %s ORDER BY t.ctid"
                ).format(sql.Identifier(table)),
                [world.request.job],
            ).fetchall()
            for table in ("checkpoint", "position", "committable")
            for connection in [world.arena.store]
        ]
        return cls(tables, records)


def check_idle(before: Stillness, world: World, result: RunResult) -> None:
    """The run read nothing and wrote nothing."""
    assert (result.rows_read, sum(result.rows_written.values())) == (0, 0), "a run with nothing to do did something"
    assert Stillness.of(world) == before, "a run with nothing to do has written something"
