"""The checkpoint coordinator: triggers, collects acknowledgements, completes in one store transaction, commits.

::

    idle ──trigger──► snapshotting ──all have acknowledged──► completing ──► committing ──► idle
                          │                                      │              │
                          └──────────────── any error: the attempt fails ───────┘

Sources acknowledge with their positions, sinks with what they staged, stateful operators with what they remember.

In at-most-once mode the order differs: the positions are recorded as soon as the sources have acknowledged, then the
barrier flows, and the sinks' units are committed when they arrive, unrecorded: a crash in between loses them.

One checkpoint is under way at a time. Rows of the next one flow meanwhile.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from etl.clock import Clock
from etl.errors import InternalError, StopTimeoutError, TransientError
from etl.policy import CheckpointPolicy
from etl.runtime.message import (
    CheckpointRequested,
    Command,
    Failed,
    Finish,
    Message,
    PositionsSnapshotted,
    ReleaseBarrier,
    SavepointRequested,
    SourceActivity,
    SourceDry,
    StateSnapshotted,
    StopReading,
    StopRequested,
    SubtaskEnded,
    TakeSnapshot,
    TimersFired,
    UnitStaged,
)
from etl.sink import CheckpointMode, Committable, Committer, Emit
from etl.source import Position
from etl.state import StateChunk, StateSummary
from etl.store.checkpoints import CompletedCheckpoint
from etl.store.tables import Trigger

STOP_TIMEOUT_S = 8.0
"""How long a final checkpoint may take after a request to stop; then the run ends without it."""

WAIT_MAX_S = 60.0
"""The coordinator looks up at least so often."""


@dataclass(frozen=True, slots=True)
class SourceHandle:
    """What the coordinator knows of a source subtask.

    Attributes:
        uid: Of the subtask.
        source: Of the source.
        command: Gives it an order.
        activity: What it has done.
    """

    uid: str
    source: str
    command: Callable[[Command], None]
    activity: SourceActivity


@dataclass(slots=True)
class PendingCheckpoint:
    """A checkpoint on its way."""

    checkpoint_id: int
    trigger: Trigger
    ending: bool
    started_s: float
    sources_awaited: set[str]
    sinks_awaited: set[str]
    states_awaited: set[str]
    positions: dict[str, dict[str, Position]] = field(default_factory=dict)
    committables: list[Committable] = field(default_factory=list)
    state: list[StateChunk] = field(default_factory=list)
    states: dict[str, StateSummary] = field(default_factory=dict)
    rows_read: int = 0
    rows_written: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outlets:
    """What the coordinator does to the world, injected by the attempt.

    Attributes:
        complete: One store transaction that records the checkpoint, with everything transactional sinks wrote.
        commit_unrecorded: Commits what transactional sinks wrote, apart from any record (at-most-once).
        committed: Called with the checkpoint's id and rows by sink uid once all of it is visible.
        emit: Announces steps.
    """

    complete: Callable[[CompletedCheckpoint], None]
    commit_unrecorded: Callable[[int], None]
    committed: Callable[[int, Mapping[str, int]], None]
    emit: Emit


class Coordinator:
    """Drives the checkpoints of one attempt, in one thread, from messages alone."""

    def __init__(
        self,
        *,
        mode: CheckpointMode,
        policy: CheckpointPolicy,
        checkpoint_id: int,
        sources: Sequence[SourceHandle],
        committers: Mapping[str, Committer | None],
        subtasks: Sequence[str],
        stateful: Sequence[str],
        inbox: queue.SimpleQueue[Message],
        outlets: Outlets,
        clock: Clock,
    ) -> None:
        self._mode = mode
        self._policy = policy
        self._last_id = checkpoint_id
        self._sources = {source.uid: source for source in sources}
        self._committers = committers
        self._running = set(subtasks)
        self._stateful = frozenset(stateful)
        self._inbox = inbox
        self._outlets = outlets
        self._clock = clock
        self._pending: PendingCheckpoint | None = None
        self._due_s = clock.monotonic_s() + policy.interval_s
        self._dry: set[str] = set()
        self._asked: set[str] = set()
        self._timers_fired = False
        self._savepoint_due = False
        self._stopping = False
        self._stop_by_s = math.inf
        self._finish_by_s: float | None = None

    def run(self) -> None:
        """Until every subtask has ended after a final checkpoint.

        Raises:
            BaseException: Whatever failed in a subtask, in completing or in committing.
        """
        while self._running:
            self._handle(self._next_message())
            self._decide()

    @property
    def _at_most_once(self) -> bool:
        return self._mode is CheckpointMode.AT_MOST_ONCE

    def _next_message(self) -> Message | None:
        deadline_s = self._due_s if self._finish_by_s is None else self._finish_by_s
        if self._pending is not None:
            deadline_s = self._pending.started_s + self._policy.timeout_s
        deadline_s = min(deadline_s, self._stop_by_s)
        try:
            return self._inbox.get(timeout=max(0.0, min(deadline_s - self._clock.monotonic_s(), WAIT_MAX_S)))
        except queue.Empty:
            return None

    def _handle(self, message: Message | None) -> None:
        match message:
            case None:
                self._check_timeout()
            case Failed():
                raise message.error
            case PositionsSnapshotted():
                self._snapshotted(message)
            case UnitStaged():
                self._staged(message)
            case StateSnapshotted():
                self._state_snapshotted(message)
            case CheckpointRequested():
                self._asked.add(message.uid)
            case TimersFired():
                self._timers_fired = True
            case _:
                self._note_end(message)

    def _note_end(self, message: SourceDry | StopRequested | SavepointRequested | SubtaskEnded) -> None:
        match message:
            case SourceDry():
                self._dry.add(message.uid)
            case StopRequested() | SavepointRequested():
                self._requested(message)
            case SubtaskEnded():
                self._running.discard(message.uid)

    def _check_timeout(self) -> None:
        if self._clock.monotonic_s() >= self._stop_by_s:
            raise StopTimeoutError(
                f"stopped without a final checkpoint: it took longer than {STOP_TIMEOUT_S:g} s;"
                f" the next run reads again what came after checkpoint {self._last_id}"
            )
        if self._finish_by_s is not None and self._clock.monotonic_s() >= self._finish_by_s:
            raise TransientError(
                f"subtask(s) {', '.join(sorted(self._running))} did not end within {self._policy.timeout_s:g} s"
                " after the last checkpoint"
            )
        pending = self._pending
        if pending is None or self._clock.monotonic_s() < pending.started_s + self._policy.timeout_s:
            return
        awaited = ", ".join(sorted(pending.sources_awaited | pending.sinks_awaited | pending.states_awaited))
        raise TransientError(
            f"checkpoint {pending.checkpoint_id} did not complete within {self._policy.timeout_s:g} s;"
            f" waiting for {awaited}"
        )

    def _requested(self, message: StopRequested | SavepointRequested) -> None:
        if isinstance(message, StopRequested):
            self._stop_by_s = min(self._stop_by_s, self._clock.monotonic_s() + STOP_TIMEOUT_S)
        # One that is under way grants every request, but for those that ask for the end when it is not the last.
        elif self._pending is None or self._pending.trigger is not Trigger.SAVEPOINT:
            self._savepoint_due = True
        if isinstance(message, StopRequested) or message.stop:
            self.stop_reading()

    def stop_reading(self) -> None:
        """Have the sources read nothing more; a last checkpoint of what was read follows."""
        if self._stopping:
            return
        self._stopping = True
        for source in self._sources.values():
            if source.uid not in self._dry:
                source.command(StopReading())

    # --- triggering -------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        if self._pending is not None or self._finish_by_s is not None:
            return
        moved = self._timers_fired or any(source.activity.moved for source in self._sources.values())
        if self._dry == set(self._sources):
            if self._savepoint_due:
                self._trigger(Trigger.SAVEPOINT)
            elif moved:
                self._trigger(Trigger.STOP if self._stopping else Trigger.END_OF_INPUT)
            else:
                self._finish()
        elif self._savepoint_due and not self._stopping:
            self._trigger(Trigger.SAVEPOINT)
        elif self._asked:
            self._trigger(Trigger.ROWS)
        elif self._clock.monotonic_s() >= self._due_s:
            if moved:
                self._trigger(Trigger.INTERVAL)
            else:
                self._due_s = self._clock.monotonic_s() + self._policy.interval_s

    def _trigger(self, trigger: Trigger) -> None:
        checkpoint_id = self._last_id + 1
        self._timers_fired = False
        if trigger is Trigger.SAVEPOINT:
            self._savepoint_due = False
        self._pending = PendingCheckpoint(
            checkpoint_id,
            trigger,
            self._dry == set(self._sources),
            self._clock.monotonic_s(),
            set(self._sources),
            set(self._committers),
            set(self._stateful),
        )
        self._outlets.emit("checkpoint.triggered", checkpoint=checkpoint_id, trigger=str(trigger))
        for source in self._sources.values():
            source.command(TakeSnapshot(checkpoint_id, hold=self._at_most_once))

    def _finish(self) -> None:
        self._finish_by_s = self._clock.monotonic_s() + self._policy.timeout_s
        for source in self._sources.values():
            source.command(Finish())

    # --- acknowledgements -------------------------------------------------------------------------------------------

    def _expect(self, checkpoint_id: int, uid: str) -> PendingCheckpoint:
        pending = self._pending
        if pending is None or pending.checkpoint_id != checkpoint_id:
            raise InternalError(f"{uid} acknowledged checkpoint {checkpoint_id}, which is not under way")
        return pending

    def _snapshotted(self, message: PositionsSnapshotted) -> None:
        pending = self._expect(message.checkpoint_id, message.uid)
        pending.sources_awaited.discard(message.uid)
        self._asked.discard(message.uid)
        positions = pending.positions.setdefault(self._sources[message.uid].source, {})
        if twice := positions.keys() & message.positions.keys():
            raise InternalError(
                f"source {message.uid} read {', '.join(sorted(twice))}, and so did another subtask of it"
            )
        positions.update(message.positions)
        pending.rows_read += message.rows
        if self._at_most_once and not pending.sources_awaited:
            self._record(pending)
            for source in self._sources.values():
                source.command(ReleaseBarrier(pending.checkpoint_id))

    def _staged(self, message: UnitStaged) -> None:
        pending = self._expect(message.checkpoint_id, message.uid)
        pending.sinks_awaited.discard(message.uid)
        pending.rows_written[message.uid] = message.rows
        if message.committable is not None:
            self._require_committer(message.uid, message.committable)
            pending.committables.append(message.committable)
        self._complete_if_acknowledged(pending)

    def _state_snapshotted(self, message: StateSnapshotted) -> None:
        pending = self._expect(message.checkpoint_id, message.subtask)
        pending.states_awaited.discard(message.subtask)
        pending.state.extend(message.chunks)
        before = pending.states.get(message.uid)
        pending.states[message.uid] = message.summary if before is None else before.plus(message.summary)
        self._complete_if_acknowledged(pending)

    def _complete_if_acknowledged(self, pending: PendingCheckpoint) -> None:
        if not pending.sinks_awaited and not pending.sources_awaited and not pending.states_awaited:
            self._complete(pending)

    def _require_committer(self, uid: str, committable: Committable) -> None:
        """Before the unit is recorded: nobody could commit it afterwards."""
        if committable.uid != uid:
            raise InternalError(f"sink {uid} staged a unit in the name of {committable.uid}")
        if self._committers[uid] is None:
            raise InternalError(f"sink {uid} staged a unit but has no committer; derive it from SupportsCommitter")

    # --- completing and committing ----------------------------------------------------------------------------------

    def _complete(self, pending: PendingCheckpoint) -> None:
        if self._at_most_once:
            self._outlets.commit_unrecorded(pending.checkpoint_id)
        else:
            self._record(pending)
        self._make_visible(pending)
        self._last_id = pending.checkpoint_id
        self._pending = None
        # From trigger to trigger: a checkpoint that took longer than the interval is followed by the next at once.
        self._due_s = pending.started_s + self._policy.interval_s

    def _record(self, pending: PendingCheckpoint) -> None:
        completed = CompletedCheckpoint(
            checkpoint_id=pending.checkpoint_id,
            trigger=pending.trigger,
            positions=pending.positions,
            committables=() if self._at_most_once else tuple(pending.committables),
            rows_read=pending.rows_read,
            rows_written=dict(pending.rows_written),
            duration_ms=int((self._clock.monotonic_s() - pending.started_s) * 1000),
            state=pending.state,
            summaries=pending.states,
            ending=pending.ending,
        )
        self._outlets.complete(completed)

    def _make_visible(self, pending: PendingCheckpoint) -> None:
        self._outlets.emit("commit.begin", checkpoint=pending.checkpoint_id)
        # In the order of the declaration, as in recovery, and not in that of the acknowledgements, which is chance.
        for uid, committer in self._committers.items():
            for committable in pending.committables:
                if committable.uid == uid and committer is not None:
                    committer.commit(committable)
        self._outlets.emit("commit.end", checkpoint=pending.checkpoint_id)
        self._outlets.committed(pending.checkpoint_id, pending.rows_written)
