"""Has a plan happen, cycle by cycle, and looks after each of them."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import assert_never

from tests.faults.arena import BUSY
from tests.faults.fault import Action, Fault, RunRequest, RunResult
from tests.faults.proxy import proxied
from tests.faults.reader import Reader
from tests.faults.zygote import ChildRun
from tests.soak import oracle
from tests.soak.oracle import FENCED, Stillness, World
from tests.soak.plan import Alone, Beside, Crashed, Cycle, Happening, JobPlan, Met, OnTheWire, Overtaken, Together
from tests.soak.stage import Stage
from tests.soak.watch import Watch

INTERNAL_ERROR = 70
UNREACHABLE = 69
LEFT_ALONE = (INTERNAL_ERROR, UNREACHABLE)
"""A run that was asked to stop, and then loses the server, does not try again."""
OVERTAKING_TIMEOUT_S = 0.4
BESIDE_TIMEOUT_S = 2.0
CRASH_RESTARTS = 1000

FAILING = (Action.RAISE, Action.EXHAUST)


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that has come to its end.

    Attributes:
        pid: Its process.
        result: What it said; None when it was killed.
    """

    pid: int
    result: RunResult | None

    @property
    def done(self) -> bool:
        """Whether it says that everything is read and visible."""
        return self.result is not None and self.result.exit_code == 0 and self.result.count("run.ended") > 0

    def met(self, faults: Sequence[Fault]) -> list[Fault]:
        """Those to whose place it came; of a killed one no more is known than that it was killed."""
        if self.result is None:
            return [fault for fault in faults if fault.action is Action.KILL][:1]
        return [fault for fault in faults if self.result.count(fault.step, fault.uid) >= fault.occurrence]


