"""Source subtasks: what a source may hand over as its position."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pytest

from etl.errors import InternalError
from etl.event_time import FOREVER, EventTime
from etl.runtime.element import Barrier, Element, Watermark
from etl.runtime.message import (
    Failed,
    Finish,
    Message,
    PositionsSnapshotted,
    SourceDry,
    SubtaskEnded,
    TakeSnapshot,
)
from etl.runtime.source_subtask import SourceSettings, SourceSubtask
from etl.runtime.split_assigner import FOLLOW_POLL_S, SplitAssigner
from etl.source import Position, SourceReader, Split, SplitEnumerator
from tests.support.scripted import COLUMNS


class _NothingNew(SplitEnumerator):
    def discover(self, known: Mapping[str, Position]) -> Sequence[Split]:
        return []


class _Positions(SourceReader):
    def __init__(self, positions: Mapping[str, Position]) -> None:
        self._positions = positions

    def assign(self, splits: Sequence[Split]) -> None: ...

    def read_batch(self) -> pa.RecordBatch | None:
        return None

    def snapshot_positions(self) -> Mapping[str, Position]:
        return self._positions

    def close(self) -> None: ...


def reports(positions: Mapping[str, Any]) -> list[Message]:
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    settings = SourceSettings(COLUMNS.to_arrow(), None, follow=False)
    assigner = SplitAssigner(_NothingNew(), {})
    subtask = SourceSubtask(
        "src", inbox.put, assigner, _Positions(positions), [], settings, lambda *_names, **_fields: None
    )
    subtask.command(Finish())
    subtask.run()
    return [inbox.get_nowait() for _ in range(inbox.qsize())]


class _AlwaysPending(SplitEnumerator):
    """As a file is whose new bytes are the beginning of a record."""

    def __init__(self) -> None:
        self.asked = 0

    def discover(self, known: Mapping[str, Position]) -> Sequence[Split]:
        self.asked += 1
        return [Split("a")]


def test_following_waits_when_what_is_pending_yields_no_rows() -> None:
    enumerator = _AlwaysPending()
    settings = SourceSettings(COLUMNS.to_arrow(), None, follow=True)
    assigner = SplitAssigner(enumerator, {}, follow=True)
    subtask = SourceSubtask(
        "src", lambda _message: None, assigner, _Positions({}), [], settings, lambda *_names, **_fields: None
    )
    timer = threading.Timer(2.2 * FOLLOW_POLL_S, lambda: subtask.command(Finish()))
    timer.start()
    subtask.run()
    timer.join()
    assert 1 <= enumerator.asked <= 4


class _Moments(SourceReader):
    """Two splits of one batch each."""

    def __init__(self) -> None:
        self._batches = [("a", [10, 20]), ("b", [15])]
        self._read: dict[str, Position] = {}
        self._split = ""

    @property
    def split_id(self) -> str:
        return self._split

    def assign(self, splits: Sequence[Split]) -> None:
        assert [split.position for split in splits] == [None, None]

    def read_batch(self) -> pa.RecordBatch | None:
        if not self._batches:
            return None
        self._split, seconds = self._batches.pop(0)
        self._read[self._split] = {"next": len(seconds)}
        moments = pa.array([one * 1_000_000 for one in seconds], pa.timestamp("us", "UTC"))
        return pa.RecordBatch.from_arrays([moments], schema=MOMENTS)

    def snapshot_positions(self) -> Mapping[str, Position]:
        moved, self._read = self._read, {}
        return moved

    def close(self) -> None: ...


class _TwoSplits(SplitEnumerator):
    def __init__(self) -> None:
        self.known: Mapping[str, Position] = {}

    def discover(self, known: Mapping[str, Position]) -> Sequence[Split]:
        self.known = dict(known)
        return [Split("a"), Split("b")]


MOMENTS = pa.schema([pa.field("at", pa.timestamp("us", "UTC"))])


def test_event_time_goes_out_and_is_stored_and_the_stream_is_drained() -> None:
    sent: list[Any] = []

    class Kept:
        def put(self, element: Element) -> None:
            sent.append(element.num_rows if isinstance(element, pa.RecordBatch) else element)

    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    enumerator = _TwoSplits()
    stored = {"next": 1, "event_time": {"latest": None, "watermark": "1970-01-01T00:00:05.000000"}}
    settings = SourceSettings(MOMENTS, None, follow=False, event_time=EventTime("at"), drain=True)
    assigner = SplitAssigner(enumerator, {"old": stored})
    subtask = SourceSubtask("src", inbox.put, assigner, _Moments(), [Kept()], settings, lambda *_names, **_fields: None)
    subtask.begin()
    while subtask.poll():
        pass
    subtask.command(TakeSnapshot(1))
    subtask.command(Finish())
    while subtask.poll():
        pass

    assert enumerator.known == {"old": {"next": 1}}
    assert sent == [2, 1, Watermark(15_000_000), Watermark(FOREVER), Barrier(1)]
    messages = [inbox.get_nowait() for _ in range(inbox.qsize())]
    assert messages[0] == SourceDry("src")
    assert isinstance(messages[1], PositionsSnapshotted)
    assert messages[1].positions == {
        "a": {
            "next": 2,
            "event_time": {"latest": "1970-01-01T00:00:20.000000", "watermark": "1970-01-01T00:00:15.000000"},
        },
        "b": {
            "next": 1,
            "event_time": {"latest": "1970-01-01T00:00:15.000000", "watermark": "1970-01-01T00:00:15.000000"},
        },
    }


@pytest.mark.parametrize(
    ("split_id", "position"),
    [
        ("a", {"next": math.nan}),
        ("a", {"next": math.inf}),
        ("a", {1: 2}),
        ("a", {"next": (1, 2)}),
        ("a", {"next": {"deep": [b"bytes"]}}),
        ("a", {"next": "x\0y"}),
        ("a", {"next": "\\\0"}),
        ("a", {"next": "\udc80"}),
        ("a\0", {"next": 1}),
        ("a\udc80", {"next": 1}),
        ("a", None),
        ("a", [1]),
    ],
)
def test_position_that_would_not_come_back_as_it_is_fails_the_attempt(split_id: str, position: Any) -> None:
    (failed,) = reports({split_id: position})
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InternalError)
    assert str(failed.error) == (
        f"source src: position {position!r} of split {split_id!r} cannot be stored as a JSON object"
    )


@pytest.mark.parametrize(
    "position",
    [
        {},
        {"next": 1 << 80, "x": None, "y": [1.5, "ü", "\\u0000", {"z": True}]},
        MappingProxyType({"next": 1}),
    ],
)
def test_position_that_is_json_is_taken(position: Mapping[str, Any]) -> None:
    assert [type(message) for message in reports({"a": position})] in ([SubtaskEnded], [SourceDry, SubtaskEnded])
