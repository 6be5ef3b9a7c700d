"""The subtasks: one loop each for sources, operators and sinks, single-threaded, ignorant of where they run."""

from __future__ import annotations

import hashlib
import json
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from etl.codec import encode_rows
from etl.errors import InternalError
from etl.operator import Operator
from etl.runtime.alignment import Aligner
from etl.runtime.channel import Channel, ChannelClosedError, InputGate
from etl.runtime.element import Barrier, CutTaken, Element, EndOfInput
from etl.runtime.message import (
    CheckpointRequested,
    Command,
    Failed,
    Finish,
    Message,
    PositionsSnapshotted,
    ReleaseBarrier,
    SourceActivity,
    SourceDry,
    StateSnapshotted,
    StopReading,
    SubtaskEnded,
    TakeSnapshot,
    UnitStaged,
)
from etl.sink import CheckpointMode, Emit, SinkWriter
from etl.source import Position, Progress, SourceReader, SplitEnumerator
from etl.state import Fragment, StateChunk, StatefulOperator

FOLLOW_POLL_S = 0.5

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
        except Exception as error:  # noqa: BLE001 - everything is handed to the coordinator, which raises it
            self._report(Failed(error))
        except BaseException as error:  # noqa: BLE001 - a panic of native code, or sys.exit() in a user's function
            failure = InternalError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            self._report(Failed(failure))
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


class Output(Protocol):
    """Where a subtask's elements go: a channel, or an exchange over several."""

    def put(self, element: Element) -> None:
        """Append an element, waiting for room."""


def _send(outputs: Sequence[Output], element: Element) -> None:
    for output in outputs:
        output.put(element)


def _require_storable(uid: str, split_id: str, position: Position) -> None:
    """Refuse a position that the store would not give back as it is; a restart would read from somewhere else.

    Raises:
        InternalError: The source's mistake: NaN, keys that are no texts, tuples, NUL characters, other objects.
    """
    given = [split_id, dict(position) if isinstance(position, Mapping) else position]
    try:
        text = json.dumps(given, allow_nan=False, ensure_ascii=False)
        text.encode()
        storable = isinstance(given[1], dict) and json.loads(text) == given
    except (TypeError, ValueError):
        storable = False
    # Without escaped backslashes, what is left of an escaped NUL is one.
    if not storable or "\\u0000" in text.replace("\\\\", ""):
        raise InternalError(
            f"source {uid}: position {position!r} of split {split_id!r} cannot be stored as a JSON object"
        )


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """How a source subtask behaves.

    Attributes:
        schema: What every batch must look like.
        rows_max: Rows after which it asks for a checkpoint and waits for the barrier; None for no bound.
        follow: Whether it goes on for new data when everything is read.
    """

    schema: pa.Schema
    rows_max: int | None
    follow: bool


class SourceSubtask(Subtask):
    """Reads splits, sends batches, and at the coordinator's word snapshots its positions and sends a barrier."""

    def __init__(
        self,
        uid: str,
        report: Report,
        enumerator: SplitEnumerator,
        reader: SourceReader,
        known: Mapping[str, Position],
        outputs: Sequence[Output],
        settings: SourceSettings,
        emit: Emit,
    ) -> None:
        super().__init__(uid, report)
        self.activity = SourceActivity()
        self.rows_total = 0
        self._enumerator = enumerator
        self._reader = reader
        self._known: dict[str, Position] = dict(known)
        self._moved: dict[str, Position] = {}
        self._outputs = outputs
        self._settings = settings
        self._emit = emit
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._rows = 0
        self._rows_at_discovery = 0
        self._waited = False
        self._reading = True
        self._finished = False

    def command(self, command: Command) -> None:
        """Give an order; obeyed at the next batch border. Called by the coordinator."""
        self._commands.put(command)

    def progress(self) -> Progress:
        """How far reading is; asked by the monitor, from another thread."""
        return self._reader.progress()

    def _loop(self) -> None:
        self.begin()
        while not self._finished:
            if not self.poll():
                self._obey(self._commands.get())
        _send(self._outputs, EndOfInput())

    def begin(self) -> None:
        """What comes before the first :meth:`poll`."""
        self._discover()

    def poll(self) -> bool:
        """See :meth:`Subtask.poll`: obey the next order, or read when there is none."""
        if self._obey_pending():
            return True
        if self._reading:
            self._read()
            return True
        return False

    def _discover(self) -> None:
        """Assign what there is to read."""
        self._collect()
        splits = self._enumerator.discover(self._known)
        if splits:
            self._reader.assign(splits)
        self._rows_at_discovery, self._waited = self.rows_total, False

    def _obey_pending(self) -> bool:
        try:
            command = self._commands.get_nowait()
        except queue.Empty:
            return False
        self._obey(command)
        return True

    def _obey(self, command: Command) -> None:
        match command:
            case TakeSnapshot():
                self._snapshot(command)
            case StopReading():
                self._reading = False
                self._report(SourceDry(self.uid))
            case Finish():
                self._finished = True
            case ReleaseBarrier():
                raise InternalError(f"source {self.uid}: no barrier is held")

    def _read(self) -> None:
        batch = self._reader.read_batch()
        if batch is None:
            self._run_dry()
            return
        if not batch.schema.equals(self._settings.schema):
            raise InternalError(f"source {self.uid} returned columns {batch.schema}, declared {self._settings.schema}")
        self.activity.moved = True
        self._rows += batch.num_rows
        self.rows_total += batch.num_rows
        self._emit("source.batch", uid=self.uid, rows=batch.num_rows)
        _send(self._outputs, batch)
        if self._settings.rows_max is not None and self._rows >= self._settings.rows_max:
            self._report(CheckpointRequested(self.uid))
            self._await_barrier()

    def _await_barrier(self) -> None:
        """The unit is full: whatever comes, the barrier comes before the next row."""
        while self._rows and not self._finished:
            self._obey(self._commands.get())

    def _run_dry(self) -> None:
        if not self._settings.follow:
            self._reading = False
            self._report(SourceDry(self.uid))
        elif self._waited or self.rows_total > self._rows_at_discovery:
            self._discover()
        else:
            # Also when a split was found: what is new in it may be the beginning of a record that is still written.
            self._waited = True
            self._wait_for_command()

    def _wait_for_command(self) -> None:
        try:
            self._obey(self._commands.get(timeout=FOLLOW_POLL_S))
        except queue.Empty:
            return

    def _snapshot(self, order: TakeSnapshot) -> None:
        self._collect()
        positions, self._moved = self._moved, {}
        rows, self._rows = self._rows, 0
        self.activity.moved = False
        self._report(PositionsSnapshotted(self.uid, order.checkpoint_id, positions, rows))
        if order.hold and not self._await_release(order.checkpoint_id):
            return
        self._emit("source.barrier", uid=self.uid, checkpoint=order.checkpoint_id)
        _send(self._outputs, Barrier(order.checkpoint_id))

    def _await_release(self, checkpoint_id: int) -> bool:
        while not self._finished:
            command = self._commands.get()
            if command == ReleaseBarrier(checkpoint_id):
                return True
            self._obey(command)
        return False

    def _collect(self) -> None:
        moved = self._reader.snapshot_positions()
        for split_id, position in moved.items():
            _require_storable(self.uid, split_id, position)
        if moved:
            self.activity.moved = True
            self._moved.update(moved)
            self._known.update(moved)

    def close(self) -> None:
        """See :meth:`Subtask.close`."""
        self._reader.close()


