"""The jobs that faults happen to, their input, and what must come of it.

Input is so small that every row is in a batch of its own or shares it with one other, and each run takes three
checkpoints. Append targets have no unique key: a row that comes twice is seen twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from etl.job import Job
from etl.policy import CheckpointPolicy, RestartPolicy
from etl.source import Source
from etl.sources import CsvFiles
from etl.stream import Stream
from sinks import PostgresTable, TransactionalSink, TwoPhaseCommitSink, UpsertSink, WriteAheadSink
from tests.faults import timed
from tests.faults.fault import RunRequest

Row = tuple[int, int, int]
"""id, key, amount"""
Rows = Counter[Row]

_COLUMNS = {"id": "int8", "key": "int4", "amount": "int8"}
_RETURNS = 101
"""The first id of a return."""
_REFUSED = 40
"""Rows of this amount are filtered out."""
BATCH_ROWS = 2

APPEND_TABLE = "appended"
UPSERT_TABLE = "by_key"
TABLES = (
    f"CREATE TABLE {APPEND_TABLE} (id int8, key int4, amount int8)",
    f"CREATE TABLE {UPSERT_TABLE} (id int8, key int4 PRIMARY KEY, amount int8)",
)


def _rows(first: int, count: int) -> list[Row]:
    return [(number, number % 5, number * 10) for number in range(first, first + count)]


FILES: Mapping[str, Mapping[str, Sequence[Row]]] = {
    "orders": {"orders/1.csv": _rows(1, 7), "orders/2.csv": _rows(8, 6)},
    "returns": {"returns/1.csv": _rows(_RETURNS, 5)},
    **timed.FILES,
}
"""Rows by source uid and split."""


def write_input(directory: Path) -> None:
    """Write the files."""
    for uid, files in FILES.items():
        for name, rows in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(_encoded(uid, rows))


def _encoded(uid: str, rows: Iterable[Row]) -> bytes:
    if uid in timed.FILES:
        lines = [",".join(timed.COLUMNS), *map(timed.line, rows)]
    else:
        lines = [",".join(_COLUMNS), *(",".join(map(str, row)) for row in rows)]
    return "".join(f"{line}\n" for line in lines).encode()


def rows_before(uid: str, offsets: Mapping[str, int]) -> list[Row]:
    """The rows of a source that lie before the given positions, in reading order."""
    found: list[Row] = []
    for split, rows in FILES[uid].items():
        read = _encoded(uid, rows)[: offsets.get(split, 0)]
        assert not read or read.endswith(b"\n"), f"position {offsets} of {uid} is not at the end of a row"
        found += rows[: max(0, read.count(b"\n") - 1)]
    return found


def appended(rows: Iterable[Row]) -> Rows:
    """What an append target must hold."""
    return Counter(row for row in rows if row[2] != _REFUSED)


def by_key(rows: Iterable[Row]) -> Rows:
    """What an upsert target must hold."""
    return Counter({row[1]: row for row in rows if row[2] != _REFUSED}.values())


def totals(rows: Iterable[Row]) -> Rows:
    """By key the highest id and the sum of the amounts."""
    found: dict[int, tuple[int, int]] = {}
    for id_, key, amount in rows:
        if amount != _REFUSED:
            highest, total = found.get(key, (0, 0))
            found[key] = (max(highest, id_), total + amount)
    return Counter((highest, key, total) for key, (highest, total) in found.items())


def first_of_pair(rows: Iterable[Row]) -> Rows:
    """The first row of each two neighbouring ids."""
    found: dict[int, Row] = {}
    for row in rows:
        if row[2] != _REFUSED:
            found.setdefault(row[0] // 2, row)
    return Counter(found.values())


@dataclass(frozen=True, slots=True)
class Target:
    """A sink and its table.

    Attributes:
        uid: The sink.
        table: Its table.
        other: Whether the table lies in the database ``other``.
        expected: From the rows read to the rows visible.
        early: Whether rows show before their checkpoint completes (and are then written once more).
        late: Whether rows show some time after their checkpoint has completed.
    """

    uid: str
    table: str = APPEND_TABLE
    other: bool = False
    expected: Callable[[Iterable[Row]], Rows] = appended
    early: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """A job.

    Attributes:
        sources: Uids of its sources.
        targets: Its sinks.
        declare: Adds streams and sinks to an empty job.
        states: By uid of an operator, from the rows read to what it must remember: key, then state.
        parallelism: Of the operators.
    """

    sources: tuple[str, ...]
    targets: tuple[Target, ...]
    declare: Callable[[Job], None]
    states: Mapping[str, Callable[[Iterable[Row]], set[tuple[Any, ...]]]] = field(default_factory=dict)
    parallelism: int = 1

    @property
    def rows(self) -> int:
        """How many rows there are to read."""
        return sum(len(rows) for uid in self.sources for rows in FILES[uid].values())


def _read(job: Job, uid: str) -> Stream:
    return job.read(uid, CsvFiles(f"{uid}/*.csv", schema=_COLUMNS, batch_rows=BATCH_ROWS))


def _filtered(stream: Stream) -> Stream:
    return stream.filter(pl.col("amount") != _REFUSED)


def _transactional(job: Job) -> None:
    _filtered(_read(job, "orders")).write("appended", TransactionalSink(PostgresTable(APPEND_TABLE)))


def _two_phase(job: Job) -> None:
    _filtered(_read(job, "orders")).write("appended", TwoPhaseCommitSink(PostgresTable(APPEND_TABLE)))


def _two_phase_upsert(job: Job) -> None:
    _filtered(_read(job, "orders")).write("by_key", TwoPhaseCommitSink(PostgresTable(UPSERT_TABLE, key=["key"])))


def _write_ahead(job: Job) -> None:
    _filtered(_read(job, "orders")).write("appended", WriteAheadSink(PostgresTable(APPEND_TABLE)))


def _upsert(job: Job) -> None:
    _filtered(_read(job, "orders")).write("by_key", UpsertSink(PostgresTable(UPSERT_TABLE, key=["key"])))


def _guarded_upsert(job: Job) -> None:
    table = PostgresTable(UPSERT_TABLE, key=["key"], version="id")
    _filtered(_read(job, "orders")).write("by_key", UpsertSink(table))


def _united(job: Job) -> None:
    united = _filtered(_read(job, "orders").union(_read(job, "returns")))
    united.write("prepared", TwoPhaseCommitSink(PostgresTable(APPEND_TABLE, database="other")))
    united.write("logged", WriteAheadSink(PostgresTable(APPEND_TABLE)))


def _paired(job: Job) -> None:
    filtered = _filtered(_read(job, "orders"))
    filtered.write("near", TwoPhaseCommitSink(PostgresTable(APPEND_TABLE)))
    filtered.write("far", TwoPhaseCommitSink(PostgresTable(APPEND_TABLE, database="other")))


def _totals(stream: Stream) -> Stream:
    return stream.key_by("key").aggregate("totals", id=pl.col("id").max(), amount=pl.col("amount").sum())


def _keyed(job: Job) -> None:
    orders = _filtered(_read(job, "orders"))
    firsts = orders.with_columns(pair=pl.col("id") // 2).deduplicate("seen", "pair").select(*_COLUMNS)
    firsts.write("first", TwoPhaseCommitSink(PostgresTable(APPEND_TABLE)))
    _totals(orders).write("totalled", UpsertSink(PostgresTable(UPSERT_TABLE, key=["key"])))


def _keyed_apart(job: Job) -> None:
    united = _filtered(_read(job, "orders").union(_read(job, "returns")))
    # No id comes twice: with two sources chance would decide which checkpoints have a first one.
    united.deduplicate("seen", "id").write("first", WriteAheadSink(PostgresTable(APPEND_TABLE, database="other")))
    _totals(united).write("totalled", TransactionalSink(PostgresTable(UPSERT_TABLE, key=["key"])))


def _timed(job: Job) -> None:
    timed.declare(job, APPEND_TABLE, UPSERT_TABLE)


def _of_timed(parallelism: int) -> Kind:
    targets = (
        Target("events", other=True, expected=timed.events, late=True),
        Target("totalled", UPSERT_TABLE, expected=timed.totals),
    )
    return Kind(("visits", "payments"), targets, _timed, {"seen": timed.seen, "totals": timed.totalled}, parallelism)


def _pairs_seen(rows: Iterable[Row]) -> set[tuple[Any, ...]]:
    return {(id_ // 2,) for id_, _, _ in first_of_pair(rows)}


def _ids_seen(rows: Iterable[Row]) -> set[tuple[Any, ...]]:
    return {(id_,) for id_, _, _ in appended(rows)}


def _totals_kept(rows: Iterable[Row]) -> set[tuple[Any, ...]]:
    return {(key, highest, Decimal(total)) for highest, key, total in totals(rows)}


KINDS: Mapping[str, Kind] = {
    "transactional": Kind(("orders",), (Target("appended"),), _transactional),
    "two-phase": Kind(("orders",), (Target("appended", late=True),), _two_phase),
    "two-phase-upsert": Kind(
        ("orders",), (Target("by_key", UPSERT_TABLE, expected=by_key, late=True),), _two_phase_upsert
    ),
    "write-ahead": Kind(("orders",), (Target("appended", late=True),), _write_ahead),
    "upsert": Kind(("orders",), (Target("by_key", UPSERT_TABLE, expected=by_key, early=True),), _upsert),
    "united": Kind(
        ("orders", "returns"), (Target("prepared", other=True, late=True), Target("logged", late=True)), _united
    ),
    "keyed": Kind(
        ("orders",),
        (
            Target("first", expected=first_of_pair, late=True),
            Target("totalled", UPSERT_TABLE, expected=totals, early=True),
        ),
        _keyed,
        {"seen": _pairs_seen, "totals": _totals_kept},
    ),
    "keyed-apart": Kind(
        ("orders", "returns"),
        (
            Target("first", other=True, late=True),
            Target("totalled", UPSERT_TABLE, expected=totals),
        ),
        _keyed_apart,
        {"seen": _ids_seen, "totals": _totals_kept},
        parallelism=4,
    ),
    "timed-4": _of_timed(parallelism=4),
}

ALL_KINDS: Mapping[str, Kind] = {
    **KINDS,
    "timed-1": _of_timed(parallelism=1),
    "timed-2": _of_timed(parallelism=2),
    "paired": Kind(("orders",), (Target("near", late=True), Target("far", other=True, late=True)), _paired),
}
"""With those that only kills, and one that only the tests of two prepared units are about."""

_GUARDED = {"upsert": _guarded_upsert}


class _ReadInParallel(Job):
    """A job whose sources have several subtasks each."""

    readers = 1

    def read(self, uid: str, source: Source, **options: Any) -> Stream:
        return super().read(uid, source, parallelism=self.readers, **options)


def declare(request: RunRequest) -> Job:
    """The job of a request."""
    described = request.described
    # Nothing is pruned: the oracle looks at every checkpoint of the job's life. Time triggers none.
    interval_s, keep = (600.0, 1000) if described is None else (described.interval_s, described.keep)
    job = _ReadInParallel(
        request.job,
        mode=request.mode,
        checkpoint=CheckpointPolicy(interval_s=interval_s, rows=request.rows, timeout_s=request.timeout_s, keep=keep),
        restart=RestartPolicy(attempts=request.restarts, delay_s=0.02, delay_max_s=0.2),
        owner_timeout_s=request.owner_timeout_s,
        parallelism=(ALL_KINDS[request.kind] if described is None else described).parallelism,
    )
    job.base_dir, job.readers = Path(request.input_dir), request.readers
    if described is not None:
        described.add_to(job)
    else:
        (_GUARDED[request.kind] if request.guarded else ALL_KINDS[request.kind].declare)(job)
    return job


def declare_anew(request: str) -> Job:
    """The job of a request, in a worker process of the run."""
    return declare(msgspec.json.decode(request, type=RunRequest))
