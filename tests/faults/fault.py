"""What can be done to a run at a step, and the request that describes a run: plain values that cross processes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from etl.sink import CheckpointMode
from tests.faults.described import DescribedJob
from tests.model.mutants import Mutant


class Action(StrEnum):
    """What happens to a run when it comes to the step."""

    KILL = "kill -9"
    TERM = "SIGTERM"
    STOP = "SIGSTOP"
    RAISE = "exception"
    EXHAUST = "MemoryError"
    CUT = "sessions terminated"
    ASK = "the test is asked"
    KILL_WORKER = "kill -9 of a worker process"
    STOP_WORKER = "SIGSTOP of a worker process"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        action: What happens.
        step: Name of the event.
        occurrence: At which of its occurrences, from 1, counted over the whole process.
        uid: Counts only the events of this source or sink.
    """

    action: Action
    step: str
    occurrence: int = 1
    uid: str | None = None

    def __str__(self) -> str:
        whose = f" of {self.uid}" if self.uid else ""
        return f"{self.action} at {self.step}{whose}, occurrence {self.occurrence}"


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run of a job in a process of its own.

    Attributes:
        kind: Key of :data:`tests.faults.jobs.ALL_KINDS`, unless the job is described.
        job: Name of the job in the store.
        input_dir: Directory of the input files.
        store_url: The store database.
        other_url: The database that sinks call ``other``.
        faults: What happens to the run.
        mode: The job's mode.
        restarts: How often a failed attempt is repeated.
        owner_timeout_s: When a silent owner counts as hung.
        heartbeat: Whether it moves its heartbeat, by which it also notices that it was overtaken.
        guarded: Whether an upsert refuses older versions of a row.
        rows: Rows of a checkpoint.
        readers: Subtasks of each source.
        mutant: What is wrong with the engine.
        described: The job, where it is none of those kinds.
        start: The checkpoint to go back to.
        workers: How many worker processes run its operators.
        timeout_s: After how long an unfinished checkpoint fails the attempt.
    """

    kind: str
    job: str
    input_dir: str
    store_url: str
    other_url: str
    faults: tuple[Fault, ...] = ()
    mode: CheckpointMode = CheckpointMode.EXACTLY_ONCE
    restarts: int = 20
    owner_timeout_s: float = 30.0
    heartbeat: bool = True
    guarded: bool = False
    rows: int = 5
    readers: int = 1
    mutant: Mutant | None = None
    described: DescribedJob | None = None
    start: str | None = None
    workers: int = 0
    timeout_s: float = 20.0

    def without_faults(self) -> RunRequest:
        """The same run, undisturbed."""
        return replace(self, faults=())


@dataclass(frozen=True, slots=True)
class Step:
    """An event that a run emitted, and the thread that did."""

    name: str
    uid: str | None = None
    thread: str = ""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run said of itself; a killed one says nothing.

    Attributes:
        exit_code: As the command line would exit.
        error: The error's class and message, empty when there is none.
        trace: The error with its causes, for a person.
        rows_read: From the summary.
        rows_written: From the summary.
        checkpoint: From the summary.
        restarts: From the summary.
        steps: Every event, in order.
        warnings: What the user was told.
    """

    exit_code: int
    error: str = ""
    trace: str = ""
    rows_read: int = 0
    rows_written: dict[str, int] = field(default_factory=dict)
    checkpoint: int = 0
    restarts: int = 0
    steps: tuple[Step, ...] = ()
    warnings: tuple[str, ...] = ()

    def count(self, step: str, uid: str | None = None) -> int:
        """How often a step was seen."""
        return sum(one.name == step and uid in (None, one.uid) for one in self.steps)