class AlignedSubtask(Subtask):
    """Takes the batches of its inputs as they come, and each barrier once, when all inputs have come to it."""

    def __init__(self, uid: str, report: Report, gate: InputGate, mode: CheckpointMode) -> None:
        super().__init__(uid, report)
        self._gate = gate
        self._aligner = Aligner(len(gate.channels), mode)

    def _loop(self) -> None:
        while not self._aligner.ended:
            self._receive(*self._gate.get(self._aligner.blocked))
        self._end()

    def poll(self) -> bool:
        """See :meth:`Subtask.poll`."""
        received = self._gate.poll(self._aligner.blocked)
        if received is None:
            return False
        self._receive(*received)
        return True

    def _receive(self, index: int, element: Element) -> None:
        if isinstance(element, Barrier):
            barrier = self._aligner.barrier(index, element)
        elif isinstance(element, EndOfInput):
            barrier = self._aligner.end(index)
        else:
            self._take(element)
            return
        if barrier is not None:
            self._pass(barrier)

    @abstractmethod
    def _take(self, batch: pa.RecordBatch) -> None:
        """Rows of the unit between two barriers."""

    @abstractmethod
    def _pass(self, barrier: Barrier) -> None:
        """All rows before the barrier were taken, and none behind it, as far as the mode promises."""

    def _end(self) -> None:
        """Every input has ended."""


class OperatorSubtask(AlignedSubtask):
    """Runs a chain of operators over its aligned inputs."""

    def __init__(
        self,
        uid: str,
        report: Report,
        gate: InputGate,
        mode: CheckpointMode,
        chain: Sequence[Operator],
        outputs: Sequence[Output],
        snapshots: Channel | None = None,
    ) -> None:
        super().__init__(uid, report, gate, mode)
        self._chain = chain
        self._outputs = outputs
        self._snapshots = snapshots

    def _take(self, batch: pa.RecordBatch) -> None:
        self._emit_through(self._chain, batch)

    def _pass(self, barrier: Barrier) -> None:
        for number, operator in enumerate(self._chain, start=1):
            for batch in operator.flush():
                self._emit_through(self._chain[number:], batch)
        _send(self._outputs, barrier)
        if self._snapshots is not None:
            for operator in self._chain:
                if isinstance(operator, StatefulOperator):
                    self._snapshots.put(CutTaken(self.uid, barrier.checkpoint_id, operator.cut()))

    def _emit_through(self, chain: Sequence[Operator], batch: pa.RecordBatch) -> None:
        for result in _through(chain, batch):
            if result.num_rows:
                _send(self._outputs, result)

    def _end(self) -> None:
        _send(self._outputs, EndOfInput())
        if self._snapshots is not None:
            self._snapshots.put(EndOfInput())

    def close(self) -> None:
        """See :meth:`Subtask.close`."""
        for operator in self._chain:
            operator.close()


def _through(chain: Sequence[Operator], batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
    if not chain:
        return (batch,)
    return (
        result for between in chain[0].process(batch) if between.num_rows for result in _through(chain[1:], between)
    )


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
        self._report(StateSnapshotted(taken.subtask, taken.checkpoint_id, cut.uid, chunks, cut.chunks))

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

    def _take(self, batch: pa.RecordBatch) -> None:
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
