"""What must come of the input: every operation once more, in plain Python, for somebody to compare with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

from tests.faults.described import STATEFUL, DescribedJob, DescribedSink, Node, Operation
from tests.soak.files import Row

Rows = Counter[Row]


def arrivals(job: DescribedJob, read: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """By sink, the rows that come to it when these are read; those of one source stay in order."""
    streams: list[list[Row]] = []
    for node in job.nodes:
        if node.operation is Operation.READ:
            streams.append(list(read[node.source]))
        else:
            came = [row for number in node.inputs for row in streams[number]]
            streams.append(_remembering(node, came) if node.operation in STATEFUL else _each_changed(node, came))
    return {sink.uid: streams[sink.node] for sink in job.sinks}


def _each_changed(node: Node, came: Iterable[Row]) -> list[Row]:
    return [changed for row in came for changed in _changed(node, row)]


def _remembering(node: Node, came: Iterable[Row]) -> list[Row]:
    """What becomes of rows by those of their key that came before."""
    counts: Counter[int] = Counter()
    found = []
    for row in came:
        id_, key, version, _, price, note = row
        counts[key] += 1
        if node.operation is Operation.COUNT:
            found.append((id_, key, version, counts[key] + node.number, price, note))
        elif counts[key] == 1:
            found.append(row)
    return found


def _changed(node: Node, row: Row) -> Iterable[Row]:
    """What becomes of one row."""
    id_, key, version, amount, price, note = row
    n = node.number
    match node.operation:
        case Operation.KEEP:
            return [row] if id_ % n else []
        case Operation.CHOOSE:
            return [row] if note is not None or amount % 2 == 0 else []
        case Operation.ADD:
            return [(id_, key, version, amount + n, price, note)]
        case Operation.TURN:
            return [(id_, key, version, amount, -price, None if note is None else note[::-1])]
        case Operation.REPEAT:
            return [(id_, key, version, amount + copy, price, note) for copy in range(id_ % n)]
        case Operation.MARK:
            return [(id_, key, version, amount, price, None if note is None else f"{note}{n}")]
        case Operation.UNITE:
            return [row]
        case Operation.READ | Operation.FIRST | Operation.COUNT:
            raise AssertionError(f"{node.operation} does not look at one row alone")
        case _:
            assert_never(node.operation)


def shown(sink: DescribedSink, came: Iterable[Row]) -> Rows:
    """What readers of the table see when these rows have come and all of them are visible."""
    if not sink.keyed:
        return Counter(came)
    by_key: dict[int, Row] = {}
    for row in came:
        former = by_key.get(row[1])
        if former is None or not sink.versioned or row[2] >= former[2]:
            by_key[row[1]] = row
    return Counter(by_key.values())
