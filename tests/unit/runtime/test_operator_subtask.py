"""What a chain of operators does with watermarks, the clock and side outputs."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from threading import Event
from typing import Any

import pyarrow as pa

from etl.event_time import FOREVER
from etl.operator import LATE, Operator, Output, SideOutput
from etl.runtime.channel import InputGate
from etl.runtime.element import Barrier, CutTaken, Element, EndOfInput, Watermark
from etl.runtime.message import Message, SubtaskEnded, TimersFired
from etl.runtime.subtask import OperatorSubtask
from etl.sink import CheckpointMode
from etl.state import Fragment, StateCut, StatefulOperator, StateSummary

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Clock:
    """Stands still."""

    def __init__(self, microseconds: int = 0) -> None:
        self.microseconds = microseconds

    def monotonic_s(self) -> float:
        return self.microseconds / 1_000_000

    def now(self) -> datetime:
        return EPOCH + timedelta(microseconds=self.microseconds)

    def wait(self, event: Event, timeout_s: float) -> bool:
        raise AssertionError

    def jitter(self) -> float:
        raise AssertionError


class Recorder:
    """An output that keeps what it is given."""

    def __init__(self) -> None:
        self.elements: list[Any] = []

    def put(self, element: Element) -> None:
        self.elements.append(element.column(0).to_pylist() if isinstance(element, pa.RecordBatch) else element)


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(numbers, pa.int64())})


class Holding(StatefulOperator):
    """Keeps numbers until the watermark, or the clock, has come to them; negative ones are late."""

    def __init__(self, held_back: int) -> None:
        self.uid = "held"
        self.held_back = held_back
        self.by_input: list[tuple[int, int]] = []
        self.held: list[int] = []
        self.watermark: int | None = None

    def entry(self, number: int) -> Callable[[pa.RecordBatch], Iterable[Output]]:
        return lambda rows: self._taken(number, rows)

    def process(self, batch: pa.RecordBatch) -> Iterable[Output]:
        raise AssertionError("inputs differ here")

    def _taken(self, number: int, rows: pa.RecordBatch) -> Iterable[Output]:
        for value in rows.column(0).to_pylist():
            self.by_input.append((number, value))
            if value < 0:
                yield SideOutput(LATE, batch(value))
            else:
                self.held.append(value)

    def advance(self, watermark: int) -> Iterable[Output]:
        self.watermark = watermark
        yield from self._released(watermark)

    def passed_on(self, watermark: int) -> int:
        return watermark if watermark == FOREVER else watermark - self.held_back

    @property
    def due(self) -> int | None:
        return min((value for value in self.held if value >= 1000), default=None)

    def tick(self, now: int) -> Iterable[Output]:
        yield from self._released(now)

    def _released(self, until: int) -> Iterable[Output]:
        found = sorted(value for value in self.held if value <= until)
        self.held = [value for value in self.held if value > until]
        yield batch(*found)

    def resume(self, watermark: int) -> None:
        self.watermark = watermark

    def restore(self, fragments: Sequence[Fragment]) -> None:
        raise AssertionError

    def cut(self) -> StateCut:
        return StateCut(self.uid, (), StateSummary(0, self.watermark))


class Doubling(Operator):
    def __init__(self) -> None:
        self.watermarks: list[int] = []

    def advance(self, watermark: int) -> Iterable[Output]:
        self.watermarks.append(watermark)
        return ()

    def process(self, batch: pa.RecordBatch) -> Iterable[Output]:
        return (pa.record_batch({"n": pa.array([2 * one for one in batch.column(0).to_pylist()], pa.int64())}),)


class Stage:
    """A subtask of two inputs, the second of two channels."""

    def __init__(self, clock: Clock | None = None, side: bool = True, held_back: int = 0) -> None:
        self.gate = InputGate(3)
        self.holding, self.doubling = Holding(held_back), Doubling()
        self.main, self.side = Recorder(), Recorder()
        self.cuts = InputGate(1)
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.subtask = OperatorSubtask(
            "held",
            self.inbox.put,
            self.gate,
            CheckpointMode.EXACTLY_ONCE,
            [self.holding, self.doubling],
            [self.main],
            self.cuts.channels[0],
            side_outputs={LATE: [self.side]} if side else {},
            inputs=[0, 1, 1],
            clock=clock or Clock(),
        )

    def play(self, *elements: tuple[int, Element]) -> None:
        for channel, element in elements:
            self.gate.channels[channel].put(element)
            while self.subtask.poll():
                pass

    def ended(self) -> list[Message]:
        for channel in self.gate.channels:
            channel.put(EndOfInput())
        self.subtask.run()
        return [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]


def test_watermark_releases_rows_through_the_chain_and_follows_them() -> None:
    stage = Stage()
    stage.play((0, batch(5, 3, 20)), (0, Watermark(10)), (1, Watermark(10)))
    assert stage.main.elements == []
    stage.play((2, Watermark(12)))
    assert stage.main.elements == [[6, 10], Watermark(10)]
    assert stage.side.elements == [Watermark(10)]


def test_held_back_watermark_is_that_of_all_who_come_behind() -> None:
    stage = Stage(held_back=4)
    stage.play((0, batch(9)), *((channel, Watermark(10)) for channel in range(3)))
    assert (stage.holding.watermark, stage.doubling.watermarks) == (10, [6])
    stage.play(*((channel, Watermark(FOREVER)) for channel in range(3)))
    assert stage.main.elements == [[18], Watermark(6), Watermark(FOREVER)]
    assert stage.side.elements == [Watermark(6), Watermark(FOREVER)]


def test_idle_inputs_are_not_waited_for_and_idleness_is_told_on() -> None:
    stage = Stage()
    stage.play((0, Watermark(10)), (1, Watermark(None, idle=True)), (2, Watermark(None, idle=True)))
    assert stage.main.elements == [Watermark(10)]
    stage.play((0, Watermark(10, idle=True)))
    assert stage.main.elements == [Watermark(10), Watermark(10, idle=True)]


def test_rows_come_with_the_number_of_their_input() -> None:
    stage = Stage()
    stage.play((0, batch(1)), (1, batch(2)), (2, batch(3)))
    assert stage.holding.by_input == [(0, 1), (1, 2), (1, 3)]


def test_side_output_is_apart_and_aligned() -> None:
    stage = Stage()
    stage.play((0, batch(-1, 7)), *((channel, Barrier(1)) for channel in range(3)))
    assert stage.side.elements == [[-1], Barrier(1)]
    assert stage.main.elements == [Barrier(1)]
    assert stage.ended() == [SubtaskEnded("held")]
    assert stage.side.elements[-1] == stage.main.elements[-1] == EndOfInput()


def test_side_output_that_nobody_reads_is_dropped() -> None:
    stage = Stage(side=False)
    stage.play((0, batch(-1)), (0, batch(-2)))
    assert stage.main.elements == []


def test_what_is_due_before_the_start_is_announced() -> None:
    clock = Clock(microseconds=999)
    stage = Stage(clock)
    stage.holding.held = [1000]
    stage.subtask.announce_due()
    assert stage.inbox.empty()
    clock.microseconds = 1000
    stage.subtask.announce_due()
    assert stage.inbox.get_nowait() == TimersFired("held")
    assert (stage.main.elements, stage.holding.held) == ([], [1000])


def test_clock_releases_rows_and_asks_for_a_checkpoint() -> None:
    clock = Clock(microseconds=999)
    stage = Stage(clock)
    stage.play((0, batch(1000, 2000)))
    assert stage.main.elements == []
    clock.microseconds = 1500
    stage.play()
    assert stage.subtask.poll()
    assert stage.main.elements == [[2000]]
    assert stage.inbox.get_nowait() == TimersFired("held")
    assert not stage.subtask.poll()
    clock.microseconds = 2000
    assert stage.ended() == [TimersFired("held"), SubtaskEnded("held")]
    assert stage.main.elements == [[2000], [4000], EndOfInput()]


def test_restored_watermark_is_the_operators_and_the_cuts() -> None:
    stage = Stage()
    stage.subtask.resume(50)
    stage.play(*((channel, Watermark(40)) for channel in range(3)), *((channel, Barrier(7)) for channel in range(3)))
    assert stage.main.elements == [Watermark(50), Barrier(7)]
    _, taken = stage.cuts.get()
    assert taken == CutTaken("held", 7, StateCut("held", (), StateSummary(0, 50)))
