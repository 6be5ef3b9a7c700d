"""Windows as a person would work them out, row by row, and operators with windows in any number of subtasks."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from etl.codec import decode_rows, encode_rows
from etl.event_time import FOREVER
from etl.key_group import groups_of_hashes, groups_of_subtask, hash_keys, subtasks_of_hashes
from etl.keyed import Emission
from etl.operator import LATE, Output, SideOutput
from etl.operators import operator_for
from etl.schema import Schema
from etl.state import Fragment, StatefulOperator, ranks
from etl.transformation import Location
from etl.window import Session, Sliding, Tumbling, Window
from etl.windowed import WindowAggregate

SCHEMA = Schema.declare({"k": "int4", "at": "timestamptz", "n": "int8", "id": "int8"})
NINETEEN_SEVENTY = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
MINUTE = 60_000_000


def minutes(count: float) -> dt.timedelta:
    return dt.timedelta(minutes=count)


@dataclass(frozen=True)
class Row:
    """A row that happened so many minutes after 1970."""

    key: int | None
    at: int
    n: int | None
    id: int

    def values(self) -> tuple[Any, ...]:
        return self.key, NINETEEN_SEVENTY + minutes(self.at), self.n, self.id


Result = tuple[Any, ...]
"""Key, start and end in minutes, then the aggregates."""

EXPRESSIONS: dict[str, Any] = {
    "rows": pl.len(),
    "total": pl.col("n").sum(),
    "low": pl.col("n").min(),
    "high": pl.col("n").max(),
    "mean": pl.col("n").mean(),
    "earliest": pl.col("id").sort_by("at").first(),
    "latest": pl.col("id").sort_by("at").last(),
}
BY_ARRIVAL: dict[str, Any] = {"first": pl.col("id").first(), "last": pl.col("id").last()}


def worked_out(rows: Sequence[Row], *, by_arrival: bool) -> Result:
    """The aggregates of rows in the order in which they came."""
    numbers = [row.n for row in rows if row.n is not None]
    earliest = min(row.at for row in rows)
    latest = max(row.at for row in rows)
    return (
        len(rows),
        sum(numbers),
        min(numbers, default=None),
        max(numbers, default=None),
        float(Fraction(sum(numbers), len(numbers))) if numbers else None,
        next(row.id for row in rows if row.at == earliest),
        [row.id for row in rows if row.at == latest][-1],
        *((rows[0].id, rows[-1].id) if by_arrival else ()),
    )


@dataclass
class Span:
    """Rows that are together, in the order in which they came."""

    start: int
    end: int
    rows: list[Row] = field(default_factory=list)
    closed: bool = False
    emitted: bool = False


class Oracle:
    """Windows, one row after the other; all in minutes."""

    def __init__(self, transformation: WindowAggregate) -> None:
        self.window = transformation.window
        self.lateness = transformation.lateness // minutes(1)
        self.early = transformation.emission is Emission.CHECKPOINT
        self.watermark: int | None = None
        self.spans: dict[int | None, list[Span]] = {}
        self.late: list[Row] = []

    def passed(self, moment: int) -> bool:
        return self.watermark is not None and moment <= self.watermark

    def row(self, row: Row) -> None:
        spans = self.spans.setdefault(row.key, [])
        wanted = self._windows_of(row.at, spans)
        in_time = [(start, end) for start, end in wanted if not self.passed(end + self.lateness)]
        for start, end in in_time:
            span = next((one for one in spans if (one.start, one.end) == (start, end)), None)
            if span is None:
                span = Span(start, end, closed=self.passed(end))
                spans.append(span)
            span.rows.append(row)
            span.emitted = False
        if not in_time:
            self.late.append(row)

    def _windows_of(self, at: int, spans: list[Span]) -> list[tuple[int, int]]:
        if isinstance(self.window, Session):
            gap = self.window.gap // minutes(1)
            if self.passed(at + gap):
                return [(at, at + gap)]
            near = [one for one in spans if any(abs(at - other.at) < gap for other in one.rows)]
            joined = Span(min([at, *(one.start for one in near)]), max([at + gap, *(one.end for one in near)]))
            joined.rows = sorted((row for one in near for row in one.rows), key=lambda row: row.id)
            spans[:] = [one for one in spans if one not in near] + [joined]
            return [(joined.start, joined.end)]
        size = self.window.size // minutes(1)
        every = (self.window.every if isinstance(self.window, Sliding) else self.window.size) // minutes(1)
        offset = self.window.offset // minutes(1)
        return [(start, start + size) for start in range(at - size + 1, at + 1) if (start - offset) % every == 0]

    def advance(self, watermark: int | None) -> list[Result]:
        """None: everything."""
        if watermark is None:
            ends = [span.end for spans in self.spans.values() for span in spans]
            watermark = max(ends, default=self.watermark)
        if watermark is not None:
            self.watermark = watermark if self.watermark is None else max(watermark, self.watermark)
        found = self._emit(self._closes)
        for spans in self.spans.values():
            spans[:] = [span for span in spans if not self.passed(span.end + self.lateness)]
            for span in spans:
                span.closed = self.passed(span.end)
        return found

    def _closes(self, span: Span) -> bool:
        """Results that late rows have changed wait for a barrier, unless they are forgotten before."""
        return self.passed(span.end + self.lateness) or (self.passed(span.end) and not self.early and not span.closed)

    def flush(self) -> list[Result]:
        return self._emit(lambda span: self.early or self.passed(span.end))

    def _emit(self, wanted: Callable[[Span], bool]) -> list[Result]:
        found: list[Result] = []
        for key, spans in self.spans.items():
            for span in spans:
                if wanted(span) and not span.emitted:
                    span.emitted = True
                    aggregates = worked_out(span.rows, by_arrival=not isinstance(self.window, Session))
                    found.append((key, span.start, span.end, *aggregates))
        return found


class Subtasks:
    """An operator in any number of subtasks, which share out the keys as the runtime does it."""

    def __init__(self, transformation: WindowAggregate, parallelism: int = 1, schema: Schema = SCHEMA) -> None:
        self.transformation = transformation
        self.schema = schema
        self.chains: dict[int, list[Fragment]] = {}
        self.stored_watermark: int | None = None
        self.late: list[int] = []
        self.late_rows = 0
        self._start(parallelism)

    def _start(self, parallelism: int) -> None:
        output = self.transformation.output_schema([self.schema])
        made = [operator_for(self.transformation, [self.schema], output) for _ in range(parallelism)]
        self.running = [one for one in made if isinstance(one, StatefulOperator)]
        for number, one in enumerate(self.running):
            owned = groups_of_subtask(number, parallelism)
            fragments = [fragment for group, chain in self.chains.items() if group in owned for fragment in chain]
            for rank in ranks(fragments):
                one.restore(rank)
            if self.stored_watermark is not None:
                one.resume(self.stored_watermark)

    def process(self, rows: Sequence[Row]) -> list[Result]:
        batch = batch_of([row.values() for row in rows], self.schema)
        subtasks = subtasks_of_hashes(hash_keys([batch.column("k")]), len(self.running))
        return [
            result
            for number, one in enumerate(self.running)
            if (some := batch.filter(pa.array(subtasks == number))).num_rows
            for result in self._found(one.process(some))
        ]

    def advance(self, watermark: int | None) -> list[Result]:
        moment = FOREVER if watermark is None else watermark * MINUTE
        return [result for one in self.running for result in self._found(one.advance(moment))]

    def flush(self) -> list[Result]:
        return [result for one in self.running for result in self._found(one.flush())]

    def cut(self) -> None:
        watermarks = []
        for one in self.running:
            cut = one.cut()
            self.late_rows += cut.summary.late_rows
            watermarks.append(cut.summary.watermark)
            for fragment in cut.fragments:
                stored = decode_rows(encode_rows(fragment.rows))
                hashes = hash_keys([stored.column("key:k")]) if stored.num_rows else np.zeros(0, dtype=np.uint64)
                assert set(groups_of_hashes(hashes).tolist()) <= {fragment.key_group}
                if fragment.sequence == 0:
                    self.chains[fragment.key_group] = []
                chain = self.chains.setdefault(fragment.key_group, [])
                assert fragment.sequence == len(chain)
                chain.append(Fragment(fragment.key_group, fragment.sequence, stored))
        self.stored_watermark = max((one for one in watermarks if one is not None), default=None)

    def restart(self, parallelism: int) -> None:
        self._start(parallelism)

    def _found(self, outputs: Iterable[Output]) -> list[Result]:
        found: list[Result] = []
        for output in outputs:
            if isinstance(output, SideOutput):
                assert output.tag == LATE
                assert output.batch.schema == self.schema.to_arrow()
                self.late += output.batch.column("id").to_pylist()
            else:
                found += [_in_minutes(tuple(row.values())) for row in output.to_pylist()]
        return found


def _in_minutes(row: Result) -> Result:
    key, start, end, *rest = row
    return key, (start - NINETEEN_SEVENTY) // minutes(1), (end - NINETEEN_SEVENTY) // minutes(1), *rest


def batch_of(rows: Sequence[tuple[Any, ...]], schema: Schema = SCHEMA) -> pa.RecordBatch:
    arrow = schema.to_arrow()
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [pa.array(values, one.type) for values, one in zip(columns, arrow, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow)


def window_aggregate(
    window: Window, *, emit: Emission = Emission.CLOSE, late: float = 0, **expressions: Any
) -> WindowAggregate:
    if not expressions:
        expressions = EXPRESSIONS | ({} if isinstance(window, Session) else BY_ARRIVAL)
    return WindowAggregate(
        Location("job.py", 1),
        "windows",
        ("k",),
        tuple(expressions.items()),
        None,
        emit,
        window=window,
        time="at",
        lateness=minutes(late),
    )


TUMBLING = Tumbling(minutes(10))
SLIDING = Sliding(minutes(10), every=minutes(4))
SESSION = Session(minutes(5))
