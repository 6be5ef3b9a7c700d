"""The subtask of a source: reads, sends rows with watermarks and barriers, and knows where it is."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from etl.clock import Clock, SystemClock
from etl.errors import InternalError
from etl.event_time import FOREVER, EventTime, microseconds_since_1970
from etl.runtime.element import Barrier, Element, EndOfInput, Watermark
from etl.runtime.message import (
    CheckpointRequested,
    Command,
    Finish,
    PositionsSnapshotted,
    ReleaseBarrier,
    SourceActivity,
    SourceDry,
    StopReading,
    TakeSnapshot,
)
from etl.runtime.split_assigner import FOLLOW_POLL_S, ReadUpTo, SplitAssigner
from etl.runtime.subtask import Output, Report, Subtask, send
from etl.runtime.watermark import SourceWatermarks, SplitTime
from etl.sink import Emit
from etl.source import Position, Progress, SourceReader


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
        clock: Time.
        event_time: What the source declares of it.
        drain: Whether it closes what is still open in event time when everything is read.
    """

    schema: pa.Schema
    rows_max: int | None
    follow: bool
    clock: Clock = field(default_factory=SystemClock)
    event_time: EventTime | None = None
    drain: bool = False


class SourceSubtask(Subtask):
    """Reads splits, sends batches, and at the coordinator's word snapshots its positions and sends a barrier.

    Args:
        source: Uid of the source.
        report: See :class:`Subtask`.
        assigner: Says what to read; shared by all subtasks of the source.
        reader: Reads it.
        outputs: Where batches go.
        settings: See there.
        emit: Announces steps.
        number: Which of the source's subtasks it is.

    Attributes:
        source: Uid of the source.
        activity: What the last barrier did not cover.
        rows_total: Rows read by this subtask.
    """

    def __init__(
        self,
        source: str,
        report: Report,
        assigner: SplitAssigner,
        reader: SourceReader,
        outputs: Sequence[Output],
        settings: SourceSettings,
        emit: Emit,
        number: int = 0,
    ) -> None:
        super().__init__(source if assigner.subtasks == 1 else f"{source}[{number}]", report)
        self.source = source
        self.activity = SourceActivity()
        self.rows_total = 0
        self._assigner = assigner
        self._number = number
        self._reader = reader
        self._times = self._restored_times(settings.event_time)
        self._moved: dict[str, Position] = {}
        self._read_up_to: dict[str, ReadUpTo] = {}
        self._outputs = outputs
        self._settings = settings
        self._emit = emit
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._rows = 0
        self._rows_at_taking = 0
        self._waited = False
        self._read_at_s = settings.clock.monotonic_s()
        self._reading = True
        self._finished = False

    def _restored_times(self, event_time: EventTime | None) -> SourceWatermarks | None:
        if event_time is None:
            return None
        times = SourceWatermarks(event_time, self._assigner.floor)
        for split_id, stored in self._assigner.restored.items():
            times.restore(split_id, stored)
        return times

    def command(self, command: Command) -> None:
        """Give an order; obeyed at the next batch border. Called by the coordinator."""
        self._commands.put(command)

    def progress(self) -> Progress:
        """How far reading is; asked by the monitor, from another thread."""
        progress = self._reader.progress()
        # What waits for any of the source's subtasks is counted once.
        waiting_bytes = 0 if self._number else self._assigner.waiting_bytes
        return Progress(progress.done_bytes, progress.total_bytes + waiting_bytes)

    def _loop(self) -> None:
        self.begin()
        while not self._finished:
            if not self.poll():
                self._obey(self._commands.get())
        send(self._outputs, EndOfInput())

    def begin(self) -> None:
        """What comes before the first :meth:`poll`."""
        self._take_splits()
        if self._times is not None and (watermark := self._times.begin()) is not None:
            send(self._outputs, watermark)

    def poll(self) -> bool:
        """See :meth:`Subtask.poll`: obey the next order, or read when there is none."""
        if self._obey_pending():
            return True
        if self._reading:
            self._read()
            return True
        return False

    def _take_splits(self) -> bool:
        """Ask for what there is to read; whether there is any."""
        self._collect()
        if self._times is not None:
            self._times.all_read()
            # Before a split is taken that held back the watermarks of the others while it waited.
            if self._assigner.floor() < FOREVER and (watermark := self._times.wake()) is not None:
                send(self._outputs, watermark)
        reached = None if self._times is None else self._times.watermark
        splits = self._assigner.take(self._number, self._read_up_to, reached)
        self._read_up_to = {}
        if splits:
            self._reader.assign(splits)
        if self._times is not None:
            for split in splits:
                self._times.restore(split.id, SplitTime(self._assigner.latest_of(split.id)))
            self._times.assigned([split.id for split in splits])
        self._rows_at_taking, self._waited = self.rows_total, False
        return bool(splits)

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
            raise InternalError(
                f"source {self.source} returned columns {batch.schema}, declared {self._settings.schema}"
            )
        self.activity.moved = True
        self._rows += batch.num_rows
        self.rows_total += batch.num_rows
        self._emit("source.batch", uid=self.uid, rows=batch.num_rows)
        self._read_at_s = self._settings.clock.monotonic_s()
        for element in self._with_watermarks(batch):
            send(self._outputs, element)
        if self._settings.rows_max is not None and self._rows >= self._settings.rows_max:
            self._report(CheckpointRequested(self.uid))
            self._await_barrier()

    def _await_barrier(self) -> None:
        """The unit is full: whatever comes, the barrier comes before the next row."""
        while self._rows and not self._finished:
            self._obey(self._commands.get())

    def _with_watermarks(self, batch: pa.RecordBatch) -> Iterable[Element]:
        if self._times is None:
            return (batch,)
        return self._times.follow(self._reader.split_id, batch, microseconds_since_1970(self._settings.clock.now()))

    def _run_dry(self) -> None:
        """Nothing is left of the splits that were taken."""
        may_ask = not self._settings.follow or self._waited or self.rows_total > self._rows_at_taking
        if may_ask and self._take_splits():
            return
        if self._times is not None:
            self._say_whether_idle(self._times)
        if self._settings.follow:
            # Also when a split was found: what is new in it may be the beginning of a record that is still written.
            self._waited = True
            self._wait_for_command()
            return
        if self._settings.drain:
            self.drain()
        self._reading = False
        self._report(SourceDry(self.uid))

    def _say_whether_idle(self, times: SourceWatermarks) -> None:
        others_read = self._assigner.others_read(self._number)
        if not others_read and (reached := times.catch_up(self._assigner.watermark)) is not None:
            self._send_watermark(reached)
        watermark = times.ran_dry(self._age, others_read=others_read)
        if watermark is None:
            return
        if others_read and not self._assigner.has_given:
            send(self._outputs, watermark)
        else:
            self._send_watermark(watermark)

    def drain(self) -> None:
        """Close what is still open in event time; called in the subtask's thread."""
        self._send_watermark(Watermark(FOREVER))

    def advance(self, time: int) -> None:
        """Event time has come to a moment although no row says so; for who drives subtasks without threads."""
        if self._times is not None:
            self._send_watermark(self._times.advance_to(time))

    def _send_watermark(self, watermark: Watermark) -> None:
        # What it closes belongs into a checkpoint, also where no row was read.
        self.activity.moved = True
        send(self._outputs, watermark)

    def _age(self) -> int:
        """For how long there has been nothing to read, in microseconds.

        A run that ends when everything is read cannot wait and see: there the newest row tells by its own time.
        """
        if self._settings.follow:
            return int((self._settings.clock.monotonic_s() - self._read_at_s) * 1_000_000)
        latest = self._assigner.newest
        return FOREVER if latest is None else microseconds_since_1970(self._settings.clock.now()) - latest

    def _wait_for_command(self) -> None:
        try:
            self._obey(self._commands.get(timeout=FOLLOW_POLL_S))
        except queue.Empty:
            return

    def _snapshot(self, order: TakeSnapshot) -> None:
        self._collect()
        positions, self._moved = self._moved, {}
        rows, self._rows = self._rows, 0
        self._assigner.passed_barrier(self._number)
        self.activity.moved = False
        self._report(PositionsSnapshotted(self.uid, order.checkpoint_id, positions, rows))
        if order.hold and not self._await_release(order.checkpoint_id):
            return
        self._emit("source.barrier", uid=self.uid, checkpoint=order.checkpoint_id)
        send(self._outputs, Barrier(order.checkpoint_id))

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
            _require_storable(self.source, split_id, position)
            time = SplitTime() if self._times is None else self._times.stored(split_id)
            self._moved[split_id] = position if self._times is None else time.added_to(position)
            self._read_up_to[split_id] = ReadUpTo(position, time.latest)
        if moved:
            self.activity.moved = True

    def close(self) -> None:
        """See :meth:`Subtask.close`."""
        self._reader.close()
