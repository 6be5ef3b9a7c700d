"""The steps of a run, as the engine takes them.

Each generator yields what can happen next in one thread of one run. What the engine does in one transaction is one
step, and so is everything that no other run could tell apart from it; the events of a step are those that the engine
emits in it, by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from etl.sink import Delivery
from tests.model.mutants import Mutant
from tests.model.world import STORE, Head, Run, SinkModel, Unit, World, Writing, beginning, written

COORDINATOR: Final = -1
"""Role of the thread that recovers, completes and commits; the others are the sinks' threads, by number."""

_FRESH: Final = 0
_BEFORE_CLAIM: Final = {"observe", "claim"}
_READING: Final = {"read", "stage", "open", "complete", "commit", "prune", "record", "unmark"}


class Step(NamedTuple):
    """Something that can happen.

    ``run`` is the number of the run it happens in (or to), ``what`` names it for a person, ``events`` are emitted by
    the thread ``role``.
    """

    run: int
    what: str
    role: int
    events: tuple[str, ...]
    world: World


class LostError(Exception):
    """A run has stopped because rows of a completed checkpoint are neither visible nor prepared nor logged."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """The protocol of one job.

    Attributes:
        sinks: The job's sinks.
        rows: How many rows there are to read.
        spans: How many rows a checkpoint may have.
        runs: How many runs may be started.
        mutants: What is wrong with it.
        meddling: Whether somebody may roll one prepared transaction of a completed checkpoint back by hand.
    """

    sinks: tuple[SinkModel, ...]
    rows: int = 3
    spans: tuple[int, ...] = (1,)
    runs: int = 3
    mutants: frozenset[Mutant] = frozenset()
    meddling: bool = False
    _steps: Mapping[str, Callable[[World, Run], Iterator[Step]]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        known = {
            "observe": self._observe,
            "claim": self._claim,
            "end_sessions": self._end_sessions,
            "settle": self._settle,
            "settle_each": self._settle_each,
            "settle_prune": self._settle_prune,
            "settle_record": self._settle_record,
            "fence": self._fence,
            "verify": self._verify,
            "read": self._read,
            "stage": self._stage,
            "open": self._open,
            "complete": self._complete,
            "commit": self._commit,
            "prune": self._prune,
            "record": self._record,
        }
        object.__setattr__(self, "_steps", known)

    def has(self, mutant: Mutant) -> bool:
        """Whether this is wrong with it."""
        return mutant in self.mutants

    def beginning(self) -> World:
        """The state before the first run."""
        return beginning(self.sinks, self.rows)

    def steps(self, world: World) -> Iterator[Step]:
        """Everything that can happen next.

        Raises:
            LostError: What happens next is that a run raises the alarm.
        """
        if world.started < self.runs:
            yield self.start(world)
        for run in world.runs:
            yield _ended(world, run, "killed")
            try:
                yield from self.steps_of(world, run)
            except LostError as alarm:
                # Where somebody has meddled, the alarm is the right answer.
                if not world.meddled:
                    raise
                yield _ended(world, run, f"ALARM: {alarm}")
        if self.meddling and not world.meddled:
            for unit in world.prepared & frozenset(world.head.units):
                yield Step(
                    0,
                    "rolled back by hand",
                    COORDINATOR,
                    (),
                    world._replace(prepared=world.prepared - {unit}, meddled=1),
                )

    def start(self, world: World) -> Step:
        """A further run is started."""
        number = world.started + 1
        first = "observe" if self.has(Mutant.STALE_READ) else "claim"
        run = Run(number, first, 0, 0, 0, 0, (), 0, (), (Writing.IDLE,) * len(self.sinks))
        return Step(number, "started", COORDINATOR, (), world._replace(runs=(*world.runs, run), started=number))

    def steps_of(self, world: World, run: Run) -> Iterator[Step]:
        """What can happen next in a run, in any of its threads."""
        yield from self._steps[run.step](world, run)
        if run.step in _READING:
            for number in range(len(self.sinks)):
                yield from self._write(world, run, number)

    # --- claiming and recovering ------------------------------------------------------------------------------------

    def _observe(self, world: World, run: Run) -> Iterator[Step]:
        yield _went_on(world, run, "read", (), _restored(run._replace(step="claim"), world.head))

    def _claim(self, world: World, run: Run) -> Iterator[Step]:
        epoch = max(world.head.epoch, 1) if self.has(Mutant.NO_EPOCH) else world.head.epoch + 1
        claimed = run._replace(step="end_sessions", epoch=epoch)
        if not self.has(Mutant.STALE_READ):
            claimed = _restored(claimed, world.head)
        head = world.head._replace(epoch=epoch)
        yield _went_on(world._replace(head=head), run, "claimed", ("lease.claiming", "lease.claimed"), claimed)

    def _end_sessions(self, world: World, run: Run) -> Iterator[Step]:
        events = ("recovery.begin", "recovery.sessions_ended")
        settling = run._replace(step="settle")
        yield _went_on(world, run, "could not end sessions", events, settling)
        left = _without_outdated(world, run)
        if left is not world:
            yield _went_on(left, run, "ended sessions", events, settling)

    def _settle(self, world: World, run: Run) -> Iterator[Step]:
        """List what former runs have left of one sink."""
        if run.part == len(self.sinks):
            yield self._settled(world, run)
            return
        sink = self.sinks[run.part]
        if not sink.committed:
            yield from self._settle(world, run._replace(part=run.part + 1))
            return
        recorded = tuple(unit for unit in run.restored if unit.sink == run.part)
        if sink.delivery is Delivery.TWO_PHASE:
            left = sorted(unit for unit in world.prepared if self._may_touch(run, unit) and not _among(unit, recorded))
            todo = (*recorded, *left)
        else:
            kept = frozenset(unit for unit in world.log if not self._may_touch(run, unit) or _among(unit, recorded))
            world = world._replace(log=kept)
            todo = tuple(sorted(unit for unit in kept if _among(unit, recorded)))
            if todo and world.fences[sink.database] > run.epoch and not self.has(Mutant.NO_FENCE):
                yield _ended(world, run, "found itself fenced")
                return
            if todo and not self._is_ready(world, run, sink):
                todo = ()
            elif todo:
                world = _fenced_at(world, sink.database, run.epoch)
        yield _went_on(world, run, "listed", ("recover.listed",), self._next_to_settle(run, todo))

    def _may_touch(self, run: Run, unit: Unit) -> bool:
        return unit.sink == run.part and (unit.epoch < run.epoch or self.has(Mutant.TOUCH_NEWER))

    def _is_ready(self, world: World, run: Run, sink: SinkModel) -> bool:
        """Whether a write-ahead sink gets its target fenced, without which it must not deliver."""
        fenced = world.fences[sink.database] == run.epoch or self.has(Mutant.NO_FENCE)
        return fenced or not self._is_held(world, run, sink.database)

    def _next_to_settle(self, run: Run, todo: tuple[Unit, ...]) -> Run:
        if todo:
            return run._replace(step="settle_each", todo=todo)
        return run._replace(step="settle", part=run.part + 1, todo=())

    def _settle_each(self, world: World, run: Run) -> Iterator[Step]:
        unit, *rest = run.todo
        events = ("recover.each.before", "recover.each.after")
        after = self._next_to_settle(run, tuple(rest))
        if self.sinks[run.part].delivery is Delivery.WRITE_AHEAD:
            yield from self._deliver(world, run, unit, "settle_prune", ("recover.each.before",))
        elif self._is_to_commit(run, unit):
            committed = self._committed(world, unit)
            if self.has(Mutant.TWO_TRANSACTIONS):
                after = run._replace(step="settle_record")
            yield _went_on(committed, run, f"committed {_named(unit)}", events, after)
        else:
            dropped = world._replace(prepared=frozenset(one for one in world.prepared if not _same(one, unit)))
            yield _went_on(dropped, run, f"dropped {_named(unit)}", events, after)

    def _is_to_commit(self, run: Run, unit: Unit) -> bool:
        if self.has(Mutant.COMMIT_ALL) or self.has(Mutant.ROLLBACK_ALL):
            return self.has(Mutant.COMMIT_ALL)
        return _among(unit, run.restored)

    def _settle_record(self, world: World, run: Run) -> Iterator[Step]:
        after = self._next_to_settle(run, run.todo[1:])
        yield _went_on(_recorded(world, run.todo[0]), run, "wrote the ledger", (), after)

    def _settle_prune(self, world: World, run: Run) -> Iterator[Step]:
        unit = run.todo[0]
        if self.has(Mutant.PRUNE_BEFORE_DELIVERY):
            world = self._delivered(world, unit)
        after = self._next_to_settle(run, run.todo[1:])
        yield _went_on(_pruned(world, unit), run, "pruned", ("recover.each.after",), after)

    def _settled(self, world: World, run: Run) -> Step:
        """All sinks are settled: before the fence, or after it."""
        after = run._replace(part=0)
        if run.end == _FRESH:
            return _went_on(world, run, "settled", ("recovery.settled",), after._replace(step="fence"))
        return _went_on(world, run, "settled again", (), after._replace(step="verify"))

    def _fence(self, world: World, run: Run) -> Iterator[Step]:
        """Fence the store, then the database of each sink; when a lock is in the way, settle once more."""
        databases = [STORE, *(sink.database for sink in self.sinks)]
        last = run.part == len(databases) - 1
        if self.has(Mutant.NO_FENCE):
            yield _went_on(world, run, "not fenced", ("recovery.fenced",), self._after_fence(run))
            return
        database = databases[run.part]
        if world.fences[database] > run.epoch:
            yield _ended(world, run, "fenced")
        elif world.fences[database] < run.epoch and self._is_held(world, run, database):
            yield _went_on(world, run, "fence is held", (), run._replace(step="settle", part=0))
            left = _without_outdated(world, run)
            if left is not world:
                yield _went_on(left, run, "ended sessions", (), run)
        else:
            after = self._after_fence(run) if last else run._replace(part=run.part + 1)
            events = ("recovery.fenced",) if last else ()
            yield _went_on(_fenced_at(world, database, run.epoch), run, "fenced others", events, after)

    def _after_fence(self, run: Run) -> Run:
        if self.has(Mutant.SETTLE_ONCE):
            return run._replace(step="verify", part=0)
        # Marks that the fence is behind us; ``end`` has no other meaning before reading begins.
        return run._replace(step="settle", part=0, end=-1)

    def _verify(self, world: World, run: Run) -> Iterator[Step]:
        for unit in run.restored:
            if not _is_recorded(world, unit) and not self.has(Mutant.ABSENT_IS_DONE):
                raise LostError(f"run {run.number}: {_named(unit)} of a completed checkpoint is not in the target")
        reading = run._replace(step="read", part=0, end=run.position)
        yield _went_on(world, run, "verified", ("recovery.verified",), reading)

    # --- reading and writing ----------------------------------------------------------------------------------------

    def _read(self, world: World, run: Run) -> Iterator[Step]:
        if run.position == self.rows:
            yield _ended(world, run, "done", ("run.ending", "run.ended"))
            return
        for end in sorted({min(run.position + span, self.rows) for span in self.spans}):
            after = run._replace(step="stage", end=end)
            yield _went_on(world, run, f"triggered at {end}", ("checkpoint.triggered",), after)

    def _stage(self, world: World, run: Run) -> Iterator[Step]:
        """The coordinator waits for all sinks; nothing is emitted when they are ready."""
        begun = all(writing is not Writing.IDLE for writing in run.writers)
        if self.has(Mutant.COMPLETE_BEFORE_PREPARE) and begun and run.part == 0:
            yield from self._open(world, run)
        elif all(writing is Writing.STAGED for writing in run.writers):
            ready = run._replace(writers=(Writing.IDLE,) * len(self.sinks))
            if self.has(Mutant.COMMIT_BEFORE_COMPLETE):
                yield from self._commit(world, ready)
            elif self.has(Mutant.COMPLETE_BEFORE_PREPARE):
                yield from self._commit(world, ready._replace(part=0))
            else:
                yield from self._open(world, ready)

    def _write(self, world: World, run: Run, number: int) -> Iterator[Step]:
        """A sink's thread: the first row of its next unit, or the barrier that ends it."""
        sink, writing = self.sinks[number], run.writers[number]
        # While a checkpoint completes and commits, the rows of the next one flow already.
        first = run.position if run.step in {"read", "stage"} else run.end
        if writing is Writing.IDLE and first < self.rows:
            database = sink.database if sink.delivery in {Delivery.TWO_PHASE, Delivery.IDEMPOTENT} else STORE
            if world.fences[database] != run.epoch and not self.has(Mutant.NO_FENCE):
                yield _ended(world, run, "found itself fenced")
                return
            after = _writing(run, number, Writing.OPEN)
            yield _went_on(world, run, "began a unit", _BEGUN[sink.delivery], after, number)
        elif writing is Writing.OPEN and run.step == "stage" and self._may_prepare(run):
            yield from self._prepare(world, run, number)

    def _may_prepare(self, run: Run) -> bool:
        return run.part == 1 if self.has(Mutant.COMPLETE_BEFORE_PREPARE) else True

    def _prepare(self, world: World, run: Run, number: int) -> Iterator[Step]:
        sink, unit = self.sinks[number], self._unit(run, number)
        staged = _writing(run, number, Writing.STAGED)
        events = ("sink.barrier", "sink.written", *_PREPARED[sink.delivery], "sink.acknowledging")
        match sink.delivery:
            case Delivery.TWO_PHASE:
                if _among(unit, world.prepared):
                    yield _ended(world, run, "found the gid taken")
                    return
                world = world._replace(prepared=world.prepared | {unit})
            case Delivery.WRITE_AHEAD:
                world = world._replace(log=world.log | {unit})
            case Delivery.IDEMPOTENT:
                world = self._upserted(world, unit)
            case Delivery.TRANSACTIONAL if self.has(Mutant.TWO_TRANSACTIONS):
                world = self._visible(world, unit)
        yield _went_on(world, run, f"staged {_named(unit)}", events, staged, number)

    def _unit(self, run: Run, number: int) -> Unit:
        nameless = self.has(Mutant.GID_WITHOUT_EPOCH) or self.has(Mutant.LOG_WITHOUT_EPOCH)
        return Unit(number, 0 if nameless else run.epoch, run.checkpoint + 1, run.position, run.end)

    def _upserted(self, world: World, unit: Unit) -> World:
        if self.has(Mutant.SKIP_REPLAY):
            if any((sink, checkpoint) == (unit.sink, unit.checkpoint) for sink, _, checkpoint in world.ledger):
                return world
            world = _recorded(world, unit)
        return self._visible(world, unit)

    def _visible(self, world: World, unit: Unit) -> World:
        target = written(self.sinks[unit.sink], world.targets[unit.sink], unit.first, unit.end)
        return world._replace(targets=(*world.targets[: unit.sink], target, *world.targets[unit.sink + 1 :]))

    # --- completing and committing ----------------------------------------------------------------------------------

    def _open(self, world: World, run: Run) -> Iterator[Step]:
        """The store's transaction; where a sink writes in it, it is open already."""
        if any(sink.delivery is Delivery.TRANSACTIONAL for sink in self.sinks):
            yield from self._complete(world, run)
        elif world.fences[STORE] != run.epoch and not self.has(Mutant.NO_FENCE):
            yield _ended(world, run, "found itself fenced")
        else:
            events = ("transaction.begun", "transaction.fenced")
            yield _went_on(world, run, "opened the store's transaction", events, run._replace(step="complete"))

    def _complete(self, world: World, run: Run) -> Iterator[Step]:
        head = world.head
        mine = (head.epoch, head.checkpoint) == (run.epoch, run.checkpoint)
        if not mine and not self.has(Mutant.NO_COMPARE_AND_SET):
            yield _ended(world, run, "was refused by the head")
            return
        units = tuple(self._unit(run, number) for number, sink in enumerate(self.sinks) if sink.committed)
        world = world._replace(head=Head(head.epoch, run.checkpoint + 1, run.end, run.position, units))
        for number, sink in enumerate(self.sinks):
            if sink.delivery is Delivery.TRANSACTIONAL and not self.has(Mutant.TWO_TRANSACTIONS):
                world = self._visible(world, self._unit(run, number))
        after = run._replace(step="commit", part=0)
        if self.has(Mutant.COMPLETE_BEFORE_PREPARE):
            after = run._replace(step="stage", part=1)
        elif self.has(Mutant.COMMIT_BEFORE_COMPLETE):
            after = _next_checkpoint(run)
        yield _went_on(world, run, f"completed checkpoint {run.checkpoint + 1}", _COMPLETED, after)

    def _commit(self, world: World, run: Run) -> Iterator[Step]:
        """Make the unit of one sink visible."""
        if run.part == len(self.sinks):
            yield self._all_visible(world, run)
            return
        sink, unit = self.sinks[run.part], self._unit(run, run.part)
        if not sink.committed:
            yield from self._commit(world, run._replace(part=run.part + 1))
        elif sink.delivery is Delivery.WRITE_AHEAD:
            yield from self._deliver(world, run, unit, "prune", ("commit.before",))
        else:
            after = run._replace(step="commit", part=run.part + 1)
            if self.has(Mutant.TWO_TRANSACTIONS):
                after = run._replace(step="record")
            events = ("commit.before", "commit.after")
            yield _went_on(self._committed(world, unit), run, f"committed {_named(unit)}", events, after)

    def _all_visible(self, world: World, run: Run) -> Step:
        if self.has(Mutant.COMMIT_BEFORE_COMPLETE):
            return _went_on(world, run, "committed all", ("commit.end",), run._replace(step="open", part=0))
        return _went_on(world, run, "committed all", ("commit.end",), _next_checkpoint(run))

    def _record(self, world: World, run: Run) -> Iterator[Step]:
        after = run._replace(step="commit", part=run.part + 1)
        yield _went_on(_recorded(world, self._unit(run, run.part)), run, "wrote the ledger", (), after)

    def _prune(self, world: World, run: Run) -> Iterator[Step]:
        unit = self._unit(run, run.part)
        if self.has(Mutant.PRUNE_BEFORE_DELIVERY):
            world = self._delivered(world, unit)
        after = run._replace(step="commit", part=run.part + 1)
        yield _went_on(_pruned(world, unit), run, "pruned", ("commit.after",), after)

    def _committed(self, world: World, unit: Unit) -> World:
        """COMMIT PREPARED; when there is nothing of that name, the ledger tells.

        Raises:
            LostError: It does not know the unit.
        """
        found = next((one for one in world.prepared if _same(one, unit)), None)
        if found is not None:
            world = self._visible(world._replace(prepared=world.prepared - {found}), found)
            return world if self.has(Mutant.TWO_TRANSACTIONS) else _recorded(world, found)
        if _is_recorded(world, unit) or self.has(Mutant.ABSENT_IS_DONE):
            return world
        raise LostError(f"{_named(unit)} of a completed checkpoint is gone")

    def _deliver(self, world: World, run: Run, unit: Unit, then: str, before: tuple[str, ...]) -> Iterator[Step]:
        """One transaction at the target: fence, ledger row, rows.

        Raises:
            LostError: Neither the log nor the ledger has the unit.
        """
        database = self.sinks[unit.sink].database
        if self.has(Mutant.PRUNE_BEFORE_DELIVERY):
            yield _went_on(_pruned(world, unit), run, "pruned", before, run._replace(step=then))
            return
        if _is_recorded(world, unit) and not self.has(Mutant.DELIVER_BLINDLY):
            yield _went_on(world, run, f"found {_named(unit)} delivered", before, run._replace(step=then))
            return
        if world.fences[database] != run.epoch and not self.has(Mutant.NO_FENCE):
            yield _ended(world, run, "found itself fenced")
            return
        events = (*before, "sink.begun", "sink.fenced", "sink.written", "commit.delivered")
        delivered = self._delivered(world, unit)
        yield _went_on(delivered, run, f"delivered {_named(unit)}", events, run._replace(step=then))

    def _delivered(self, world: World, unit: Unit) -> World:
        found = [one for one in world.log if _same(one, unit)]
        if not found and not self.has(Mutant.PRUNE_BEFORE_DELIVERY):
            raise LostError(f"{_named(unit)} of a completed checkpoint is not in the log")
        for one in found or [unit]:
            world = self._visible(world, one)
        return world if self.has(Mutant.TWO_TRANSACTIONS) else _recorded(world, unit)

    # --- locks ------------------------------------------------------------------------------------------------------

    def _is_held(self, world: World, me: Run, database: int) -> bool:
        """Whether a transaction of another run, prepared or open, holds the fence of a database."""
        if any(self.sinks[unit.sink].database == database for unit in world.prepared):
            return True
        return any(self._holds(run, database) for run in world.runs if run.number != me.number)

    def _holds(self, run: Run, database: int) -> bool:
        if database == STORE and run.step == "complete":
            return True
        return any(
            writing is not Writing.IDLE and self._lock_of(sink, writing) == database
            for sink, writing in zip(self.sinks, run.writers, strict=True)
        )

    def _lock_of(self, sink: SinkModel, writing: Writing) -> int | None:
        """The database whose fence a sink's open transaction holds."""
        if sink.delivery is Delivery.TRANSACTIONAL:
            return STORE
        if writing is Writing.STAGED:
            return None
        return STORE if sink.delivery is Delivery.WRITE_AHEAD else sink.database


