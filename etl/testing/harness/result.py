"""What came of a play."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import polars as pl
import pyarrow as pa

from etl.errors import ConfigurationError, InternalError
from etl.event_time import FOREVER
from etl.graph import JobGraph, OperatorNode, SinkNode
from etl.keyed import Aggregate, ListState, MapState, Process
from etl.operators import operator_for
from etl.operators.exact import rows_of
from etl.operators.keyed.aggregate import AggregateOperator
from etl.operators.keyed.reading import rows_of_state
from etl.operators.keyed.sessions import SessionOperator
from etl.operators.keyed.table import KEY_PREFIX, STATE_PREFIX
from etl.operators.keyed.windows import WindowOperator
from etl.sink import Upsert
from etl.state import Fragment, StatefulOperator, ranks
from etl.testing.harness.memory import StoredCheckpoint
from etl.transformation import Row
from etl.windowed import WINDOW_START, WindowAggregate

Key = tuple[Any, ...]

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
        rows = self.output[sink]
        upsert = _found(sink, self._graph.sinks, "sink").sink.upsert
        if upsert is None:
            raise ConfigurationError(f'sink "{sink}" has no key: every row is added; look at output["{sink}"]')
        return _table(rows, upsert)

    def state(self, operator: str) -> dict[Key, Row]:
        """By key what an operator remembers, as of the last checkpoint.

        For ``process``, the states by name; for ``aggregate``, the results, of windows by key and ``window_start``; for
        ``deduplicate``, nothing but the key.

        Raises:
            ConfigurationError: There is no such operator.
        """
        node = _found(operator, self._graph.operators, "operator")
        if isinstance(node.transformation, Aggregate):
            return self._aggregates(node, node.transformation)
        return dict(_states(node, self._stored.fragments(operator)))

    def late_rows(self, operator: str) -> int:
        """How many rows came too late for an operator, as of the last checkpoint; its ``late`` stream has them.

        Raises:
            ConfigurationError: There is no such operator.
        """
        node = _found(operator, self._graph.operators, "operator")
        summary = self._stored.summaries.get(node.uid)
        return 0 if summary is None else summary.late_rows

    def _aggregates(self, node: OperatorNode, transformation: Aggregate) -> dict[Key, Row]:
        inputs = [self._graph.node(input_id).schema for input_id in node.inputs]
        operator = operator_for(transformation, inputs, node.schema)
        assert isinstance(operator, StatefulOperator)
        for rank in ranks(self._stored.fragments(node.uid)):
            operator.restore(rank)
        keys = transformation.keys
        if isinstance(transformation, WindowAggregate):
            keys = (*keys, WINDOW_START)
        return {
            tuple(_frozen(row[name]) for name in keys): {name: row[name] for name in row if name not in keys}
            for batch in _results(operator)
            for row in rows_of(batch)
        }


def _results(operator: StatefulOperator) -> Iterable[pa.RecordBatch]:
    match operator:
        case AggregateOperator() | WindowOperator():
            return operator.results()
        case SessionOperator():
            # What is remembered are pieces; closing them all puts them together.
            return operator.advance(FOREVER)
    raise InternalError(f"what {type(operator).__name__} remembers cannot be shown")


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
        key = tuple(_frozen(row[name]) for name in upsert.key)
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


def _states(node: OperatorNode, fragments: Sequence[Fragment]) -> Iterator[tuple[Key, Row]]:
    specs = node.transformation.states if isinstance(node.transformation, Process) else {}
    for batch in rows_of_state(node.uid, fragments):
        columns = {
            name: pl.Series(pl.from_arrow(column)).to_list()
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            key = tuple(_frozen(value) for name, value in row.items() if name.startswith(KEY_PREFIX))
            states = {name.removeprefix(STATE_PREFIX): row[name] for name in row if name.startswith(STATE_PREFIX)}
            yield key, {name: _as_seen(value, specs.get(name)) for name, value in states.items()}


def _as_seen(value: Any, spec: object) -> Any:
    """As the function sees it: a list or dictionary with nothing in it is empty."""
    match spec:
        case MapState():
            return {entry["key"]: entry["value"] for entry in value or ()}
        case ListState():
            return value or []
        case _:
            return value


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
