"""What the tests of faults share: undisturbed runs to compare with, and the counting of occurrences."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from etl.sink import CheckpointMode
from tests.faults import oracle
from tests.faults.arena import OCCURRENCE_VARIABLE, Arena
from tests.faults.fault import Action, Fault, RunRequest, RunResult, Step
from tests.faults.oracle import State
from tests.faults.steps import CASES

THOROUGH = bool(os.environ.get("ETL_FAULTS_THOROUGH"))
"""Whether every fault is tried at every step; otherwise those that take seconds are tried at a sample of steps."""


def occurrences(count: int | None = None) -> Iterator[int]:
    """Occurrences of a step from 1, up to ``count`` where it is known; one alone when the environment names it."""
    only = os.environ.get(OCCURRENCE_VARIABLE)
    if only is not None:
        return iter([int(only)])
    return itertools.count(1) if count is None else iter(range(1, count + 1))


def kills(kind: str, count: int) -> Iterator[int]:
    """All occurrences of a step, of jobs that keep state one, unless all are asked for."""
    return every_occurrence(kind, count) if kind.startswith(STATEFUL) else occurrences(count)


STATEFUL = ("keyed", "timed")
"""What the names of jobs that keep state begin with."""

ONE_OF_EACH = ("transactional", "two-phase", "write-ahead", "upsert")
"""A job for each kind of sink; the others put the same sinks to other use."""


def every_occurrence(kind: str, count: int) -> Iterator[int]:
    """All occurrences of a step; of the jobs that have no sink of their own kind one, unless all are asked for."""
    if THOROUGH or kind in ONE_OF_EACH or OCCURRENCE_VARIABLE in os.environ:
        return occurrences(count)
    return iter([min(2, count)])


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """Runs that nothing happened to, made when they are first asked for; ask before a case begins."""

    arena: Arena
    _known: dict[tuple[str, CheckpointMode], tuple[RunResult, State]] = field(default_factory=dict)
    _recoveries: dict[tuple[str, str], list[Step]] = field(default_factory=dict)

    def result(self, kind: str, mode: CheckpointMode = CheckpointMode.EXACTLY_ONCE) -> RunResult:
        """What such a run says of itself."""
        return self._of(kind, mode)[0]

    def state(self, kind: str, mode: CheckpointMode = CheckpointMode.EXACTLY_ONCE) -> State:
        """How the store describes the job afterwards."""
        return self._of(kind, mode)[1]

    def recovery(self, kind: str, left_at: str) -> list[Step]:
        """What a run emits before it reads when the one before was killed at its second ``left_at``."""
        if (kind, left_at) not in self._recoveries:
            request = self.arena.case(kind, Fault(Action.KILL, left_at, 2))
            assert self.arena.run(request) is None
            emitted = list(self.arena.finish(request).steps)
            verified = [step.name for step in emitted].index("recovery.verified")
            self._recoveries[kind, left_at] = emitted[: verified + 1]
        return self._recoveries[kind, left_at]

    def _of(self, kind: str, mode: CheckpointMode) -> tuple[RunResult, State]:
        if (kind, mode) not in self._known:
            request = self.arena.case(kind, mode=mode)
            result = self.arena.finish(request)
            state = oracle.read_state(self.arena.store, request.job)
            if mode is CheckpointMode.EXACTLY_ONCE:
                oracle.check_done(self.arena, request, state)
            oracle.check_idle(self.arena, request, state)
            self._known[kind, mode] = (result, state)
        return self._known[kind, mode]


SAMPLE = frozenset(
    {
        "recovery.settled",
        "source.batch",
        "sink.fenced",
        "sink.prepared",
        "checkpoint.head_advanced",
        "checkpoint.completed",
        "commit.before",
        "commit.delivered",
    }
)
"""Steps that differ in what is open, locked or staged at the server: enough for faults that take seconds."""


def _is_played(kind: str, step: str) -> bool:
    if kind.startswith(STATEFUL):
        return step.startswith("state.") or (kind == "timed-4" and step in SAMPLE)
    return kind in ONE_OF_EACH or step in SAMPLE


FAULT_CASES = [(kind, step) for kind, step in CASES if THOROUGH or _is_played(kind, step)]
"""A job of each kind of sink with each of its steps; the others, which are killed at each, with a sample of steps."""

SAMPLED = [(kind, step) for kind, step in CASES if step in SAMPLE]


def asking(arena: Arena, undisturbed: Undisturbed, kind: str, step: str) -> RunRequest:
    """A run that asks at its second such step."""
    occurrence = min(2, undisturbed.result(kind).count(step))
    return arena.case(kind, Fault(Action.ASK, step, occurrence), restarts=1000)


def thorough(cases: Sequence[tuple[str, str]], sample: Collection[str]) -> list[tuple[str, str]]:
    """All cases when the environment asks for them, else those whose step is in the sample."""
    return [(kind, step) for kind, step in cases if THOROUGH or step in sample]
