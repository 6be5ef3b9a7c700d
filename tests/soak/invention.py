"""Jobs, input and faults from a seed: whoever asks for the same job of the same seed gets the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from tests.faults.described import STATEFUL, DescribedJob, DescribedSink, Node, Operation, Way
from tests.faults.fault import Action, Fault
from tests.faults.proxy import Incident, Loss
from tests.faults.steps import RECOVERY_STEPS, STEPS
from tests.soak.input import Writer
from tests.soak.plan import (
    Alone,
    Beside,
    Crashed,
    Cycle,
    Growth,
    Happening,
    JobPlan,
    Met,
    OnTheWire,
    Overtaken,
    Together,
)

SINKS_MAX = 3
SEVERAL = (1, 1, 1, 2, 2, 3)
KEPT = (1000, 1000, 1000, 5, 3)

OUTSIDE_ATTEMPTS = frozenset({"lease.claiming", "lease.claimed", "run.ending", "run.ended"})
"""There an exception of a listener is no failure of an attempt."""

HOLDING_THE_HEAD = frozenset({"checkpoint.head_advanced", "checkpoint.recorded"})
"""There a run keeps others from claiming the job."""

BEFORE_THE_FENCE = ("lease.claiming", "recovery.begin", "recovery.sessions_ended", "recovery.settled")
"""There a second run waits for nothing that a first one holds."""

EACH_ROW = (Operation.KEEP, Operation.CHOOSE, Operation.ADD, Operation.TURN, Operation.REPEAT, Operation.MARK)
REMEMBERING_STEPS = ("state.snapshotting", "state.snapshotted")

STATEMENTS = ("COMMIT", "BEGIN", "COPY", "INSERT INTO", "UPDATE etl.head", "UPDATE etl.fence", "SELECT", "DELETE FROM")
PREPARED = ("PREPARE TRANSACTION", "COMMIT PREPARED", "ROLLBACK PREPARED")


def plan_job(seed: int, number: int) -> JobPlan:
    """The plan of a job."""
    return _Inventor(seed, number).plan()


def numbered_jobs(seed: int, cycles: int) -> Iterator[int]:
    """Numbers of the first jobs that have so many cycles together."""
    number = 0
    while cycles > 0:
        yield number
        cycles -= len(plan_job(seed, number).cycles)
        number += 1


class _Inventor:
    def __init__(self, seed: int, number: int) -> None:
        self._seed = seed
        self._number = number
        self._random = Random(f"{seed}:{number}")

    def plan(self) -> JobPlan:
        random = self._random
        writers = [
            Writer(name, place, random)
            for place, name in enumerate(("orders", "returns", "stock")[: random.choice(SEVERAL)])
        ]
        described = _JobInventor(random, [writer.source for writer in writers]).job()
        happenings = _FaultInventor(random, described)
        cycles: list[Cycle] = []
        for _ in range(random.choice((1, 2, 2, 3))):
            growth = [grown for writer in writers for grown in writer.grow()]
            for _ in range(random.choice((1, 1, 2, 2, 3))):
                cycles.append(self._cycle(growth, happenings.any()))
                growth = [grown for writer in writers for grown in writer.grow()] if random.random() < 0.3 else []
            cycles.append(self._cycle(growth, Alone()))
        cycles.append(self._cycle([], Alone(), idle=True))
        watched = random.random() < 0.25 and described.keep == max(KEPT)
        return JobPlan(self._seed, self._number, described, tuple(cycles), watched)

    def _cycle(self, growth: Sequence[Growth], happening: Happening, *, idle: bool = False) -> Cycle:
        random = self._random
        interval_s = random.choice((600.0, 600.0, 600.0, 600.0, 0.02))
        rows, batch_rows, parallelism = random.randint(2, 14), random.randint(1, 6), random.choice((1, 1, 2, 3, 7))
        return Cycle(tuple(growth), rows, batch_rows, interval_s, parallelism, happening, idle)


# --- the job ----------------------------------------------------------------------------------------------------------


@dataclass
class _JobInventor:
    """Makes a graph in which every source is written somewhere."""

    random: Random
    sources: Sequence[str]
    nodes: list[Node] = field(default_factory=list)
    origins: list[Counter[str]] = field(default_factory=list)

    def job(self) -> DescribedJob:
        for source in self.sources:
            self._add(Node(Operation.READ, source=source), Counter([source]))
        count = self.random.choice(SEVERAL)
        unwritten = set(self.sources)
        sinks = []
        for place in range(count):
            last = place == count - 1
            sinks.append(self._sink(place, sorted(unwritten) if last else []))
            unwritten -= set(self.origins[sinks[-1].node])
        return DescribedJob(tuple(self.nodes), tuple(sinks), keep=self.random.choice(KEPT))

    def _add(self, node: Node, origins: Counter[str]) -> int:
        self.nodes.append(node)
        self.origins.append(origins)
        return len(self.nodes) - 1

    def _sink(self, place: int, wanted: Sequence[str]) -> DescribedSink:
        random = self.random
        way = random.choice(list(Way))
        keyed = way is Way.UPSERT or random.random() < 0.3
        node = self._stream(wanted, once=keyed)
        other = way is not Way.TRANSACTIONAL and random.random() < 0.3
        table = f"soak_{'keyed' if keyed else 'appended'}_{place}"
        return DescribedSink(f"sink-{place}", node, way, table, other, keyed, keyed and random.random() < 0.5)

    def _stream(self, wanted: Sequence[str], *, once: bool) -> int:
        """A node whose rows come from all the wanted sources; with ``once``, from each source in one way only.

        Otherwise two rows of one key would come in two ways, in no order.
        """
        random = self.random
        possible = [node for node, origins in enumerate(self.origins) if not once or max(origins.values()) == 1]
        branches = [self._chain(self.sources.index(source)) for source in wanted] or [random.choice(possible)]
        origins = sum((self.origins[branch] for branch in branches), Counter[str]())
        more = random.choice(possible)
        if random.random() < 0.3 and more not in branches and not (once and origins & self.origins[more]):
            branches.append(more)
            origins += self.origins[more]
        return self._chain(
            branches[0] if len(branches) == 1 else self._add(Node(Operation.UNITE, tuple(branches)), origins)
        )

    def _chain(self, node: int) -> int:
        """Up to two operators behind a node; one that remembers only where there is an order of the rows."""
        for _ in range(self.random.choice((0, 0, 1, 1, 2))):
            is_ordered = self.origins[node].total() == 1
            operation = self.random.choice((*EACH_ROW, *STATEFUL) if is_ordered else EACH_ROW)
            node = self._add(Node(operation, (node,), self._number(operation)), self.origins[node])
        return node

    def _number(self, operation: Operation) -> int:
        if operation in (Operation.CHOOSE, Operation.TURN, Operation.FIRST):
            return 0
        return self.random.randint(2, 4)


# --- what happens to it -----------------------------------------------------------------------------------------------


@dataclass
class _FaultInventor:
    random: Random
    job: DescribedJob

    def any(self) -> Happening:
        """Anything, the cheap more often than what takes seconds."""
        ways = (self._alone, self._wire, self._overtaken, self._together, self._crashed, self._beside, self._met)
        (invent,) = self.random.choices(ways, (56, 12, 9, 8, 7, 4, 4))
        return invent()

    def _steps(self) -> list[str]:
        """What this job's runs take; now and then also what they take only after a run that has left something."""
        recovering = self.random.random() < 0.3
        kinds = {str(sink.way) for sink in self.job.sinks}
        found = {step for kind in kinds for step in STEPS[kind]}
        found.update(REMEMBERING_STEPS if self.job.remembers else ())
        return sorted(found.union(*(RECOVERY_STEPS.get(kind, ()) for kind in kinds)) if recovering else found)

    def _fault(self, action: Action, *, without: frozenset[str] = frozenset()) -> Fault:
        step = self.random.choice([step for step in self._steps() if step not in without])
        return Fault(action, step, self._occurrence(step))

    def _occurrence(self, step: str) -> int:
        if step.startswith(("lease.", "recovery.", "run.")):
            return 1
        return self.random.choice((1, 1, 1, 2, 2, 3, 4, 6) if step == "source.batch" else (1, 1, 1, 1, 2, 3))

    def _faults(self) -> tuple[Fault, ...]:
        actions = (Action.KILL, Action.CUT, Action.TERM, Action.RAISE, Action.EXHAUST)
        chosen = self.random.choices(actions, (55, 17, 12, 11, 5), k=self.random.choice((1, 1, 1, 2)))
        return tuple(
            self._fault(action, without=OUTSIDE_ATTEMPTS if action in (Action.RAISE, Action.EXHAUST) else frozenset())
            for action in chosen
        )

    def _alone(self) -> Happening:
        return Alone(self._faults())

    def _wire(self) -> Happening:
        prepared = PREPARED if any(sink.way is Way.TWO_PHASE for sink in self.job.sinks) else ()
        statement = self.random.choice((*STATEMENTS, *prepared, *prepared))
        # The answer to COPY is an invitation to go on: without it nothing ever comes that would end the connection.
        losses = (Loss.REQUEST, Loss.CONNECTION, *(() if statement == "COPY" else (Loss.ANSWER, Loss.ANSWER)))
        return OnTheWire(Incident(statement, self.random.choice((1, 1, 2, 2, 3, 4, 6)), self.random.choice(losses)))

    def _overtaken(self) -> Happening:
        overtaking = self._faults() if self.random.random() < 0.3 else ()
        stopped = self._fault(Action.STOP)
        return Overtaken(stopped, self.random.random() < 0.5, overtaking, self.random.random() < 0.2)

    def _together(self) -> Happening:
        count = self.random.choice((2, 2, 3))
        return Together(tuple(self._faults() if self.random.random() < 0.3 else () for _ in range(count)))

    def _beside(self) -> Happening:
        return Beside(self._fault(Action.ASK, without=HOLDING_THE_HEAD | {"lease.claiming"}))

    def _met(self) -> Happening:
        first = self._fault(Action.ASK, without=HOLDING_THE_HEAD)
        second = Fault(Action.ASK, self.random.choice(BEFORE_THE_FENCE))
        killed = self._fault(Action.KILL) if self.random.random() < 0.3 else None
        return Met(first, second, killed)

    def _crashed(self) -> Happening:
        faults = self._faults() if self.random.random() < 0.3 else ()
        return Crashed(self._fault(Action.ASK), self.random.random() < 0.5, faults)
