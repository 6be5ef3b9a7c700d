"""The coordinator as a pure machine: messages in, commands and effects out."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from threading import Event

import pytest

from etl.errors import InternalError, StopTimeoutError, TransientError
from etl.policy import CheckpointPolicy
from etl.runtime.coordinator import STOP_TIMEOUT_S, Coordinator, Outlets, SourceHandle
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
    UnitStaged,
)
from etl.sink import CheckpointMode, Committable, Committer
from etl.state import StateChunk, StateSummary
from etl.store.checkpoints import CompletedCheckpoint
from etl.store.tables import Trigger


class SteppedClock:
    """Monotonic time that moves by ``step_s`` at every look, so that waiting loops come to their deadline."""

    def __init__(self, step_s: float) -> None:
        self._now_s, self._step_s = 0.0, step_s

    def monotonic_s(self) -> float:
        self._now_s += self._step_s
        return self._now_s

    def now(self) -> datetime:
        return datetime.now(UTC)

    def wait(self, event: Event, timeout_s: float) -> bool:
        return event.is_set()

    def jitter(self) -> float:
        return 1.0


class Inbox:
    """An inbox that plays a script: messages in turn, None for a wait that timed out."""

    def __init__(self, script: Sequence[Message | None]) -> None:
        self._script = list(script)

    def get(self, timeout: float) -> Message:
        message = self._script.pop(0)
        if message is None:
            raise queue.Empty
        return message


class RecordingCommitter(Committer):
    def __init__(self, log: list[object]) -> None:
        self._log = log

    def recover(self, completed: Sequence[Committable]) -> int:
        raise AssertionError("recovery is not the coordinator's")

    def commit(self, committable: Committable) -> None:
        self._log.append(("commit", committable.uid, committable.checkpoint_id))

    def close(self) -> None:
        return None


class World:
    """A coordinator with one source, one two-phase sink and one sink without a committer."""

    def __init__(
        self,
        script: Sequence[Message | None],
        *,
        mode: CheckpointMode = CheckpointMode.EXACTLY_ONCE,
        policy: CheckpointPolicy = CheckpointPolicy(interval_s=1e6),  # noqa: B008 - immutable
        moved: bool = True,
        stateful: Sequence[str] = (),
        step_s: float = 0.0,
    ) -> None:
        self.log: list[object] = []
        self.completed: list[CompletedCheckpoint] = []
        self.activity = SourceActivity(moved=moved)
        self._coordinator = Coordinator(
            mode=mode,
            policy=policy,
            checkpoint_id=4,
            sources=[SourceHandle("src", "src", self._command, self.activity)],
            committers={"two": RecordingCommitter(self.log), "plain": None},
            subtasks=["src", "two", "plain"],
            stateful=stateful,
            inbox=Inbox(script),  # type: ignore[arg-type]
            outlets=Outlets(
                complete=self._complete,
                commit_unrecorded=lambda number: self.log.append(("commit unrecorded", number)),
                committed=self._committed,
                emit=lambda name, **fields: None,
            ),
            clock=SteppedClock(step_s),
        )

    def run(self) -> list[object]:
        self._coordinator.run()
        return self.log

    def _command(self, command: Command) -> None:
        if isinstance(command, TakeSnapshot):
            self.activity.moved = False
        self.log.append(command)

    def _complete(self, completed: CompletedCheckpoint) -> None:
        self.completed.append(completed)
        self.log.append(("complete", completed.checkpoint_id, completed.trigger, len(completed.committables)))

    def _committed(self, checkpoint_id: int, rows_written: Mapping[str, int]) -> None:
        self.log.append(("visible", checkpoint_id, dict(rows_written)))


def snapshotted(number: int) -> Message:
    return PositionsSnapshotted("src", number, {"s": {"next": 3}}, 3)


def staged(uid: str, number: int) -> Message:
    handle = Committable(uid, 0, number, 1, 2, {}) if uid == "two" else None
    return UnitStaged(uid, number, handle, 2)


ENDED: list[Message | None] = [SubtaskEnded("src"), SubtaskEnded("two"), SubtaskEnded("plain")]


def test_coordinator_completes_then_commits_then_finishes_at_the_end_of_input() -> None:
    log = World([SourceDry("src"), snapshotted(5), staged("two", 5), staged("plain", 5), *ENDED]).run()
    assert log == [
        TakeSnapshot(5),
        ("complete", 5, Trigger.END_OF_INPUT, 1),
        ("commit", "two", 5),
        ("visible", 5, {"two": 2, "plain": 2}),
        Finish(),
    ]


def test_coordinator_takes_no_checkpoint_when_nothing_has_moved() -> None:
    assert World([SourceDry("src"), *ENDED], moved=False).run() == [Finish()]


def test_coordinator_waits_for_every_acknowledgement() -> None:
    world = World([SourceDry("src"), staged("plain", 5), staged("two", 5), Failed(KeyError("enough"))])
    with pytest.raises(KeyError):
        world.run()
    assert world.log == [TakeSnapshot(5)]


def remembered(subtask: str, number: int, *chunks: int) -> Message:
    made = [StateChunk("totals", group, 0, 1, b"", b"") for group in chunks]
    return StateSnapshotted(subtask, number, "totals", made, StateSummary(len(made) + 2, 10 * len(made), 1))


def test_coordinator_waits_for_the_state_of_every_subtask() -> None:
    early = [SourceDry("src"), snapshotted(5), staged("two", 5), staged("plain", 5), remembered("totals[0]", 5, 3)]
    waiting = World([*early, Failed(KeyError("enough"))], stateful=["totals[0]", "totals[1]"])
    with pytest.raises(KeyError):
        waiting.run()
    assert waiting.log == [TakeSnapshot(5)]

    done = World([*early, remembered("totals[1]", 5, 70, 71), *ENDED], stateful=["totals[0]", "totals[1]"])
    done.run()

    assert [chunk.key_group for chunk in done.completed[0].state] == [3, 70, 71]
    assert done.completed[0].summaries == {"totals": StateSummary(chunks=7, watermark=20, late_rows=2)}


def test_coordinator_triggers_when_a_source_has_filled_its_unit() -> None:
    script = [
        CheckpointRequested("src"),
        snapshotted(5),
        staged("two", 5),
        staged("plain", 5),
        SourceDry("src"),
        *ENDED,
    ]
    assert World(script).run()[:2] == [TakeSnapshot(5), ("complete", 5, Trigger.ROWS, 1)]


def test_coordinator_triggers_by_time() -> None:
    script = [None, snapshotted(5), staged("two", 5), staged("plain", 5), SourceDry("src"), *ENDED]
    log = World(script, policy=CheckpointPolicy(interval_s=3), step_s=1.0).run()
    assert log[1] == ("complete", 5, Trigger.INTERVAL, 1)


def test_coordinator_triggers_at_once_after_a_checkpoint_that_took_longer_than_the_interval() -> None:
    class BusyWorld(World):
        def _command(self, command: Command) -> None:
            self.log.append(command)

    done = [snapshotted(5), staged("two", 5), staged("plain", 5), Failed(KeyError("enough"))]
    world = BusyWorld([None, *done], policy=CheckpointPolicy(interval_s=3), step_s=1.0)
    with pytest.raises(KeyError):
        world.run()
    assert [entry for entry in world.log if isinstance(entry, TakeSnapshot)] == [TakeSnapshot(5), TakeSnapshot(6)]


def test_coordinator_has_one_checkpoint_under_way_at_a_time() -> None:
    script = [CheckpointRequested("src"), CheckpointRequested("src"), None, snapshotted(5), Failed(KeyError("enough"))]
    world = World(script)
    with pytest.raises(KeyError):
        world.run()
    assert world.log == [TakeSnapshot(5)]


def test_coordinator_stops_reading_and_takes_a_final_checkpoint_when_asked_to_stop() -> None:
    script = [StopRequested(), SourceDry("src"), snapshotted(5), staged("two", 5), staged("plain", 5), *ENDED]
    log = World(script).run()
    assert log[:3] == [StopReading(), TakeSnapshot(5), ("complete", 5, Trigger.STOP, 1)]


def test_coordinator_gives_a_stop_up_when_the_final_checkpoint_takes_too_long() -> None:
    with pytest.raises(StopTimeoutError):
        World([StopRequested(), SourceDry("src"), None, None], step_s=STOP_TIMEOUT_S).run()


def acknowledged(number: int) -> list[Message | None]:
    return [snapshotted(number), staged("two", number), staged("plain", number)]


def test_coordinator_takes_a_checkpoint_for_a_savepoint_even_when_nothing_has_moved() -> None:
    asked = SavepointRequested(stop=False)
    world = World([asked, asked, *acknowledged(5), SourceDry("src"), *ENDED], moved=False)
    log = world.run()
    assert log[:2] == [TakeSnapshot(5), ("complete", 5, Trigger.SAVEPOINT, 1)]
    assert log[-1] == Finish()
    assert [(one.checkpoint_id, one.ending) for one in world.completed] == [(5, False)]


def test_coordinator_takes_the_savepoint_after_the_checkpoint_that_is_under_way() -> None:
    asked: list[Message | None] = [CheckpointRequested("src"), SavepointRequested(stop=False)]
    world = World([*asked, *acknowledged(5), *acknowledged(6), SourceDry("src"), *ENDED])
    world.run()
    assert [one.trigger for one in world.completed] == [Trigger.ROWS, Trigger.SAVEPOINT]


def test_coordinator_ends_with_the_savepoint_when_asked_to_and_is_in_no_hurry() -> None:
    asked = SavepointRequested(stop=True)
    script: list[Message | None] = [asked, SourceDry("src"), asked, None, *acknowledged(5), *ENDED]
    world = World(script, moved=False, step_s=STOP_TIMEOUT_S)
    log = world.run()
    assert log[:3] == [StopReading(), TakeSnapshot(5), ("complete", 5, Trigger.SAVEPOINT, 1)]
    assert log[-1] == Finish()
    assert [one.ending for one in world.completed] == [True]


def test_coordinator_is_in_a_hurry_when_a_signal_follows_a_savepoint_with_stop() -> None:
    script: list[Message | None] = [SavepointRequested(stop=True), StopRequested(), SourceDry("src"), None, None]
    with pytest.raises(StopTimeoutError):
        World(script, step_s=STOP_TIMEOUT_S).run()


def test_coordinator_fails_the_attempt_when_a_checkpoint_times_out() -> None:
    policy = CheckpointPolicy(interval_s=1e6, timeout_s=5)
    with pytest.raises(TransientError, match="checkpoint 5 did not complete within 5 s; waiting for plain, src, two"):
        World([SourceDry("src"), None, None], policy=policy, step_s=3.0).run()


def test_coordinator_raises_what_a_subtask_reports() -> None:
    with pytest.raises(ZeroDivisionError):
        World([Failed(ZeroDivisionError())]).run()


def test_coordinator_refuses_an_acknowledgement_of_another_checkpoint() -> None:
    with pytest.raises(InternalError):
        World([SourceDry("src"), snapshotted(4)]).run()


def test_coordinator_records_the_position_before_the_barrier_flows_in_at_most_once_mode() -> None:
    script = [SourceDry("src"), snapshotted(5), staged("two", 5), staged("plain", 5), *ENDED]
    assert World(script, mode=CheckpointMode.AT_MOST_ONCE).run() == [
        TakeSnapshot(5, hold=True),
        ("complete", 5, Trigger.END_OF_INPUT, 0),
        ReleaseBarrier(5),
        ("commit unrecorded", 5),
        ("commit", "two", 5),
        ("visible", 5, {"two": 2, "plain": 2}),
        Finish(),
    ]


def test_coordinator_forgets_a_request_that_a_barrier_has_met() -> None:
    script = [None, CheckpointRequested("src"), snapshotted(5), staged("two", 5), staged("plain", 5), SourceDry("src")]
    log = World([*script, *ENDED], policy=CheckpointPolicy(interval_s=3), step_s=1.0).run()
    assert [entry for entry in log if isinstance(entry, TakeSnapshot)] == [TakeSnapshot(5)]
