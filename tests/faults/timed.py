"""A job by event time that faults happen to: two sources, sessions, a join, timers, deduplication, totals, two sinks.

What must come of it is computed from the rows alone, by brute force.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import polars as pl

from etl import Timer, ValueState
from etl.event_time import EventTime
from etl.job import Job
from etl.sources import CsvFiles
from etl.stream import Stream
from etl.window import Session
from sinks import PostgresTable, TransactionalSink, TwoPhaseCommitSink

Row = tuple[int, int, int]
"""id, key, amount"""

COLUMNS = {"id": "int8", "key": "int4", "amount": "int8", "at": "timestamptz"}

OUT_OF_ORDERNESS_S = 30
GAP_S = 25
SPAN_S = 20
BURST_S = 40
LATE_ID = 510

_VISITS, _PAYMENTS = 500, 600
_SESSION_IDS, _LATE_IDS, _BURST_IDS = 1_000_000, 2_000_000, 3_000_000
_MIDNIGHT = datetime(2024, 1, 1, tzinfo=UTC)


def _rows(numbers: Iterable[int]) -> list[Row]:
    return [(number, number % 3, number % 7 * 10 + 5) for number in numbers]


FILES: Mapping[str, Mapping[str, Sequence[Row]]] = {
    "visits": {"visits/1.csv": _rows(range(501, 508)), "visits/2.csv": _rows(range(508, 514))},
    "payments": {"payments/1.csv": _rows(range(601, 609))},
}
"""Rows by source uid and split."""


def seconds(id_: int) -> float:
    """When a row happened: in slight disorder, but for one visit that comes much too late."""
    if id_ == LATE_ID:
        return 5.0
    if id_ < _PAYMENTS:
        number = id_ - _VISITS
        return 12 * number + (0, 15, -10)[number % 3]
    number = id_ - _PAYMENTS
    return 18 * number + (3, 21, -7)[number % 3] + 0.5


def line(row: Row) -> str:
    """A row of a file."""
    moment = _MIDNIGHT + timedelta(seconds=seconds(row[0]))
    return ",".join([*map(str, row), moment.isoformat(sep=" ")])


def declare(job: Job, append_table: str, upsert_table: str) -> None:
    """Add streams and sinks to an empty job."""
    visits, payments = _read(job, "visits"), _read(job, "payments")
    sessions = (
        visits.key_by("key")
        .window(Session(timedelta(seconds=GAP_S)), time="at")
        .aggregate("sessions", id=pl.col("id").max() , amount=pl.col("amount").sum())
    )  # fmt: skip
    span = timedelta(seconds=SPAN_S)
    punctual = visits.filter(pl.col("id") != LATE_ID)
    pairs = punctual.key_by("key").interval_join("pairs", payments.key_by("key"), time="at", lower=-span, upper=span)
    bursts = (
        punctual.union(payments)
        .key_by("key")
        .process(
            "bursts",
            _begin_burst,
            state={"first": ValueState("int8"), "total": ValueState("int8")},
            time="at",
            in_order=True,
            on_timer=_end_burst,
        )
    )
    firsts = visits.with_columns(pair=pl.col("id") // 2).deduplicate("seen", "pair")
    events = _event(sessions, id=pl.col("id") + _SESSION_IDS).union(
        _event(sessions.late, id=pl.col("id") + _LATE_IDS),
        _event(pairs, id=pl.col("id") * 1000 + pl.col("id_right"), amount=pl.col("amount") + pl.col("amount_right")),
        _event(bursts),
        _event(firsts),
    )
    events.write("events", TwoPhaseCommitSink(PostgresTable(append_table, database="other")))
    totals = (
        visits.union(payments).key_by("key").aggregate("totals", id=pl.col("id").max(), amount=pl.col("amount").sum())
    )
    totals.write("totalled", TransactionalSink(PostgresTable(upsert_table, key=["key"])))


def _begin_burst(row: Mapping[str, Any], state: Any) -> None:
    if state.first.value is None:
        state.first.value, state.total.value = row["id"], 0
        state.timers.set(row["at"] + timedelta(seconds=BURST_S))
    state.total.value += row["amount"]


def _end_burst(timer: Timer, state: Any) -> Iterator[Mapping[str, Any]]:
    yield {
        "id": state.first.value + _BURST_IDS,
        "key": timer.key["key"],
        "amount": state.total.value,
        "at": timer.moment,
    }
    state.first.clear()
    state.total.clear()


def _read(job: Job, uid: str) -> Stream:
    event_time = EventTime("at", out_of_orderness=timedelta(seconds=OUT_OF_ORDERNESS_S), in_sequence=True)
    return job.read(uid, CsvFiles(f"{uid}/*.csv", schema=COLUMNS, batch_rows=2), event_time=event_time)


def _event(stream: Stream, **columns: pl.Expr) -> Stream:
    return stream.select(*(columns.get(name, pl.col(name)).alias(name) for name in ("id", "key", "amount")))


# --- what must come of it -------------------------------------------------------------------------------------------


def events(rows: Iterable[Row]) -> Counter[Row]:
    """What must have come out of the rows read so far."""
    rows = list(rows)
    visits = [row for row in rows if row[0] < _PAYMENTS]
    payments = [row for row in rows if row[0] > _PAYMENTS]
    return Counter(
        [
            *_sessions(visits),
            *_late(visits),
            *_pairs(visits, payments),
            *_bursts(rows, min(_watermark(visits), _watermark(payments))),
            *_firsts(visits),
        ]
    )


def totals(rows: Iterable[Row]) -> Counter[Row]:
    """By key the highest id and the sum of the amounts."""
    rows = list(rows)
    by_key = {key: [row for row in rows if row[1] == key] for _, key, _ in rows}
    return Counter((max(of_key)[0], key, sum(amount for *_, amount in of_key)) for key, of_key in by_key.items())


def seen(rows: Iterable[Row]) -> set[tuple[Any, ...]]:
    """What the deduplication must remember."""
    return {(id_ // 2,) for id_, *_ in rows if id_ < _PAYMENTS}


def totalled(rows: Iterable[Row]) -> set[tuple[Any, ...]]:
    """What the aggregation must remember."""
    return {(key, highest, Decimal(total)) for highest, key, total in totals(rows)}


def _watermark(rows: Sequence[Row]) -> float:
    """Of one source; whole seconds."""
    if not rows:
        return -math.inf
    return math.floor(max(seconds(id_) for id_, *_ in rows) - OUT_OF_ORDERNESS_S)


def _sessions(visits: Sequence[Row]) -> Iterable[Row]:
    for key in {key for _, key, _ in visits}:
        rows = sorted((row for row in visits if row[1] == key and row[0] != LATE_ID), key=lambda row: seconds(row[0]))
        session: list[Row] = []
        for row in [*rows, None]:
            if session and (row is None or seconds(row[0]) - seconds(session[-1][0]) >= GAP_S):
                if seconds(session[-1][0]) + GAP_S <= _watermark(visits):
                    yield max(session)[0] + _SESSION_IDS, key, sum(amount for *_, amount in session)
                session = []
            if row is not None:
                session.append(row)


def _late(visits: Sequence[Row]) -> Iterable[Row]:
    return [(id_ + _LATE_IDS, key, amount) for id_, key, amount in visits if id_ == LATE_ID]


def _pairs(visits: Sequence[Row], payments: Sequence[Row]) -> Iterable[Row]:
    for left, key, amount in visits:
        for right, other_key, other_amount in payments:
            near = abs(seconds(right) - seconds(left)) <= SPAN_S
            if left != LATE_ID and key == other_key and near:
                yield left * 1000 + right, key, amount + other_amount


def _bursts(rows: Sequence[Row], watermark: float) -> Iterable[Row]:
    for key in {key for _, key, _ in rows}:
        of_key = sorted((row for row in rows if row[1] == key and row[0] != LATE_ID), key=lambda row: seconds(row[0]))
        burst: list[Row] = []
        for row in [*of_key, None]:
            now = watermark if row is None else min(seconds(row[0]), watermark)
            if burst and seconds(burst[0][0]) + BURST_S <= now:
                yield burst[0][0] + _BURST_IDS, key, sum(amount for *_, amount in burst)
                burst = []
            if row is not None and seconds(row[0]) < watermark:
                burst.append(row)


def _firsts(visits: Sequence[Row]) -> Iterable[Row]:
    return {row[0] // 2: row for row in reversed(visits)}.values()
