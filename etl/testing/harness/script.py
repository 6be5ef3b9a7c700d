"""From the marks that a user has written to steps and batches, with everything that is wrong with them at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import polars as pl
import pyarrow as pa

from etl.errors import ConfigurationError, Finding, RecordError
from etl.event_time import microseconds_of
from etl.graph import JobGraph, SourceNode
from etl.operators.exact import array_of_values, batch_of_frame, batch_of_values, frame_of
from etl.schema import Schema
from etl.testing.harness.marks import Advance, Checkpoint, Crash, Drain, Mark, Rescale, Rows, Wait
from etl.transformation import PARALLELISM_MAX

MARKS = "rows(…), checkpoint(), crash(), rescale(…), advance(…), drain() or wait(…)"


@dataclass(frozen=True, slots=True)
class Read:
    """A source reads its next batch."""

    source: str


@dataclass(frozen=True, slots=True)
class AdvanceTo:
    """Event time comes to a moment.

    Attributes:
        mark: As it was written.
        times: By uid of a source the moment in microseconds.
    """

    mark: Advance
    times: Mapping[str, int]

    def __str__(self) -> str:
        return str(self.mark)


Step = Read | AdvanceTo | Drain | Wait | Checkpoint | Crash | Rescale


@dataclass(frozen=True, slots=True)
class Script:
    """What is played.

    Attributes:
        steps: In their order.
        batches: By uid of a source all that it reads, one batch for each :class:`Read`.
    """

    steps: Sequence[Step]
    batches: Mapping[str, Sequence[pa.RecordBatch]]


def read_script(graph: JobGraph, marks: Sequence[Mark], batch_rows: int | None = None) -> Script:
    """Check marks against the sources of a job.

    Args:
        graph: The job's.
        marks: In their order.
        batch_rows: Batches of more rows than that are cut.

    Raises:
        ConfigurationError: Lists everything that is wrong, each with its place.
    """
    reader = _ScriptReader(graph, batch_rows)
    if batch_rows is not None and batch_rows < 1:
        reader.findings.append(Finding("batch_rows", f"{batch_rows} is not at least 1", "choose another number"))
    else:
        for number, mark in enumerate(marks, start=1):
            reader.take(number, mark)
        reader.require_all_sources()
    if reader.findings:
        raise ConfigurationError.from_findings("script", reader.findings)
    return Script(reader.steps, reader.batches)


class _ScriptReader:
    def __init__(self, graph: JobGraph, batch_rows: int | None) -> None:
        self.findings: list[Finding] = []
        self.steps: list[Step] = []
        self.batches: dict[str, list[pa.RecordBatch]] = {node.uid: [] for node in graph.sources}
        self._sources = {node.uid: node for node in graph.sources}
        self._batch_rows = batch_rows
        self._named: set[str] = set()

    def take(self, number: int, mark: object) -> None:
        match mark:
            case Rows():
                self._read(mark)
            case Rescale() if not _is_parallelism(mark.parallelism):
                problem = f"{mark.parallelism!r} is not 1 to {PARALLELISM_MAX}"
                self.findings.append(Finding(f"{mark} at {mark.location}", problem, "choose another number"))
            case Advance():
                self._advance(mark)
            case Wait() if not isinstance(mark.span, timedelta) or mark.span <= timedelta(0):
                problem = "no time passes by that"
                self.findings.append(Finding(f"{mark} at {mark.location}", problem, "e.g. wait(timedelta(hours=1))"))
            case Checkpoint() | Crash() | Rescale() | Drain() | Wait():
                self.steps.append(mark)
            case _ if callable(mark):
                name = getattr(mark, "__name__", str(mark))
                self.findings.append(Finding(f"mark {number}", f"{name} is not called", f"write {name}(…)"))
            case _:
                problem = f"{type(mark).__name__} is not a mark"
                self.findings.append(Finding(f"mark {number}", problem, f"use {MARKS}"))

    def require_all_sources(self) -> None:
        for uid in (uid for uid in self._sources if uid not in self._named):
            cure = f'say rows("{uid}") if it has nothing to read'
            self.findings.append(Finding(f'source "{uid}"', "the script has no rows for it", cure))

    def _read(self, mark: Rows) -> None:
        node = self._sources.get(mark.source)
        if node is None:
            known = ", ".join(f'"{uid}"' for uid in self._sources)
            self.findings.append(Finding(str(mark), "the job has no such source", f"choose from {known}"))
            return
        self._named.add(mark.source)
        try:
            batch = _batch(node, mark)
        except (ConfigurationError, RecordError) as error:
            self.findings.append(Finding(str(mark), str(error), "correct the rows"))
            return
        for piece in self._pieces(batch):
            self.batches[mark.source].append(piece)
            self.steps.append(Read(mark.source))

    def _advance(self, mark: Advance) -> None:
        timed = {uid: node for uid, node in self._sources.items() if node.event_time is not None}
        if mark.source is not None and mark.source not in timed:
            known = ", ".join(f'"{uid}"' for uid in timed) or "none"
            problem, cure = "no such source declares event time", f"those that do: {known}"
            self.findings.append(Finding(f"{mark} at {mark.location}", problem, cure))
        elif not timed:
            cure = 'give job.read(…, event_time=EventTime("column"))'
            self.findings.append(Finding(f"{mark} at {mark.location}", "no source declares event time", cure))
        else:
            try:
                times = {uid: _time(timed[uid], mark.moment) for uid in timed if mark.source in (None, uid)}
            except RecordError as error:
                cure = "give a value of the column's type"
                self.findings.append(Finding(f"{mark} at {mark.location}", str(error), cure))
                return
            self.steps.append(AdvanceTo(mark, times))

    def _pieces(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        rows = self._batch_rows or max(1, batch.num_rows)
        return (batch.slice(first, rows) for first in range(0, batch.num_rows, rows))


def _is_parallelism(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= PARALLELISM_MAX


def _time(node: SourceNode, moment: object) -> int:
    assert node.event_time is not None
    column = node.event_time.column
    return int(microseconds_of(array_of_values(column, [moment], node.schema[column]))[0].as_py())


def _batch(node: SourceNode, mark: Rows) -> pa.RecordBatch:
    if len(mark.given) == 1 and isinstance(mark.given[0], pl.DataFrame | pa.Table | pa.RecordBatch):
        return _of_table(mark.given[0], node.schema)
    rows = enumerate(mark.given, start=1)
    values = [value for number, row in rows for value in _values(number, row, node.schema, mark)]
    return batch_of_values(values, node.schema)


def _of_table(table: pl.DataFrame | pa.Table | pa.RecordBatch, schema: Schema) -> pa.RecordBatch:
    names = table.columns if isinstance(table, pl.DataFrame) else table.schema.names
    _require_names("the table", names, schema, missing_null=False)
    if isinstance(table, pl.DataFrame):
        return batch_of_frame(table, schema)
    frames = [frame_of(batch) for batch in pa.table(table).to_batches()]
    return batch_of_frame(pl.concat(frames) if frames else pl.DataFrame(schema=names), schema)


def _values(number: int, row: object, schema: Schema, mark: Rows) -> tuple[Any, ...]:
    if not isinstance(row, Mapping):
        raise ConfigurationError(f"row {number} is {type(row).__name__}, not a dict of column values")
    _require_names(f"row {number}", list(row), schema, missing_null=mark.missing_null)
    return tuple(row.get(name) for name in schema.names)


def _require_names(what: str, names: Sequence[str], schema: Schema, *, missing_null: bool) -> None:
    missing = [] if missing_null else [repr(name) for name in schema.names if name not in names]
    unknown = [repr(name) for name in names if name not in schema]
    problems = [
        f"{problem} {', '.join(found)}" for problem, found in (("lacks", missing), ("has unknown", unknown)) if found
    ]
    if problems:
        raise ConfigurationError(f"{what} {' and '.join(problems)}; the columns are: {schema}")
