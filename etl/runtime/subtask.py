"""The subtasks: one loop each for sources, operators and sinks, single-threaded, ignorant of where they run."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from etl.clock import Clock, SystemClock
from etl.codec import encode_rows
from etl.errors import InternalError
from etl.event_time import microseconds_since_1970
from etl.operator import Operator, SideOutput
from etl.operator import Output as Emitted
from etl.runtime.alignment import Aligner
from etl.runtime.channel import Channel, ChannelClosedError, InputGate
from etl.runtime.element import Barrier, CutTaken, Element, EndOfInput, Watermark
from etl.runtime.message import (
    Failed,
    Message,
    StateSnapshotted,
    SubtaskEnded,
    TimersFired,
    UnitStaged,
)
from etl.runtime.watermark import InputWatermarks
from etl.sink import CheckpointMode, Emit, SinkWriter
from etl.state import Fragment, StateChunk, StatefulOperator

Report = Callable[[Message], None]


class Subtask(ABC):
    """Runs in one thread from :meth:`run` to its end; what goes wrong is reported, never raised.

    Attributes:
        uid: Names the subtask in messages and threads.
    """

    def __init__(self, uid: str, report: Report) -> None:
        self.uid = uid
        self._report = report

    def run(self) -> None:
        """The thread's body."""
        try:
            try:
                self._loop()
            finally:
                self.close()
        except ChannelClosedError:
            return
        except BaseException as error:  # noqa: BLE001 - everything is handed to the coordinator, which raises it
            self._report(failure_of(error))
        else:
            self._report(SubtaskEnded(self.uid))

    @abstractmethod
    def _loop(self) -> None: ...

    @abstractmethod
    def poll(self) -> bool:
        """Do one piece of work, if there is any, instead of :meth:`run`: for who drives subtasks without threads.

        Errors are raised. What :meth:`run` would end with is not done.

        Returns:
            Whether there was anything to do; False where the thread would wait.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the subtask holds: at its end, or in its stead when the attempt fails before it was started."""


def failure_of(error: BaseException) -> Failed:
    """What to report of whatever was raised in a thread."""
    if isinstance(error, Exception):
        return Failed(error)
    # A panic of native code, or sys.exit() in a user's function.
    failure = InternalError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return Failed(failure)


class Output(Protocol):
    """Where a subtask's elements go: a channel, or an exchange over several."""

    def put(self, element: Element) -> None:
        """Append an element, waiting for room."""


def send(outputs: Iterable[Output], element: Element) -> None:
    """Append an element everywhere, waiting for room."""
    for output in outputs:
        output.put(element)


class AlignedSubtask(Subtask):
    """Takes the batches of its inputs as they come, and each barrier once, when all inputs have come to it."""

    def __init__(self, uid: str, report: Report, gate: InputGate, mode: CheckpointMode) -> None:
        super().__init__(uid, report)
        self._gate = gate
        self._aligner = Aligner(len(gate.channels), mode)

    def _loop(self) -> None:
        while not self._aligner.ended:
            received = self._gate.get_within(self._until_due_s(), self._aligner.blocked)
            if received is None:
                self._tick()
            else:
                self._receive(*received)
        self._end()

    def poll(self) -> bool:
        """See :meth:`Subtask.poll`."""
        if self._until_due_s() == 0:
            self._tick()
            return True
        received = self._gate.poll(self._aligner.blocked)
        if received is None:
            return False
        self._receive(*received)
        return True

    def _receive(self, index: int, element: Element) -> None:
        barrier = None
        match element:
            case Barrier():
                barrier = self._aligner.barrier(index, element)
            case EndOfInput():
                barrier = self._aligner.end(index)
            case Watermark():
                self._note_watermark(index, element)
            case pa.RecordBatch():
                self._take(index, element)
            case _:
                raise InternalError(f"{self.uid}: {type(element).__name__} came over channel {index}")
        if barrier is not None:
            self._pass(barrier)

    @abstractmethod
    def _take(self, index: int, batch: pa.RecordBatch) -> None:
        """Rows of the unit between two barriers, from the input channel of this number."""

    def _note_watermark(self, index: int, watermark: Watermark) -> None:
        """Event time has come so far on an input channel."""

    def _until_due_s(self) -> float | None:
        """How long to wait for an element before :meth:`_tick`; None for as long as it takes."""
        return None

    def _tick(self) -> None:
        """Something is due by the clock."""

    @abstractmethod
    def _pass(self, barrier: Barrier) -> None:
        """All rows before the barrier were taken, and none behind it, as far as the mode promises."""

    def _end(self) -> None:
        """Every input has ended."""


