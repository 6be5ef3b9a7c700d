"""What came of a play."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from etl.errors import ConfigurationError
from etl.graph import JobGraph, OperatorNode, SinkNode
from etl.operators.exact import rows_of
from etl.sink import Upsert
from etl.testing.harness.memory import StoredCheckpoint
from etl.testing.harness.remembered import Key, key_of, remembered
from etl.transformation import Row

_Node = TypeVar("_Node", SinkNode, OperatorNode)


class Result:
    """What the sinks of a job were given, and what its operators remember.

    Values are those that functions get: ``Decimal`` for numeric, aware ``datetime`` in UTC for timestamptz, and so on.
    """

    def __init__(
        self, graph: JobGraph, stored: StoredCheckpoint, uncommitted: Mapping[str, Sequence[pa.RecordBatch]]
    ) -> None:
        self._graph = graph
        self._stored = stored
        self._uncommitted = uncommitted

    @property
    def output(self) -> Mapping[str, list[Row]]:
        """By uid of a sink all rows that a checkpoint has made visible, in order, each as often as it was emitted."""
        return _Rows("sink", {node.uid: self._stored.output.get(node.uid, ()) for node in self._graph.sinks})

    @property
    def uncommitted(self) -> Mapping[str, list[Row]]:
        """By uid of a sink the rows that it was given after the last checkpoint: no reader sees them."""
        return _Rows("sink", self._uncommitted)

    def table(self, sink: str) -> dict[Key, Row]:
        """What the table of a sink with a key holds: by key the last row, or that with the highest version.

        Raises:
            ConfigurationError: There is no such sink, or it has no key.
        """
        node = _found(sink, self._graph.sinks, "sink")
        upsert = node.sink.upsert
        if upsert is None:
            raise ConfigurationError(f'sink "{sink}" has no key: every row is added; look at output["{sink}"]')
        for name in (*upsert.key, *([upsert.version] if upsert.version else [])):
            if name not in node.schema:
                raise ConfigurationError(f'sink "{sink}" goes by "{name}", which is no column of: {node.schema}')
        return _table(self.output[sink], upsert)

    def state(self, operator: str) -> dict[Key, Row]:
        """By key what an operator remembers, as of the last checkpoint.

        For ``process``, the states by name; for ``aggregate``, the results, of windows by key and ``window_start``; for
        joins, the rows of each side that wait for partners; for ``deduplicate``, nothing but the key.

        Raises:
            ConfigurationError: There is no such operator.
        """
        node = _found(operator, self._graph.operators, "operator")
        return remembered(self._graph, node, self._stored.fragments(operator))

    def late_rows(self, operator: str) -> int:
        """How many rows came too late for an operator, as of the last checkpoint; its ``late`` stream has them.

        Raises:
            ConfigurationError: There is no such operator.
        """
        node = _found(operator, self._graph.operators, "operator")
        summary = self._stored.summaries.get(node.uid)
        return 0 if summary is None else summary.late_rows


class _Rows(Mapping[str, list[Row]]):
    """Batches by uid, decoded when they are asked for."""

    def __init__(self, role: str, batches: Mapping[str, Iterable[pa.RecordBatch]]) -> None:
        self._role = role
        self._batches = batches

    def __getitem__(self, uid: str) -> list[Row]:
        if uid not in self._batches:
            raise ConfigurationError(_unknown(uid, list(self._batches), self._role))
        return [row for batch in self._batches[uid] for row in rows_of(batch)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __repr__(self) -> str:
        return repr(dict(self))


def _found(uid: str, nodes: Sequence[_Node], role: str) -> _Node:
    for node in nodes:
        if node.uid == uid:
            return node
    raise ConfigurationError(_unknown(uid, [node.uid for node in nodes], role))


def _unknown(uid: str, known: Sequence[str], role: str) -> str:
    listed = ", ".join(f'"{one}"' for one in known) or "none"
    return f'the job has no {role} "{uid}"; its {role}s: {listed}'


def _table(rows: Iterable[Row], upsert: Upsert) -> dict[Key, Row]:
    found: dict[Key, tuple[Key, Row]] = {}
    for row in rows:
        key = key_of(row[name] for name in upsert.key)
        same = tuple("NaN" if value != value else value for value in key)
        before = found.get(same)
        if before is None or upsert.version is None or _replaces(row[upsert.version], before[1][upsert.version]):
            found[same] = (key, row)
    return dict(found.values())


def _replaces(version: Any, stored: Any) -> bool:
    """Whether a row with this version takes the place of a stored one, as the server compares them."""
    if version is None or stored is None:
        return stored is None
    return bool(_ordered(stored) <= _ordered(version))


def _ordered(version: Any) -> tuple[bool, Any]:
    is_nan = version != version
    return (is_nan, 0 if is_nan else version)