_COMPLETED: Final = (
    "checkpoint.completing",
    "checkpoint.head_advanced",
    "checkpoint.recorded",
    "checkpoint.completed",
    "commit.begin",
)
_BEGUN: Final = {
    Delivery.TRANSACTIONAL: ("transaction.begun", "transaction.fenced"),
    Delivery.TWO_PHASE: ("sink.begun", "sink.fenced"),
    Delivery.IDEMPOTENT: ("sink.begun", "sink.fenced"),
    Delivery.WRITE_AHEAD: ("sink.begun",),
}
_PREPARED: Final = {
    Delivery.TRANSACTIONAL: ("sink.prepared",),
    Delivery.TWO_PHASE: ("sink.prepare.before", "sink.prepared"),
    Delivery.IDEMPOTENT: ("sink.prepare.before", "sink.prepared"),
    Delivery.WRITE_AHEAD: ("sink.prepare.before", "sink.prepared"),
}


def _named(unit: Unit) -> str:
    return f"sink {unit.sink}'s unit {unit.epoch}:{unit.checkpoint} ({unit.first}-{unit.end})"


def _same(one: Unit, other: Unit) -> bool:
    return (one.sink, one.epoch, one.checkpoint) == (other.sink, other.epoch, other.checkpoint)


def _among(unit: Unit, units: tuple[Unit, ...] | frozenset[Unit]) -> bool:
    return any(_same(unit, one) for one in units)


