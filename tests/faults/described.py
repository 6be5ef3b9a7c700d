"""Jobs as plain data, which crosses processes: what somebody made up in one of them is built in another.

A job is a list of nodes, each with the numbers of the nodes before it, and sinks that name a node. What the operations
mean is said in words here, and written down once more in plain Python where somebody computes what must come of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import polars as pl

from etl.job import Job
from etl.keyed_process import ValueState
from etl.sink import Sink
from etl.sources import CsvFiles
from etl.stream import Stream
from sinks import PostgresTable, TransactionalSink, TwoPhaseCommitSink, UpsertSink, WriteAheadSink

COLUMNS: Mapping[str, str] = {
    "id": "int8",
    "key": "int4",
    "version": "int8",
    "amount": "int8",
    "price": "numeric(12,2)",
    "note": "text",
}
"""Of every stream and of every table."""


class Operation(StrEnum):
    """What a node does, with its number ``n``."""

    READ = "read"
    """All files of the directory that the node names."""
    KEEP = "keep"
    """Rows whose id is no multiple of n; an expression."""
    CHOOSE = "choose"
    """Rows that have a note, and those whose amount is even; a function."""
    ADD = "add"
    """n more in amount; an expression."""
    TURN = "turn"
    """The note backwards and the price negative; a function over rows."""
    REPEAT = "repeat"
    """As many copies of each row as its id leaves when divided by n, the amount of each one more; a generator."""
    MARK = "mark"
    """n behind each note; a function over batches."""
    FIRST = "first"
    """The first row of each key; remembers the keys."""
    COUNT = "count"
    """How many rows of its key have come with this one, and n more, as the amount; remembers the numbers."""
    UNITE = "unite"
    """The rows of all inputs."""


STATEFUL = (Operation.FIRST, Operation.COUNT)
"""By key, so that the rows of a key stay in their order at any parallelism."""


class Way(StrEnum):
    """How rows become visible."""

    TRANSACTIONAL = "transactional"
    TWO_PHASE = "two-phase"
    WRITE_AHEAD = "write-ahead"
    UPSERT = "upsert"


@dataclass(frozen=True, slots=True)
class Node:
    """A source or an operator.

    Attributes:
        operation: What it does.
        inputs: Numbers of the nodes it reads from, each below its own.
        number: What the operation calls n.
        source: Uid and directory of a source.
    """

    operation: Operation
    inputs: tuple[int, ...] = ()
    number: int = 0
    source: str = ""

    def __str__(self) -> str:
        if self.operation is Operation.READ:
            return f"read {self.source}"
        number = f" {self.number}" if self.number else ""
        return f"{self.operation}{number} ({', '.join(map(str, self.inputs))})"


@dataclass(frozen=True, slots=True)
class DescribedSink:
    """A sink.

    Attributes:
        uid: Its uid.
        node: Number of the node it writes.
        way: How its rows become visible.
        table: Its table.
        other: Whether the table lies in the database ``other``.
        keyed: Whether a row replaces the one with the same key; otherwise it is appended.
        versioned: Whether a row never replaces one of a higher version.
    """

    uid: str
    node: int
    way: Way
    table: str
    other: bool = False
    keyed: bool = False
    versioned: bool = False

    @property
    def early(self) -> bool:
        """Whether rows show before their checkpoint completes (and are then written once more)."""
        return self.way is Way.UPSERT

    @property
    def late(self) -> bool:
        """Whether rows show some time after their checkpoint has completed."""
        return self.way in (Way.TWO_PHASE, Way.WRITE_AHEAD)

    def __str__(self) -> str:
        what = "newest version by key" if self.versioned else "by key" if self.keyed else "append"
        return f"{self.uid}: {self.way}, {what}, of {self.node}{' in the other database' if self.other else ''}"


@dataclass(frozen=True, slots=True)
class DescribedJob:
    """A job.

    Attributes:
        nodes: Sources and operators.
        sinks: Its sinks.
        batch_rows: Most rows in a batch.
        interval_s: Seconds from one checkpoint to the next.
        keep: How many checkpoints are kept.
        parallelism: Of operations that remember.
    """

    nodes: tuple[Node, ...]
    sinks: tuple[DescribedSink, ...]
    batch_rows: int = 2
    interval_s: float = 600.0
    keep: int = 1000
    parallelism: int = 1

    @property
    def remembers(self) -> bool:
        """Whether any of its operations does."""
        return any(node.operation in STATEFUL for node in self.nodes)

    @property
    def sources(self) -> list[str]:
        """Uids of its sources."""
        return [node.source for node in self.nodes if node.operation is Operation.READ]

    def add_to(self, job: Job) -> None:
        """Declare it."""
        streams: list[Stream] = []
        for place, node in enumerate(self.nodes):
            streams.append(self._stream(job, node, f"node-{place}", [streams[number] for number in node.inputs]))
        for sink in self.sinks:
            streams[sink.node].write(sink.uid, _sink(sink))

    def _stream(self, job: Job, node: Node, uid: str, inputs: list[Stream]) -> Stream:
        if node.operation is Operation.READ:
            source = CsvFiles(f"{node.source}/*.csv", schema=COLUMNS, batch_rows=self.batch_rows, block_bytes=1 << 10)
            return job.read(node.source, source)
        if node.operation is Operation.UNITE:
            return inputs[0].union(*inputs[1:])
        if node.operation is Operation.FIRST:
            return inputs[0].deduplicate(uid, "key")
        if node.operation is Operation.COUNT:
            return inputs[0].key_by("key").process(uid, _counting(node.number), state={"came": ValueState("int8")})
        return _OPERATIONS[node.operation](inputs[0], node.number)


def _sink(sink: DescribedSink) -> Sink:
    table = PostgresTable(
        sink.table,
        key=["key"] if sink.keyed else None,
        version="version" if sink.versioned else None,
        database="other" if sink.other else None,
    )
    return _WAYS[sink.way](table)


_WAYS: Mapping[Way, Callable[[PostgresTable], Sink]] = {
    Way.TRANSACTIONAL: TransactionalSink,
    Way.TWO_PHASE: TwoPhaseCommitSink,
    Way.WRITE_AHEAD: WriteAheadSink,
    Way.UPSERT: UpsertSink,
}


def _is_chosen(row: Mapping[str, Any]) -> bool:
    return row["note"] is not None or row["amount"] % 2 == 0


def _turned(row: dict[str, Any]) -> dict[str, Any]:
    note = row["note"]
    return {**row, "note": None if note is None else note[::-1], "price": -row["price"]}


def _counting(number: int) -> Callable[[dict[str, Any], Any], Iterator[dict[str, Any]]]:
    def count(row: dict[str, Any], state: Any) -> Iterator[dict[str, Any]]:
        state.came.value = (state.came.value or 0) + 1
        yield {**row, "amount": state.came.value + number}

    return count


def _repeated(stream: Stream, number: int) -> Stream:
    def copies(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for copy in range(row["id"] % number):
            yield {**row, "amount": row["amount"] + copy}

    return stream.flat_map(copies)


_OPERATIONS: Mapping[Operation, Callable[[Stream, int], Stream]] = {
    Operation.KEEP: lambda stream, number: stream.filter(pl.col("id") % number != 0),
    Operation.CHOOSE: lambda stream, _number: stream.filter(_is_chosen),
    Operation.ADD: lambda stream, number: stream.with_columns(pl.col("amount") + number),
    Operation.TURN: lambda stream, _number: stream.map(_turned),
    Operation.REPEAT: _repeated,
    Operation.MARK: lambda stream, number: stream.map_batches(
        lambda frame: frame.with_columns(note=pl.col("note") + str(number)), schema=COLUMNS
    ),
}
