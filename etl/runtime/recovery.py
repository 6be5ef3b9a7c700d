"""Taking over after a former run: settle what it left, fence it out, verify, restore — in this order.

``claim`` (:mod:`etl.store.lease`) has already made this run the owner. Nothing is read before all of this is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from etl.errors import FenceBlockedError, StateError
from etl.sink import Committable, Committer, Emit, Sink, SinkContext
from etl.store.checkpoints import Restored

DELIVERY = "delivery"
"""Key in the recorded payload of a unit: how the sink that staged it delivers."""

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
        StateError: A completed checkpoint has rows that are not in the target, or may have such rows of a sink that
            the job no longer has in this form.
        FencedError: A newer run owns the job.
        FenceBlockedError: A former run's transaction could not be ended in time.
    """
    completed = _by_uid(_own_units(parts, restored))
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


def recorded(committable: Committable, sink: Sink) -> Committable:
    """The handle as it is stored: with the sink's way of delivery, so that a changed sink does not take it for its own.

    A prepared transaction, for instance, is nothing that a write-ahead sink could find or finish.
    """
    return replace(committable, payload={**committable.payload, DELIVERY: str(sink.delivery)})


def _own_units(parts: Sequence[SinkPart], restored: Restored) -> list[Committable]:
    """The recorded units that the job's sinks can settle.

    Those of a sink that is gone, or delivers otherwise now, are left out when a run has ended well since: its end says
    that they are visible.
    """
    able = {part.uid: str(part.sink.delivery) for part in parts if part.committer is not None}
    own = [one for one in restored.committables if one.uid in able and one.payload.get(DELIVERY) == able[one.uid]]
    changed = sorted({one.uid for one in restored.committables} - {one.uid for one in own})
    if changed and not restored.settled:
        raise StateError(
            f"checkpoint {restored.checkpoint_id} may have uncommitted rows of sink(s) {', '.join(changed)}, which the"
            " job no longer has in this form; run the former version of the job once to its end, then change it"
        )
    return own
