"""Exactly-once ETL on nothing but PostgreSQL.

The names below are loaded on first use: ``import etl`` alone is cheap, so that the command line starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etl.accumulator import Accumulator, ExpressionAccumulator
    from etl.errors import (
        AlreadyRunningError,
        ConfigurationError,
        DatabaseUnreachableError,
        EtlError,
        FenceBlockedError,
        FencedError,
        InternalError,
        RecordError,
        StateError,
        TransientError,
    )
    from etl.event_time import EventTime
    from etl.graph import JobGraph
    from etl.job import Job
    from etl.keyed import Emission
    from etl.keyed_process import ListState, MapState, Timer, Upcaster, ValueState
    from etl.policy import CheckpointPolicy, RestartPolicy
    from etl.sink import CheckpointMode
    from etl.stream import KeyedStream, ResultStream, Stream, WindowedStream
    from etl.window import Session, Sliding, Tumbling

__all__ = [
    "Accumulator",
    "AlreadyRunningError",
    "CheckpointMode",
    "CheckpointPolicy",
    "ConfigurationError",
    "DatabaseUnreachableError",
    "Emission",
    "EtlError",
    "EventTime",
    "ExpressionAccumulator",
    "FenceBlockedError",
    "FencedError",
    "InternalError",
    "Job",
    "JobGraph",
    "KeyedStream",
    "ListState",
    "MapState",
    "RecordError",
    "RestartPolicy",
    "ResultStream",
    "Session",
    "Sliding",
    "StateError",
    "Stream",
    "Timer",
    "TransientError",
    "Tumbling",
    "Upcaster",
    "ValueState",
    "WindowedStream",
]

_HOMES = {
    "Accumulator": "etl.accumulator",
    "CheckpointMode": "etl.sink",
    "CheckpointPolicy": "etl.policy",
    "Emission": "etl.keyed",
    "EventTime": "etl.event_time",
    "ExpressionAccumulator": "etl.accumulator",
    "Job": "etl.job",
    "JobGraph": "etl.graph",
    "KeyedStream": "etl.stream",
    "ListState": "etl.keyed_process",
    "MapState": "etl.keyed_process",
    "RestartPolicy": "etl.policy",
    "Session": "etl.window",
    "Sliding": "etl.window",
    "ResultStream": "etl.stream",
    "Stream": "etl.stream",
    "Timer": "etl.keyed_process",
    "Tumbling": "etl.window",
    "Upcaster": "etl.keyed_process",
    "ValueState": "etl.keyed_process",
    "WindowedStream": "etl.stream",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "etl.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