class Player:
    """Plays the cycles of one job.

    Args:
        stage: Where.
        plan: What.

    Attributes:
        faults: What has really happened, by kind.
        played: How many cycles have been played.
    """

    def __init__(self, stage: Stage, plan: JobPlan) -> None:
        self.faults: Counter[str] = Counter()
        self.played = 0
        self._stage = stage
        self._arena = stage.arena
        self._plan = plan
        self._request = stage.begin(plan)
        self._world = World(stage.arena, self._request, plan.described)

    def play(self) -> None:
        """Play all of it.

        Raises:
            AssertionError: Something is wrong.
        """
        with self._watched():
            for cycle in self._plan.cycles:
                self._play(cycle)
                self.played += 1

    @contextmanager
    def _watched(self) -> Iterator[None]:
        if not self._plan.watched:
            yield
            return
        watch = Watch(self._request, world=self._world)
        with Reader(self._request, server_may_stop=True, judge=watch):
            yield

    def _play(self, cycle: Cycle) -> None:
        request = self._stage.prepared(self._request, cycle)
        still = Stillness.of(self._world) if cycle.idle else None
        runs = self._happen(cycle.happening, request)
        for run in runs:
            if run.result is not None:
                oracle.check_told(self._world, run.pid, run.result)
        if cycle.undisturbed:
            self._check_undisturbed(runs, still)
        elif any(run.done and not self._was_stopped(run, cycle.happening) for run in runs):
            oracle.check_read(self._world)
        else:
            oracle.check_interrupted(self._world)

    def _check_undisturbed(self, runs: Sequence[Ended], still: Stillness | None) -> None:
        (run,) = runs
        assert run.result is not None
        assert run.result.exit_code == 0, f"an undisturbed run exited with {run.result.exit_code}:\n{run.result.trace}"
        assert run.result.restarts == 0, f"an undisturbed run was restarted: {run.result.warnings}"
        oracle.check_done(self._world)
        if still is not None:
            oracle.check_idle(still, self._world, run.result)

    def _was_stopped(self, run: Ended, happening: Happening) -> bool:
        """Whether it may have left something unread because it was asked to stop."""
        return any(fault.action is Action.TERM for fault in run.met(_faults_of(happening)))

    def _happen(self, happening: Happening, request: RunRequest) -> list[Ended]:
        match happening:
            case Alone():
                return [self._alone(request, happening.faults)]
            case Overtaken():
                return self._overtaken(request, happening)
            case Together():
                return self._together(request, happening)
            case Beside():
                return self._beside(request, happening)
            case Met():
                return self._met(request, happening)
            case OnTheWire():
                return [self._on_the_wire(request, happening)]
            case Crashed():
                return [self._crashed(request, happening)]
            case _:
                assert_never(happening)

    # --- one run ----------------------------------------------------------------------------------------------------

    def _alone(self, request: RunRequest, faults: tuple[Fault, ...]) -> Ended:
        run = Ended(*self._stage.run(replace(request, faults=faults)))
        self._check_end(run, faults)
        return run

    def _check_end(self, run: Ended, faults: Sequence[Fault], *also: int) -> None:
        """Whatever happened to a run, it says what it should."""
        met = run.met(faults)
        self.faults.update(str(fault.action) for fault in met)
        if run.result is None:
            assert met, "a run was killed by nobody"
            return
        self.faults["not reached"] += len(faults) - len(met)
        allowed = {*_exit_codes(run.result, [fault.action for fault in met]), *also}
        told = f"exit code {run.result.exit_code} after {'; '.join(map(str, met)) or 'nothing'}, not in {allowed}"
        assert run.result.exit_code in allowed, f"{told}:\n{run.result.trace}"

    def _on_the_wire(self, request: RunRequest, happening: OnTheWire) -> Ended:
        incident = happening.incident
        with proxied(self._arena.store_url, incident) as proxy:
            store, other = proxy.conninfo(self._arena.store_url), proxy.conninfo(self._arena.other_url)
            run = Ended(*self._stage.run(replace(request, store_url=store, other_url=other)))
            seen = proxy.seen >= incident.occurrence
        self.faults[str(incident.loss) if seen else "not reached"] += 1
        self._check_end(run, [], *_codes_of_lost_sessions(run.result))
        return run

    def _crashed(self, request: RunRequest, happening: Crashed) -> Ended:
        faults = (happening.at, *happening.faults)
        child = self._spawn(replace(request, faults=faults, restarts=CRASH_RESTARTS))
        if child.asked() is not None:
            self.faults["server killed"] += 1
            self._stage.server.kill()
            if not happening.up_first:
                _answer(child)
            self._stage.server.restart()
            self._arena.reconnect()
            if happening.up_first:
                _answer(child)
        else:
            self.faults["not reached"] += 1
        run = Ended(child.pid, child.wait())
        stopped = any(fault.action is Action.TERM for fault in run.met(happening.faults))
        self._check_end(run, happening.faults, *_codes_of_lost_sessions(run.result), *(LEFT_ALONE if stopped else ()))
        return run

    # --- several runs -----------------------------------------------------------------------------------------------

    def _overtaken(self, request: RunRequest, happening: Overtaken) -> list[Ended]:
        child = self._spawn(replace(request, faults=(happening.stopped,), heartbeat=happening.heartbeat))
        status = self._arena.zygote.status_of(child)
        if not os.WIFSTOPPED(status):
            run = Ended(child.pid, child.ended(status))
            self.faults["not reached"] += 1
            self._check_end(run, [], BUSY)
            return [run]
        self.faults["SIGSTOP, overtaken"] += 1
        oracle.check_interrupted(self._world)
        overtaking = replace(request, owner_timeout_s=OVERTAKING_TIMEOUT_S)
        second = self._alone(overtaking, happening.overtaking)
        if second.done and not self._was_stopped(second, happening):
            oracle.check_read(self._world)
        if happening.killed:
            os.kill(child.pid, signal.SIGKILL)
        else:
            child.go_on()
        first = Ended(child.pid, child.wait())
        if first.result is not None:
            self._check_outdated(first.result)
        return [first, second]

    def _check_outdated(self, result: RunResult) -> None:
        """It was overtaken: it is fenced, or it had nothing left to do, or it had not begun."""
        allowed = {FENCED, 0, *([BUSY] if not result.count("lease.claimed") else [])}
        assert result.exit_code in allowed, f"an overtaken run exited with {result.exit_code}:\n{result.trace}"

    def _together(self, request: RunRequest, happening: Together) -> list[Ended]:
        children = [self._spawn(replace(request, faults=faults)) for faults in happening.faults]
        runs = [Ended(child.pid, child.wait()) for child in children]
        self.faults["several runs at once"] += 1
        for run, faults in zip(runs, happening.faults, strict=True):
            self._check_end(run, faults, BUSY, *_codes_beside(happening, run.result))
        if not any(happening.faults):
            codes = [run.result.exit_code for run in runs if run.result is not None]
            assert 0 in codes, f"nobody did the work: {codes}"
        return runs

    def _beside(self, request: RunRequest, happening: Beside) -> list[Ended]:
        request = replace(request, owner_timeout_s=BESIDE_TIMEOUT_S)
        child = self._spawn(replace(request, faults=(happening.at,)))
        if child.asked() is None:
            self.faults["not reached"] += 1
            first = Ended(child.pid, child.wait())
            self._check_end(first, [], BUSY)
            return [first]
        self.faults["second run beside"] += 1
        second = Ended(*self._stage.run(request))
        _answer(child)
        first = Ended(child.pid, child.wait())
        assert first.result is not None
        assert second.result is not None
        codes = (first.result.exit_code, second.result.exit_code)
        # A machine that is too busy to let the first one move its heartbeat has it overtaken.
        assert codes in {(0, BUSY), (FENCED, 0), (0, 0)}, f"the exit codes are {codes}: {first.result.trace}"
        return [first, second]

    def _met(self, request: RunRequest, happening: Met) -> list[Ended]:
        killed = () if happening.killed is None else (happening.killed,)
        first = self._spawn(replace(request, faults=(happening.first, *killed), heartbeat=False))
        if first.asked() is None:
            self.faults["not reached"] += 1
            run = Ended(first.pid, first.wait())
            self._check_end(run, killed, BUSY)
            return [run]
        self.faults["met at steps"] += 1
        stranger = self._stage.as_stranger(replace(request, owner_timeout_s=OVERTAKING_TIMEOUT_S))
        second = self._spawn(replace(stranger, faults=(happening.second,)))
        came = second.asked() is not None
        _answer(first)
        ended = Ended(first.pid, first.wait())
        if ended.result is not None:
            self._check_outdated(ended.result)
        if came:
            _answer(second)
        other = Ended(second.pid, second.wait())
        self._check_end(other, [], BUSY)
        return [ended, other]

    def _spawn(self, request: RunRequest) -> ChildRun:
        self._stage.runs += 1
        return self._arena.spawn(request)


