"""What the tests of faults share: undisturbed runs to compare with, and the counting of occurrences."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.faults import oracle
from tests.faults.arena import OCCURRENCE_VARIABLE, Arena
from tests.faults.fault import Action, Fault, RunResult, Step
from tests.faults.oracle import State


def occurrences(count: int | None = None) -> Iterator[int]:
    """Occurrences of a step from 1, up to ``count`` where it is known; one alone when the environment names it."""
    only = os.environ.get(OCCURRENCE_VARIABLE)
    if only is not None:
        return iter([int(only)])
    return itertools.count(1) if count is None else iter(range(1, count + 1))


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """Runs that nothing happened to, one a job."""

    arena: Arena
    _known: dict[str, tuple[RunResult, State]] = field(default_factory=dict)
    _recoveries: dict[tuple[str, str], list[Step]] = field(default_factory=dict)

    def result(self, kind: str) -> RunResult:
        """What such a run says of itself."""
        return self._of(kind)[0]

    def state(self, kind: str) -> State:
        """How the store describes the job afterwards."""
        return self._of(kind)[1]

    def recovery(self, kind: str, left_at: str) -> list[Step]:
        """What a run emits before it reads when the one before was killed at its second ``left_at``."""
        if (kind, left_at) not in self._recoveries:
            request = self.arena.case(kind, Fault(Action.KILL, left_at, 2))
            assert self.arena.run(request) is None
            emitted = list(self.arena.finish(request).steps)
            verified = [step.name for step in emitted].index("recovery.verified")
            self._recoveries[kind, left_at] = emitted[: verified + 1]
        return self._recoveries[kind, left_at]

    def _of(self, kind: str) -> tuple[RunResult, State]:
        if kind not in self._known:
            request = self.arena.case(kind)
            result = self.arena.finish(request)
            state = oracle.read_state(self.arena.store, request.job)
            oracle.check_done(self.arena, request, state)
            oracle.check_idle(self.arena, request, state)
            self._known[kind] = (result, state)
        return self._known[kind]