def _is_recorded(world: World, unit: Unit) -> bool:
    return (unit.sink, unit.epoch, unit.checkpoint) in world.ledger


def _recorded(world: World, unit: Unit) -> World:
    return world._replace(ledger=world.ledger | {(unit.sink, unit.epoch, unit.checkpoint)})


def _pruned(world: World, unit: Unit) -> World:
    return world._replace(log=frozenset(one for one in world.log if not _same(one, unit)))


def _fenced_at(world: World, database: int, epoch: int) -> World:
    if world.fences[database] >= epoch:
        return world
    return world._replace(fences=(*world.fences[:database], epoch, *world.fences[database + 1 :]))


def _restored(run: Run, head: Head) -> Run:
    return run._replace(checkpoint=head.checkpoint, position=head.position, restored=head.units, end=_FRESH)


def _next_checkpoint(run: Run) -> Run:
    return run._replace(step="read", part=0, checkpoint=run.checkpoint + 1, position=run.end)


def _writing(run: Run, number: int, writing: Writing) -> Run:
    return run._replace(writers=(*run.writers[:number], writing, *run.writers[number + 1 :]))


def _went_on(world: World, run: Run, what: str, events: tuple[str, ...], after: Run, role: int = COORDINATOR) -> Step:
    runs = tuple(after if one.number == run.number else one for one in world.runs)
    return Step(run.number, what, role, events, world._replace(runs=runs))


def _ended(world: World, run: Run, what: str, events: tuple[str, ...] = ()) -> Step:
    """The run is no more: what it had open is rolled back, what it had staged stays."""
    runs = tuple(one for one in world.runs if one.number != run.number)
    return Step(run.number, what, COORDINATOR, events, world._replace(runs=runs))


def _without_outdated(world: World, run: Run) -> World:
    """The state after the sessions of outdated runs were ended, each of which then finds out that it is fenced."""
    left = tuple(one for one in world.runs if one.step in _BEFORE_CLAIM or one.epoch >= run.epoch)
    return world if len(left) == len(world.runs) else world._replace(runs=left)
