"""What a job of the soak lives through: plain values, and each of them in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.faults.described import DescribedJob
from tests.faults.fault import Fault
from tests.faults.proxy import Incident


@dataclass(frozen=True, slots=True)
class Alone:
    """One run, and what happens to it at some of its steps."""

    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        return f"a run; {_listed(self.faults)}"


@dataclass(frozen=True, slots=True)
class Overtaken:
    """A run that stands still, is overtaken by another one and then goes on.

    Attributes:
        stopped: Where it stands still.
        heartbeat: Whether it moves its heartbeat, by which it also notices what has happened.
        overtaking: What happens to the other run.
        killed: Whether it is killed instead of going on.
    """

    stopped: Fault
    heartbeat: bool
    overtaking: tuple[Fault, ...] = ()
    killed: bool = False

    def __str__(self) -> str:
        end = "is killed" if self.killed else "goes on"
        heartbeat = "" if self.heartbeat else " without a heartbeat"
        return f"a run{heartbeat}; {self.stopped}; overtaken by a run: {_listed(self.overtaking)}; then it {end}"


@dataclass(frozen=True, slots=True)
class Together:
    """Several runs that are started at the same time.

    Attributes:
        faults: What happens to each.
    """

    faults: tuple[tuple[Fault, ...], ...]

    def __str__(self) -> str:
        return f"{len(self.faults)} runs at the same time; {' | '.join(map(_listed, self.faults))}"


@dataclass(frozen=True, slots=True)
class Beside:
    """A run, and another one that is started while the first is at a step.

    Attributes:
        at: Where the first one waits for the end of the other.
    """

    at: Fault

    def __str__(self) -> str:
        return f"a run; another one is started and ends at its {_place(self.at)}"


@dataclass(frozen=True, slots=True)
class Met:
    """A run that stands still until another one, which cannot end its sessions, has come to a step and waits there.

    Attributes:
        first: Where the first one stands still.
        second: Where the second one waits until the first one has ended.
        killed: Where the first one is killed after it has gone on.
    """

    first: Fault
    second: Fault
    killed: Fault | None = None

    def __str__(self) -> str:
        end = f"with {self.killed}" if self.killed else "to its end"
        return (
            f"a run without a heartbeat waits at its {_place(self.first)} until a run that cannot end its sessions"
            f" waits at its {_place(self.second)}, then goes on {end}, then the other one does"
        )


@dataclass(frozen=True, slots=True)
class OnTheWire:
    """A run whose connections lose something.

    Attributes:
        incident: What.
    """

    incident: Incident

    def __str__(self) -> str:
        return f"a run; {self.incident}"


@dataclass(frozen=True, slots=True)
class Crashed:
    """A run whose server is killed.

    Attributes:
        at: When.
        up_first: Whether the server is there again before the run notices.
        faults: What else happens to the run.
    """

    at: Fault
    up_first: bool
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        again = "back before the run notices" if self.up_first else "back while the run retries"
        also = f"; {_listed(self.faults)}" if self.faults else ""
        return f"a run; the server is killed at its {_place(self.at)} and {again}{also}"


Happening = Alone | Overtaken | Together | Beside | Met | OnTheWire | Crashed


@dataclass(frozen=True, slots=True)
class Growth:
    """Text at the end of a file, or a file that is new."""

    name: str
    text: str
    rows: int

    def __str__(self) -> str:
        return f"{self.name} +{self.rows}"


@dataclass(frozen=True, slots=True)
class Cycle:
    """What happens from one look at the job to the next.

    Attributes:
        growth: What is written to the input before.
        rows: Rows of a checkpoint.
        batch_rows: Most rows in a batch.
        interval_s: Seconds from one checkpoint to the next.
        parallelism: Of operations that remember.
        happening: The run or the runs.
        idle: Whether there is nothing to do.
    """

    growth: tuple[Growth, ...]
    rows: int
    batch_rows: int
    interval_s: float
    parallelism: int
    happening: Happening
    idle: bool = False

    @property
    def undisturbed(self) -> bool:
        """Whether nothing happens to the run."""
        return self.happening == Alone()

    def __str__(self) -> str:
        grown = f"{', '.join(map(str, self.growth))} row(s); " if self.growth else ""
        interval = f", {self.interval_s:g} s" if self.interval_s < 1 else ""
        sizes = f"checkpoint {self.rows} rows{interval}, batch {self.batch_rows}, parallelism {self.parallelism}"
        return f"{grown}{'nothing to do; ' if self.idle else ''}{self.happening} ({sizes})"


@dataclass(frozen=True, slots=True)
class JobPlan:
    """All of it, made from nothing but seed and number.

    Attributes:
        seed: The soak's seed.
        number: Which of its jobs.
        described: The job.
        cycles: What happens.
        watched: Whether a reader looks on all the time.
    """

    seed: int
    number: int
    described: DescribedJob
    cycles: tuple[Cycle, ...]
    watched: bool

    def lines(self) -> list[str]:
        """The plan in words."""
        kept = "" if self.described.keep >= 1000 else f", {self.described.keep} checkpoints kept"
        nodes = "; ".join(f"{number} = {node}" for number, node in enumerate(self.described.nodes))
        sinks = "; ".join(map(str, self.described.sinks))
        watched = ["  a reader looks on all the time"] if self.watched else []
        cycles = [f"  cycle {number}: {cycle}" for number, cycle in enumerate(self.cycles, 1)]
        return [f"seed {self.seed}, job {self.number}{kept}", f"  {nodes}", f"  {sinks}", *watched, *cycles]


def _listed(faults: Sequence[Fault]) -> str:
    return "; ".join(map(str, faults)) if faults else "undisturbed"


def _place(fault: Fault) -> str:
    return f"{fault.step}, occurrence {fault.occurrence}"
