"""Event time of a source that several subtasks read: rows that keep the promise are never late."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.event_time import FOREVER, EventTime
from etl.runtime.element import Barrier, Element, Watermark
from etl.runtime.message import Message, PositionsSnapshotted, TakeSnapshot
from etl.runtime.source_subtask import SourceSettings, SourceSubtask
from etl.runtime.split_assigner import SplitAssigner
from etl.runtime.watermark import LEAST, InputWatermarks
from etl.source import Position, SourceReader, Split, SplitEnumerator

SECOND = 1_000_000
COLUMNS = pa.schema([pa.field("at", pa.timestamp("us", "UTC"))])
Splits = Mapping[str, Sequence[int]]
"""Seconds by split."""


class Enumerator(SplitEnumerator):
    def __init__(self, splits: Splits) -> None:
        self._splits = splits

    def discover(self, known: Mapping[str, Position]) -> Sequence[Split]:
        return [
            Split(name, known.get(name), len(seconds))
            for name, seconds in self._splits.items()
            if len(seconds) > (known[name]["next"] if name in known else 0)
        ]


class Reader(SourceReader):
    """Two rows at a time."""

    def __init__(self, splits: Splits) -> None:
        self._splits = splits
        self._assigned: deque[Split] = deque()
        self._next: dict[str, int] = {}
        self._moved: dict[str, Position] = {}
        self._split = ""

    @property
    def split_id(self) -> str:
        return self._split

    def assign(self, splits: Sequence[Split]) -> None:
        self._assigned.extend(splits)
        self._next.update({one.id: one.position["next"] if one.position else 0 for one in splits})

    def read_batch(self) -> pa.RecordBatch | None:
        while self._assigned:
            self._split = self._assigned[0].id
            first = self._next[self._split]
            seconds = self._splits[self._split][first : first + 2]
            if seconds:
                self._next[self._split] = first + len(seconds)
                self._moved[self._split] = {"next": first + len(seconds)}
                moments = pa.array([one * SECOND for one in seconds], COLUMNS.field("at").type)
                return pa.RecordBatch.from_arrays([moments], schema=COLUMNS)
            self._assigned.popleft()
        return None

    def snapshot_positions(self) -> Mapping[str, Position]:
        moved, self._moved = self._moved, {}
        return moved

    def close(self) -> None: ...


class Sent:
    """What a subtask has sent and nobody has taken yet."""

    def __init__(self) -> None:
        self.elements: deque[Element] = deque()

    def put(self, element: Element) -> None:
        self.elements.append(element)


class Attempt:
    """Subtasks that are polled, and an operator that takes what they have sent, in any order."""

    def __init__(
        self,
        splits: Splits,
        known: Mapping[str, Position],
        watermark: int | None,
        subtasks: int,
        *,
        drain: bool = False,
    ) -> None:
        self.late: list[int] = []
        self.rows = 0
        self.watermark = watermark
        self._inbox: list[Message] = []
        self._inputs = InputWatermarks(subtasks)
        if watermark is not None:
            self._inputs.resume(watermark)
        event_time = EventTime("at", out_of_orderness=timedelta(seconds=3))
        assigner = SplitAssigner(Enumerator(splits), known, subtasks)
        source = SourceSettings(COLUMNS, None, follow=False, event_time=event_time, drain=drain)
        self._channels = [Sent() for _ in range(subtasks)]
        self._begun: set[int] = set()
        self._subtasks = [
            SourceSubtask(
                "src", self._inbox.append, assigner, Reader(splits), [channel], source, lambda *_, **__: None, number
            )
            for number, channel in enumerate(self._channels)
        ]

    def step(self, chance: random.Random) -> None:
        number = chance.randrange(len(self._subtasks))
        if chance.random() < 0.5:
            self._take(number)
        elif number in self._begun:
            self._subtasks[number].poll()
        else:
            self._begin(number)

    def checkpoint(self) -> dict[str, Position]:
        """Barriers through all channels; returns the positions that moved."""
        for number, subtask in enumerate(self._subtasks):
            if number not in self._begun:
                self._begin(number)
            subtask.command(TakeSnapshot(1))
            subtask.poll()
        for number in range(len(self._channels)):
            while self._take(number):
                pass
        moved: dict[str, Position] = {}
        for message in self._inbox:
            if isinstance(message, PositionsSnapshotted):
                moved.update(message.positions)
        return moved

    def finish(self) -> None:
        for number, subtask in enumerate(self._subtasks):
            if number not in self._begun:
                self._begin(number)
            while subtask.poll():
                pass
        for number in range(len(self._channels)):
            while self._take(number):
                pass

    def _begin(self, number: int) -> None:
        self._subtasks[number].begin()
        self._begun.add(number)

    def _take(self, number: int) -> bool:
        """The next element of a channel; False where there is none, or it is the barrier."""
        elements = self._channels[number].elements
        element: Any = elements.popleft() if elements else None
        if isinstance(element, Watermark):
            merged = self._inputs.advance(number, element)
            if merged is not None:
                assert self.watermark is None or (merged.time is not None and merged.time >= self.watermark)
                self.watermark = merged.time
        elif isinstance(element, pa.RecordBatch):
            self.rows += element.num_rows
            moments = [int(one.timestamp()) * SECOND for one in element["at"].to_pylist()]
            self.late += [one for one in moments if self.watermark is not None and one < self.watermark]
        return element is not None and not isinstance(element, Barrier)


@settings(deadline=None, max_examples=150)
@given(st.randoms(use_true_random=False))
def test_rows_that_keep_the_promise_are_never_late(chance: random.Random) -> None:
    """Whatever the order of reading, over crashes, and over changes of the parallelism."""
    splits: dict[str, list[int]] = {}
    for name in "abcdefg"[: chance.randrange(1, 8)]:
        begin = chance.randrange(0, 100)
        splits[name] = [begin + second + chance.randrange(0, 4) for second in range(0, chance.randrange(1, 60), 4)]
    known: dict[str, Position] = {}
    watermark: int | None = None
    for _ in range(chance.randrange(0, 3)):
        attempt = Attempt(splits, known, watermark, chance.randrange(1, 5))
        for _ in range(chance.randrange(0, 80)):
            attempt.step(chance)
        known.update(attempt.checkpoint())
        watermark = attempt.watermark
        for _ in range(chance.randrange(0, 20)):
            attempt.step(chance)
        assert attempt.late == []

    before = sum(position["next"] for position in known.values())
    drained = chance.random() < 0.5
    attempt = Attempt(splits, known, watermark, chance.randrange(1, 5), drain=drained)
    for _ in range(chance.randrange(0, 80)):
        attempt.step(chance)
    attempt.finish()
    assert attempt.late == []
    assert before + attempt.rows == sum(map(len, splits.values()))
    least = min((max(seconds) - 3) * SECOND for seconds in splits.values())
    assert attempt.watermark == FOREVER if drained else attempt.watermark is not None and attempt.watermark >= least


def test_split_that_waits_holds_back_all_subtasks() -> None:
    splits = {"a": [100, 110, 120, 130], "b": [100, 110, 120], "c": [10]}
    attempt = Attempt(splits, {}, None, 2)
    chance = random.Random(1)
    while attempt.rows < 6:
        attempt.step(chance)
    while_one_waited = attempt.watermark
    attempt.finish()
    assert while_one_waited is None
    assert attempt.watermark in (7 * SECOND, 127 * SECOND)
    assert attempt.late == []


def test_subtask_that_finds_nothing_holds_nobody_back() -> None:
    attempt = Attempt({"a": [100, 110]}, {}, None, 3)
    attempt.finish()
    assert attempt.watermark == 107 * SECOND


def test_source_with_nothing_to_read_says_how_far_it_had_come() -> None:
    stored = {
        "next": 2,
        "event_time": {"latest": "1970-01-01T00:02:00.000000", "watermark": "1970-01-01T00:01:57.000000"},
    }
    attempt = Attempt({"a": [110, 120]}, {"a": stored}, None, 3)
    attempt.finish()
    assert (attempt.watermark, attempt.checkpoint()) == (117 * SECOND, {})


def test_idle_subtask_says_that_it_is_back_before_it_takes_what_waits() -> None:
    """Else the others could overtake the split between the taking and the saying."""
    splits: dict[str, Sequence[int]] = {"a": [100, 110]}
    assigner = SplitAssigner(Enumerator(splits), {}, 2, follow=True)
    source = SourceSettings(COLUMNS, None, follow=True, event_time=EventTime("at"))
    channels = [Sent(), Sent()]
    first, second = (
        SourceSubtask(
            "src", lambda _: None, assigner, Reader(splits), [channels[number]], source, lambda *_, **__: None, number
        )
        for number in range(2)
    )
    first.begin()
    second.begin()
    second.poll()
    assert list(channels[1].elements) == [Watermark(None, idle=True)]
    first.poll()
    splits |= {"b": [50, 60], "c": [55]}
    first.poll()
    assert assigner.floor() == LEAST
    taken: list[bool] = []
    put = channels[1].put

    def put_and_look(element: Element) -> None:
        taken.append(assigner.floor() == FOREVER)
        put(element)

    channels[1].put = put_and_look  # type: ignore[method-assign]
    second.poll()
    second.poll()
    back, rows, reached = list(channels[1].elements)[1:]
    assert (back, reached, taken) == (Watermark(None), Watermark(55 * SECOND), [False, True, True])
    assert isinstance(rows, pa.RecordBatch)
