"""What an operator remembers, for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import polars as pl
import pyarrow as pa

from etl.errors import InternalError
from etl.event_time import FOREVER
from etl.graph import JobGraph, OperatorNode
from etl.joins import SIDES, Join
from etl.keyed import Aggregate
from etl.keyed_process import ListState, MapState, Process
from etl.operators import operator_for
from etl.operators.exact import rows_of
from etl.operators.keyed.aggregate import AggregateOperator
from etl.operators.keyed.reading import rows_of_state
from etl.operators.keyed.sessions import SessionOperator
from etl.operators.keyed.table import KEY_PREFIX, STATE_PREFIX
from etl.operators.keyed.windows import WindowOperator
from etl.state import Fragment, StatefulOperator, ranks
from etl.transformation import Row
from etl.windowed import WINDOW_START, WindowAggregate

Key = tuple[Any, ...]


def remembered(graph: JobGraph, node: OperatorNode, fragments: Sequence[Fragment]) -> dict[Key, Row]:
    """By key the results of aggregations, and of other operators what they have stored.

    Args:
        graph: The job's.
        node: The operator.
        fragments: Its state, each chain in its order.
    """
    if isinstance(node.transformation, Aggregate):
        return _aggregates(graph, node, node.transformation, fragments)
    found = _stored(node, fragments)
    if isinstance(node.transformation, Join):
        sides = {side: graph.node(one).schema.names for side, one in zip(SIDES, node.inputs, strict=True)}
        return {key: {side: _only(sides[side], rows) for side, rows in of_key.items()} for key, of_key in found.items()}
    return found


def _only(names: Sequence[str], rows: Iterable[Row]) -> list[Row]:
    """Without what the operator notes beside the row."""
    return [{name: value for name, value in row.items() if name in names} for row in rows]


def key_of(values: Iterable[Any]) -> Key:
    """Values as a key of a dict."""
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


def _aggregates(
    graph: JobGraph, node: OperatorNode, transformation: Aggregate, fragments: Sequence[Fragment]
) -> dict[Key, Row]:
    # All of it in memory: of what is on disk, results are not asked for.
    in_memory = replace(transformation, keys_in_memory=None)
    operator = operator_for(in_memory, [graph.node(one).schema for one in node.inputs], node.schema)
    assert isinstance(operator, StatefulOperator)
    try:
        for rank in ranks(fragments):
            operator.restore(rank)
        rows = [row for batch in _results(operator) for row in rows_of(batch)]
    finally:
        operator.close()
    keys = transformation.keys
    if isinstance(transformation, WindowAggregate):
        keys = (*keys, WINDOW_START)
    return {
        key_of(row[name] for name in keys): {name: value for name, value in row.items() if name not in keys}
        for row in rows
    }


def _results(operator: StatefulOperator) -> Iterable[pa.RecordBatch]:
    match operator:
        case AggregateOperator() | WindowOperator():
            return operator.results()
        case SessionOperator():
            # What is remembered are pieces; closing them all puts them together.
            return operator.advance(FOREVER)
    raise InternalError(f"what {type(operator).__name__} remembers cannot be shown")


def _stored(node: OperatorNode, fragments: Sequence[Fragment]) -> dict[Key, Row]:
    """Of each key its states by name, and the rows that wait, in their order, by the name of their table."""
    keyed_by = len(node.transformation.keys)
    specs = node.transformation.states if isinstance(node.transformation, Process) else {}
    found: dict[Key, Row] = {}
    waiting: dict[tuple[Key, str], list[tuple[Key, Row]]] = {}
    for keys, states in _rows(node.uid, fragments):
        key = key_of(list(keys.values())[:keyed_by])
        of_key = found.setdefault(key, {})
        number = {name: value for name, value in list(keys.items())[keyed_by:] if value is not None}
        table = next(iter(number), "").partition(".")[0]
        if table:
            row = {name.partition(".")[2]: states[name] for name in states if name.startswith(f"{table}.")}
            waiting.setdefault((key, table), []).append((tuple(number.values()), row))
        else:
            own = {name: value for name, value in states.items() if "." not in name}
            of_key.update({name: _as_seen(value, specs.get(name)) for name, value in own.items()})
    for (key, table), rows in waiting.items():
        found[key][table] = [row for _, row in sorted(rows, key=lambda one: one[0])]
    return found


def _rows(uid: str, fragments: Sequence[Fragment]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """For each stored row the columns of the key and those of the state."""
    for batch in rows_of_state(uid, fragments):
        names = batch.schema.names
        # polars and not pyarrow: times and zones come out as rows have them
        columns = [pl.Series(pl.from_arrow(column)).to_list() for column in batch.columns]
        for values in zip(*columns, strict=True):
            row = dict(zip(names, values, strict=True))
            yield _part(row, KEY_PREFIX), _part(row, STATE_PREFIX)


def _part(row: Row, prefix: str) -> Mapping[str, Any]:
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}


def _as_seen(value: Any, spec: object) -> Any:
    """As the function sees it: a list or dictionary with nothing in it is empty."""
    match spec:
        case MapState():
            return {entry["key"]: entry["value"] for entry in value or ()}
        case ListState():
            return value or []
        case _:
            return value
