"""What happens to the runs of a job, one after the other or in each other's way, and that all is right in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.faults import oracle
from tests.faults.arena import Arena
from tests.faults.fault import Action, Fault, RunRequest
from tests.faults.oracle import State

FENCED = 78
STATE_ERROR = 70


@dataclass(frozen=True, slots=True)
class Killed:
    """Runs that are killed, each at its step, before one may finish.

    Attributes:
        at: A step and its occurrence for each run.
        rows: The rows of a checkpoint in each run, the last one's too; by default what they always are.
        rolled_back: Whether somebody then rolls the prepared transactions back by hand: the next run has to refuse.
    """

    at: Sequence[tuple[str, int]]
    rows: Sequence[int] = ()
    rolled_back: bool = False


@dataclass(frozen=True, slots=True)
class Met:
    """A run that stands still at a step while a second one begins, which then waits for the first one's end.

    The second one can neither end the first one's sessions nor be noticed by its heartbeat.

    Attributes:
        first: Step and occurrence where the first one waits.
        second: Step and occurrence where the second one waits.
        killed: Where the first one is killed after it has gone on; otherwise it comes to its end by itself.
    """

    first: tuple[str, int]
    second: tuple[str, int]
    killed: tuple[str, int] | None = None


Schedule = Killed | Met


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a schedule is played.

    Attributes:
        arena: Databases and runs.
        stranger: A role that may not end the sessions of the role the other runs use.
        options: What all requests have in common.
    """

    arena: Arena
    stranger: str
    options: dict[str, Any] = field(default_factory=dict)

    def play(self, schedule: Schedule, kind: str, undisturbed: State) -> None:
        """Have it happen, then look.

        Raises:
            AssertionError: Something is wrong.
        """
        request = self.arena.case(kind, **self.options)
        with self.arena.told(request):
            if isinstance(schedule, Met):
                self._meet(schedule, request)
                oracle.check_done(self.arena, request, undisturbed)
            else:
                self._kill(schedule, request)
                if not schedule.rolled_back:
                    oracle.check_done(self.arena, request, undisturbed)

    def _kill(self, schedule: Killed, request: RunRequest) -> None:
        sizes = [*schedule.rows, *[request.rows] * (len(schedule.at) + 1 - len(schedule.rows))]
        for (step, occurrence), rows in zip(schedule.at, sizes, strict=False):
            fault = Fault(Action.KILL, step, occurrence)
            assert self.arena.again(replace(request, faults=(fault,), rows=rows)) is None, f"{fault}: not reached"
        last = replace(request, rows=sizes[-1])
        if not schedule.rolled_back:
            self.arena.finish(last)
            return
        for connection in (self.arena.store, self.arena.other):
            prepared = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            for (gid,) in connection.execute(prepared).fetchall():
                connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
        result = self.arena.again(last)
        assert result is not None
        assert result.exit_code == STATE_ERROR, f"rows are gone, and the run after exits with {result.exit_code}"

    def _meet(self, schedule: Met, request: RunRequest) -> None:
        faults = [Fault(Action.ASK, *schedule.first)]
        if schedule.killed is not None:
            faults.append(Fault(Action.KILL, *schedule.killed))
        first = self.arena.spawn(replace(request, faults=tuple(faults), heartbeat=False))
        assert first.asked() is not None, "the first run did not come to its step"
        second = self.arena.spawn(self._as_stranger(replace(request, faults=(Fault(Action.ASK, *schedule.second),))))
        assert second.asked() is not None, "the second run did not come to its step"
        first.answer()
        outdated = first.wait()
        second.answer()
        result = second.wait()
        assert result is not None
        assert result.exit_code == 0, f"the second run exited with {result.exit_code}:\n{result.trace}"
        if schedule.killed is None:
            assert outdated is not None
            assert outdated.exit_code == FENCED, f"the first run exited with {outdated.exit_code}:\n{outdated.trace}"

    def _as_stranger(self, request: RunRequest) -> RunRequest:
        store, other = (
            make_conninfo(url, user=self.stranger, password=self.stranger)
            for url in (request.store_url, request.other_url)
        )
        return replace(request, store_url=store, other_url=other, owner_timeout_s=1.0)
