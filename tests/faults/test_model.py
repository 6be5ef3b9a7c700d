"""The model takes the steps that the engine takes: what real runs emit is held against it, thread by thread.

If one of these fails, the engine's protocol and the one that was proved have parted: change the model to what the
engine does now, and explore it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest

from etl.sink import Delivery
from tests.faults import steps
from tests.faults.cases import Undisturbed
from tests.faults.fault import Step
from tests.faults.jobs import KINDS
from tests.model import exploration, world
from tests.model.protocol import COORDINATOR, Protocol
from tests.model.protocol import Step as ModelStep
from tests.model.world import OTHER, SinkModel, World

MODELS: Mapping[str, tuple[SinkModel, ...]] = {
    **world.KINDS,
    # It differs in its rows alone.
    "two-phase-upsert": world.KINDS["two-phase"],
    # What operators remember is recorded as positions are. Each of these sinks is explored in another job.
    "keyed": (SinkModel(Delivery.TWO_PHASE), SinkModel(Delivery.IDEMPOTENT)),
    "keyed-apart": (SinkModel(Delivery.WRITE_AHEAD, OTHER), SinkModel(Delivery.TRANSACTIONAL)),
    "timed-4": (SinkModel(Delivery.TWO_PHASE, OTHER), SinkModel(Delivery.TRANSACTIONAL)),
}

LOCAL = {"source.batch", "source.barrier"}
REMEMBERING = {"state.snapshotting", "state.snapshotted"}
"""Steps of threads that the model does not have: they touch no server. The second are those of operators with state."""

PLACED_BY_SIZE = {"sink.barrier", "sink.written"}
"""A sink sends its rows when it has enough of them: before the barrier or after it."""

COORDINATING_THREAD = "MainThread"
CHECKPOINTS = 3


def protocol_of(kind: str) -> Protocol:
    return Protocol(MODELS[kind], rows=CHECKPOINTS, runs=2)


def emitted(kind: str, seen: Sequence[Step]) -> dict[int, list[str]]:
    """The events of a real run by role."""
    roles = {COORDINATING_THREAD: COORDINATOR} | {
        target.uid: number for number, target in enumerate(KINDS[kind].targets)
    }
    by_role: dict[int, list[str]] = {}
    for step in seen:
        if step.name not in LOCAL | REMEMBERING:
            by_role.setdefault(roles[step.thread], []).append(step.name)
    return {role: in_order(names) for role, names in by_role.items()}


def in_order(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in PLACED_BY_SIZE]


def modelled(taken: Iterable[ModelStep]) -> dict[int, list[str]]:
    by_role: dict[int, list[str]] = {}
    for step in taken:
        by_role.setdefault(step.role, []).extend(in_order(step.events))
    return {role: names for role, names in by_role.items() if names}


def killed_at(protocol: Protocol, event: str, occurrence: int) -> World:
    """The state after a run was killed at an event."""
    seen = 0
    for step in exploration.undisturbed(protocol, protocol.beginning()):
        seen += step.events.count(event)
        if seen == occurrence:
            return step.world._replace(runs=())
    raise AssertionError(f"{event} does not come {occurrence} times")


def recovery(protocol: Protocol, left: World) -> Iterator[ModelStep]:
    for step in exploration.undisturbed(protocol, left):
        yield step
        if "recovery.verified" in step.events:
            return


@pytest.mark.parametrize("kind", KINDS)
def test_clean_run_takes_the_steps_of_the_model(undisturbed: Undisturbed, kind: str) -> None:
    protocol = protocol_of(kind)

    taken = modelled(exploration.undisturbed(protocol, protocol.beginning()))

    assert emitted(kind, undisturbed.result(kind).steps) == taken


RECOVERIES = [
    (kind, event)
    for kind in steps.RECOVERY_STEPS
    for event in ("checkpoint.completed", "sink.prepared")
    # With two sinks, which of them comes second is chance.
    if event == "checkpoint.completed" or len(KINDS[kind].targets) == 1
]


@pytest.mark.parametrize(("kind", "left_at"), RECOVERIES)
def test_recovery_takes_the_steps_of_the_model(undisturbed: Undisturbed, kind: str, left_at: str) -> None:
    protocol = protocol_of(kind)

    taken = modelled(recovery(protocol, killed_at(protocol, left_at, 2)))

    assert emitted(kind, undisturbed.recovery(kind, left_at)) == taken


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_of_the_engine_is_in_the_model(kind: str) -> None:
    protocol = protocol_of(kind)
    taken = [*exploration.undisturbed(protocol, protocol.beginning())]
    for _, event in (one for one in RECOVERIES if one[0] == kind):
        taken += recovery(protocol, killed_at(protocol, event, 2))

    names = {name for step in taken for name in step.events} | LOCAL | (REMEMBERING if KINDS[kind].states else set())

    assert names == steps.STEPS[kind] | steps.RECOVERY_STEPS.get(kind, frozenset())