class OperatorSubtask(AlignedSubtask):
    """Runs a chain of operators over its aligned inputs.

    Args:
        uid: See :class:`Subtask`.
        report: See there.
        gate: All input channels.
        mode: Whether barriers are aligned.
        chain: The operators, in order.
        outputs: Where the results of the last one go.
        side_outputs: By tag, where the side outputs of the first one go; what has no taker is dropped.
        snapshots: Where cuts of state go.
        inputs: For each channel, which of the first operator's inputs it belongs to; the only one when left out.
        clock: Time.
    """

    def __init__(
        self,
        uid: str,
        report: Report,
        gate: InputGate,
        mode: CheckpointMode,
        chain: Sequence[Operator],
        outputs: Sequence[Output],
        snapshots: Channel | None = None,
        *,
        side_outputs: Mapping[str, Sequence[Output]] | None = None,
        inputs: Sequence[int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(uid, report, gate, mode)
        self._chain = chain
        self._outputs = outputs
        self._side_outputs = side_outputs or {}
        self._snapshots = snapshots
        numbers = [0] * len(gate.channels) if inputs is None else inputs
        self._entries = [chain[0].entry(number) for number in numbers]
        self._watermarks = InputWatermarks(len(gate.channels))
        self._clock = clock or SystemClock()

    def restore(self, fragments: Sequence[Fragment]) -> None:
        """Have the operator with state take in fragments, at most one a key group; before the thread starts."""
        operator = self._chain[0]
        assert isinstance(operator, StatefulOperator)
        operator.restore(fragments)

    def resume(self, watermark: int, forgotten: int | None = None) -> None:
        """Begin where event time had come to at the restored checkpoint; called before the thread starts.

        Args:
            watermark: See :class:`etl.state.StateSummary`.
            forgotten: See there.
        """
        self._watermarks.resume(watermark)
        for operator in self._chain:
            if isinstance(operator, StatefulOperator):
                operator.resume(watermark)
                if forgotten is not None:
                    operator.resume_forgotten(forgotten)

    def announce_due(self) -> None:
        """Report what is due by the clock already; called when everything is restored, before the thread starts.

        So an attempt that finds nothing to read does not end before it has come to its turn.
        """
        if self._until_due_s() == 0:
            self._report(TimersFired(self.uid))

    def _take(self, index: int, batch: pa.RecordBatch) -> None:
        self._emit_all(self._entries[index](batch), 0)

    def _note_watermark(self, index: int, watermark: Watermark) -> None:
        merged = self._watermarks.advance(index, watermark)
        if merged is None:
            return
        passed_on = Watermark(self._advance(merged.time), merged.idle)
        send(self._outputs, passed_on)
        for outputs in self._side_outputs.values():
            send(outputs, passed_on)

    def _advance(self, time: int | None) -> int | None:
        """Tell the chain how far event time has come; returns how far it has for whoever comes behind it."""
        if time is not None:
            for number, operator in enumerate(self._chain):
                self._emit_all(operator.advance(time), number)
                time = operator.passed_on(time)
        return time

    def _until_due_s(self) -> float | None:
        due = min((one.due for one in self._chain if one.due is not None), default=None)
        return None if due is None else max(0.0, (due - microseconds_since_1970(self._clock.now())) / 1_000_000)

    def _tick(self) -> None:
        now = microseconds_since_1970(self._clock.now())
        emitted = [self._emit_all(operator.tick(now), number) for number, operator in enumerate(self._chain)]
        if any(emitted):
            self._report(TimersFired(self.uid))

    def _pass(self, barrier: Barrier) -> None:
        for number, operator in enumerate(self._chain):
            self._emit_all(operator.flush(), number)
        send(self._outputs, barrier)
        for outputs in self._side_outputs.values():
            send(outputs, barrier)
        if self._snapshots is not None:
            for operator in self._chain:
                if isinstance(operator, StatefulOperator):
                    self._snapshots.put(CutTaken(self.uid, barrier.checkpoint_id, operator.cut()))

    def _emit_all(self, results: Iterable[Emitted], number: int) -> bool:
        """Send on what an operator of the chain has yielded, through those behind it; returns whether there was any."""
        emitted = False
        for result in results:
            if isinstance(result, SideOutput):
                if result.batch.num_rows:
                    emitted = True
                    send(self._side_outputs.get(result.tag, ()), result.batch)
            elif result.num_rows:
                emitted = True
                if number + 1 == len(self._chain):
                    send(self._outputs, result)
                else:
                    self._emit_all(self._chain[number + 1].process(result), number + 1)
        return emitted

    def _end(self) -> None:
        send(self._outputs, EndOfInput())
        for outputs in self._side_outputs.values():
            send(outputs, EndOfInput())
        if self._snapshots is not None:
            self._snapshots.put(EndOfInput())

    def close(self) -> None:
        """See :meth:`Subtask.close`."""
        for operator in self._chain:
            operator.close()


class SnapshotSubtask(Subtask):
    """Encodes cuts of state, so that the subtasks that took them go on with the rows of the next checkpoint."""

    def __init__(self, uid: str, report: Report, gate: InputGate, emit: Emit) -> None:
        super().__init__(uid, report)
        self._gate = gate
        self._emit = emit
        self._open_inputs = len(gate.channels)

    def _loop(self) -> None:
        while self._open_inputs:
            self._receive(*self._gate.get())

    def poll(self) -> bool:
        """See :meth:`Subtask.poll`."""
        received = self._gate.poll()
        if received is None:
            return False
        self._receive(*received)
        return True

    def _receive(self, _index: int, element: Element) -> None:
        if isinstance(element, CutTaken):
            self._snapshot(element)
        else:
            self._open_inputs -= 1

    def _snapshot(self, taken: CutTaken) -> None:
        cut = taken.cut
        self._emit("state.snapshotting", uid=taken.subtask, checkpoint=taken.checkpoint_id)
        chunks = [_encoded(cut.uid, fragment) for fragment in cut.fragments]
        self._emit("state.snapshotted", uid=taken.subtask, checkpoint=taken.checkpoint_id)
        self._report(StateSnapshotted(taken.subtask, taken.checkpoint_id, cut.uid, chunks, cut.summary))

    def close(self) -> None:
        """See :meth:`Subtask.close`."""


def _encoded(uid: str, fragment: Fragment) -> StateChunk:
    content = encode_rows(fragment.rows)
    rows = fragment.rows.num_rows
    return StateChunk(uid, fragment.key_group, fragment.sequence, rows, content, hashlib.sha256(content).digest())


class SinkSubtask(AlignedSubtask):
    """Writes batches and stages a unit at each barrier; the next unit begins at once."""

    def __init__(
        self, uid: str, report: Report, gate: InputGate, mode: CheckpointMode, writer: SinkWriter, emit: Emit
    ) -> None:
        super().__init__(uid, report, gate, mode)
        self._writer = writer
        self._emit = emit
        self._rows_reported = 0

    def _take(self, _index: int, batch: pa.RecordBatch) -> None:
        self._writer.write(batch)

    def _pass(self, barrier: Barrier) -> None:
        checkpoint_id = barrier.checkpoint_id
        self._emit("sink.barrier", uid=self.uid, checkpoint=checkpoint_id)
        committable = self._writer.prepare_commit(checkpoint_id)
        rows = self._writer.rows - self._rows_reported
        self._rows_reported = self._writer.rows
        self._emit("sink.acknowledging", uid=self.uid, checkpoint=checkpoint_id)
        self._report(UnitStaged(self.uid, checkpoint_id, committable, rows))

    def close(self) -> None:
        """See :meth:`Subtask.close`."""
        self._writer.close()
