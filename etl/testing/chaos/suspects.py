"""What on the way to a sink may yield something else the next time."""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from etl.graph import JobGraph, TransformationNode
from etl.keyed import Aggregate
from etl.keyed_process import Process
from etl.transformation import Filter, FlatMap, Map, MapBatches, Select, Transformation, WithColumns

_NONE = (
    "no Python function is on the way: look at values that are computed when the module is imported, at the source and"
    " at the sink"
)


def suspects(graph: JobGraph, sink_id: str) -> tuple[str, ...]:
    """Everything before a sink that runs code of the user's, in the order of the rows' way; never empty."""
    found = [
        _told(node.transformation)
        for node in graph.upstream(sink_id)
        if isinstance(node, TransformationNode) and _is_suspect(node.transformation)
    ]
    return tuple(found) or (_NONE,)


def _is_suspect(transformation: Transformation) -> bool:
    if not transformation.deterministic or isinstance(transformation, Map | FlatMap | MapBatches | Process):
        return True
    return any(not isinstance(part, pl.Expr) or "python_udf" in str(part) for part in _parts(transformation))


def _parts(transformation: Transformation) -> Iterable[object]:
    """Expressions and functions."""
    match transformation:
        case Filter():
            return (transformation.predicate,)
        case Select():
            return transformation.expressions
        case WithColumns():
            return transformation.columns
        case Aggregate():
            return [expression for _, expression in transformation.expressions]
        case _:
            return ()


def _told(transformation: Transformation) -> str:
    declared = "" if transformation.deterministic else ", declared deterministic=False"
    return f"{transformation.describe()} at {transformation.location}{declared}"
