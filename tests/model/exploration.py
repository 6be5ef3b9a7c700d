"""Every state that can be reached, breadth first, and the shortest way to a wrong one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tests.model.invariants import left_over, violations
from tests.model.protocol import LostError, Protocol, Step
from tests.model.world import World

_CLEAN_STEPS_MAX = 500


@dataclass(frozen=True, slots=True)
class Exploration:
    """What was found.

    Attributes:
        states: How many states were reached.
        steps: How many steps lead from one to another.
        wrong: What is wrong, None when nothing is.
        path: The shortest way there, one line a step.
    """

    states: int
    steps: int
    wrong: str | None = None
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        found = f"{self.states:,} states, {self.steps:,} steps"
        return found if self.wrong is None else "\n  ".join([f"{found}: {self.wrong}", *self.path])


class _WrongError(Exception):
    """A state that must not be reached."""


def explore(protocol: Protocol) -> Exploration:
    """Take every step in every state, until there is nothing new or something is wrong."""
    first = protocol.beginning()
    reached: dict[World, tuple[World, str] | None] = {first: None}
    ahead = deque([first])
    settled: dict[World, None] = {}
    steps = 0
    while ahead:
        world = ahead.popleft()
        last = ""
        try:
            for step in _steps(protocol, world):
                steps += 1
                last = _line(step)
                for wrong in violations(protocol, world, step):
                    raise _WrongError(wrong)
                if step.world in reached:
                    continue
                reached[step.world] = (world, last)
                ahead.append(step.world)
                if not step.world.runs:
                    _require_clean_recovery(protocol, step.world, settled)
                last = ""
        except _WrongError as wrong:
            way = [*_way(reached, world), *([last] if last else [])]
            return Exploration(len(reached), steps, str(wrong), tuple(way))
    return Exploration(len(reached), steps)


def _steps(protocol: Protocol, world: World) -> Iterator[Step]:
    try:
        yield from protocol.steps(world)
    except LostError as alarm:
        raise _WrongError(f"ALARM: {alarm}") from None


def _require_clean_recovery(protocol: Protocol, world: World, known: dict[World, None]) -> None:
    """From any state without runs, one undisturbed run must make everything visible and leave nothing behind."""
    start = world._replace(started=0)
    if start in known:
        return
    known[start] = None
    try:
        for step in undisturbed(protocol, start):
            for wrong in violations(protocol, start, step):
                raise _WrongError(f"after a clean recovery: {wrong}")
            start = step.world
    except LostError as alarm:
        if world.meddled:
            return
        raise _WrongError(f"after a clean recovery: ALARM: {alarm}") from None
    for wrong in left_over(start):
        raise _WrongError(f"after a clean recovery: {wrong}")


def undisturbed(protocol: Protocol, world: World) -> Iterator[Step]:
    """The steps of a run that nothing happens to, beginning in a state without runs."""
    step = protocol.start(world)
    for _ in range(_CLEAN_STEPS_MAX):
        yield step
        if not step.world.runs:
            return
        (run,) = step.world.runs
        following = next(protocol.steps_of(step.world, run), None)
        if following is None:
            raise _WrongError(f"after a clean recovery: stuck at {run.step}")
        step = following
    raise _WrongError("after a clean recovery: it does not come to an end")


def _line(step: Step) -> str:
    return f"run {step.run}: {step.what}"


def _way(reached: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    lines = []
    came = reached[world]
    while came is not None:
        world, line = came
        lines.append(line)
        came = reached[world]
    return lines[::-1]