def _answer(child: ChildRun) -> None:
    """Have a run that has asked go on, unless another of its threads has met its death meanwhile."""
    with suppress(BrokenPipeError):
        child.answer()


def _exit_codes(result: RunResult, met: Sequence[Action]) -> set[int]:
    """How a run may exit after what has happened to it."""
    allowed = set()
    if any(action in FAILING for action in met):
        allowed.add(INTERNAL_ERROR)
    if Action.CUT in met:
        allowed.update(_codes_of_lost_sessions(result))
        if Action.TERM in met:
            allowed.update(LEFT_ALONE)
    if not allowed & {INTERNAL_ERROR} or Action.CUT in met:
        allowed.add(0)
    return allowed


def _codes_of_lost_sessions(result: RunResult | None) -> set[int]:
    """Before the first attempt nothing is repeated: there is nothing yet that could be lost."""
    return {UNREACHABLE} if result is not None and not result.count("recovery.begin") else set()


def _codes_beside(happening: Together, result: RunResult | None) -> set[int]:
    """What somebody else's fault does to a run beside."""
    others = any(fault.action is Action.CUT for faults in happening.faults for fault in faults)
    return {*_codes_of_lost_sessions(result), FENCED} if others else set()


def _faults_of(happening: Happening) -> list[Fault]:
    match happening:
        case Alone() | Crashed():
            return list(happening.faults)
        case Overtaken():
            return list(happening.overtaking)
        case Together():
            return [fault for faults in happening.faults for fault in faults]
        case _:
            return []
