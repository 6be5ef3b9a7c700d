"""What must hold in every state, and between a state and the next."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.protocol import Protocol, Step
from tests.model.world import SinkModel, World, empty_target, written

_RECOVERING = frozenset(
    {"observe", "claim", "end_sessions", "settle", "settle_each", "settle_prune", "settle_record", "fence", "verify"}
)


def violations(protocol: Protocol, before: World, step: Step) -> Iterator[str]:
    """Everything that is wrong with a step, in words."""
    world = step.world
    if world.targets != before.targets or world.head != before.head:
        for number, sink in enumerate(protocol.sinks):
            look = _wrong_latest if sink.early else _wrong_rows
            yield from look(protocol, number, before, world)
    if step.what == "done":
        yield from _untrue_end(protocol, world)
    yield from _orphans(world)


def _wrong_latest(protocol: Protocol, number: int, _before: World, world: World) -> Iterator[str]:
    """Upserted rows are those up to some place, and never less than the last checkpoint; a replay may go back to it."""
    sink, target = protocol.sinks[number], world.targets[number]
    allowed = [_whole(protocol, sink, end) for end in range(world.head.position, protocol.rows + 1)]
    if target not in allowed:
        yield f"sink {number}: the latest rows are {target}, which is none of {allowed}"


def _whole(protocol: Protocol, sink: SinkModel, end: int) -> tuple[int, ...]:
    """The target that has the rows before ``end``, each once."""
    return written(sink, empty_target(sink, protocol.rows), 0, end)


def _wrong_rows(protocol: Protocol, number: int, before: World, world: World) -> Iterator[str]:
    counts, head = world.targets[number], world.head
    if any(new < old for new, old in zip(counts, before.targets[number], strict=True)):
        yield f"sink {number}: a row that was visible has disappeared"
    if any(count > 1 for count in counts):
        yield f"sink {number}: DUPLICATE rows {counts}"
    visible = sum(count > 0 for count in counts)
    if any(counts[visible:]):
        yield f"sink {number}: a HOLE in {counts}"
    # Rows show up to the last checkpoint, or, for a while, to the one before.
    allowed = {head.position, head.before} if protocol.sinks[number].committed else {head.position}
    if visible not in allowed:
        yield f"sink {number}: shows {visible} rows, which is no completed checkpoint ({sorted(allowed)})"


def _untrue_end(protocol: Protocol, world: World) -> Iterator[str]:
    wanted = tuple(_whole(protocol, sink, protocol.rows) for sink in protocol.sinks)
    if world.targets != wanted:
        yield f"a run has ended well, and the targets hold {world.targets}: LOST"


def _orphans(world: World) -> Iterator[str]:
    """A unit of an outdated run that no checkpoint has recorded, while a newer run believes that all are settled."""
    newest = max((run.epoch for run in world.runs if run.step not in _RECOVERING), default=0)
    if not newest:
        return
    for unit in (*world.prepared, *world.log):
        if 0 < unit.epoch < newest and unit not in world.head.units:
            yield f"ORPHAN: {unit} was staged by an outdated run after the newer one had settled"


def left_over(world: World) -> Iterator[str]:
    """What an undisturbed run must not leave behind."""
    if world.prepared:
        yield f"prepared transactions are left: {sorted(world.prepared)}"
    if world.log:
        yield f"the log is not empty: {sorted(world.log)}"
