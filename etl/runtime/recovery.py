"""Taking over after a former run: settle what it left, fence it out, verify, restore — in this order.

``claim`` (:mod:`etl.store.lease`) has already made this run the owner. Nothing is read before all of this is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from etl.errors import FenceBlockedError, StateError
from etl.sink import Committable, Committer, Emit, Sink, SinkContext
from etl.store.checkpoints import Restored

RECOVERY_ROUNDS_MAX = 120
"""Each round waits up to half a second for the fence: about a minute, then the attempt fails and is tried again."""


@dataclass(frozen=True, slots=True)
class SinkPart:
    """What recovery and committing need of one sink.

    Attributes:
        uid: The sink.
        sink: Its declaration, for fencing.
        context: Its context of this attempt.
        committer: Makes its units visible; None when its rows need no commit of their own.
    """

    uid: str
    sink: Sink
    context: SinkContext
    committer: Committer | None


def recover(
    parts: Sequence[SinkPart], restored: Restored, fence_store: Callable[[], None], emit: Emit
) -> dict[str, int]:
    """Settle, fence and verify every sink; returns the rows made visible on the way, by sink uid.

    Raises:
        StateError: A completed checkpoint has rows that are not in the target, or names a sink the job lacks.
        FencedError: A newer run owns the job.
        FenceBlockedError: A former run's transaction could not be ended in time.
    """
    completed = _by_uid(restored.committables)
    _refuse_unknown(parts, completed, restored.checkpoint_id)
    visible: dict[str, int] = {}
    _settle_until_fenced(parts, completed, visible, fence_store, emit)
    # A former run may have staged something between the settling and the fence; after the fence nothing can come.
    _settle(parts, completed, visible)
    for part in parts:
        if part.committer is not None:
            part.committer.verify(completed.get(part.uid, ()))
    emit("recovery.verified", checkpoint=restored.checkpoint_id)
    return visible


def _settle(parts: Sequence[SinkPart], completed: Mapping[str, Sequence[Committable]], visible: dict[str, int]) -> None:
    for part in parts:
        if part.committer is not None:
            rows = part.committer.recover(completed.get(part.uid, ()))
            visible[part.uid] = visible.get(part.uid, 0) + rows


def _settle_until_fenced(
    parts: Sequence[SinkPart],
    completed: Mapping[str, Sequence[Committable]],
    visible: dict[str, int],
    fence_store: Callable[[], None],
    emit: Emit,
) -> None:
    for round_number in range(RECOVERY_ROUNDS_MAX):
        _settle(parts, completed, visible)
        emit("recovery.settled")
        try:
            fence_store()
            for part in parts:
                part.sink.fence(part.context)
        except FenceBlockedError:
            # A prepared transaction that was not listed yet, or an open one that is being ended, holds the fence.
            if round_number == RECOVERY_ROUNDS_MAX - 1:
                raise
        else:
            emit("recovery.fenced")
            return


def _by_uid(committables: Sequence[Committable]) -> dict[str, list[Committable]]:
    found: dict[str, list[Committable]] = {}
    for one in committables:
        found.setdefault(one.uid, []).append(one)
    return found


def _refuse_unknown(parts: Sequence[SinkPart], completed: Mapping[str, object], checkpoint_id: int) -> None:
    able = {part.uid for part in parts if part.committer is not None}
    unknown = sorted(set(completed) - able)
    if unknown:
        raise StateError(
            f"checkpoint {checkpoint_id} may have uncommitted rows of sink(s) {', '.join(unknown)}, which the job"
            " no longer has in this form; run the former version of the job once to its end, then change it"
        )
