"""What a user writes: a :class:`Job`; what happens to its rows is described by :mod:`etl.stream`.

Nothing runs here. A job module may be imported, explained and tested without a database.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING

from etl.errors import ConfigurationError, Finding
from etl.event_time import EventTime
from etl.graph import DeclaredSource, DeclaredTransformation, JobGraph, build_graph, named
from etl.keyed import (
    Stateful,
)
from etl.lazy import LazyModule
from etl.policy import CheckpointPolicy, RestartPolicy
from etl.schedule import schedule_problem
from etl.sink import CheckpointMode
from etl.source import Source
from etl.stream import Declarations, Stream
from etl.transformation import (
    PARALLELISM_MAX,
    Location,
    is_parallelism,
)

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

JOB_NAME_CHARACTERS_MAX = 200


class Job:
    """A named declaration of sources, transformations and sinks.

    Attributes:
        name: Identifies the job in the store, across runs and changes of the code; shown to people.
        schedule: Five cron fields for ``etl crontab``, or None.
        mode: What is promised about each record after a failure.
        checkpoint: How often checkpoints are taken.
        restart: How failed attempts are repeated.
        parallelism: Number of subtasks of each operator that keeps state and declares no other number. It may change
            from run to run; the result is the same.
        owner_timeout_s: A run whose heartbeat stands still for so long may be replaced by another one; after so long
            without an answer to one of its own sessions, a run asks the server what that session does.
        forget: Uids of former sources and operators whose stored positions or state are given up on purpose.
        renamed: New uids of sources and operators by their former ones: what is stored under a former uid is taken over
            by the first run, and may stay declared.
        base_dir: Directory for relative paths of sources and sinks; the working directory unless a loader sets it.
        module_file: The file that made this object.
    """

    def __init__(
        self,
        name: str,
        *,
        schedule: str | None = None,
        mode: CheckpointMode = CheckpointMode.EXACTLY_ONCE,
        checkpoint: CheckpointPolicy = CheckpointPolicy(),  # noqa: B008 - immutable
        restart: RestartPolicy = RestartPolicy(),  # noqa: B008 - immutable
        parallelism: int = 1,
        owner_timeout_s: float = 30.0,
        forget: Sequence[str] = (),
        renamed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Declare an empty job. Mistakes in the arguments are reported by :meth:`graph`, with all others."""
        self.name = name
        self.schedule = schedule
        self.mode = mode
        self.checkpoint = checkpoint
        self.restart = restart
        self.parallelism = parallelism
        self.owner_timeout_s = owner_timeout_s
        self.forget = tuple(forget)
        self.renamed = renamed
        self.base_dir = Path()
        self.module_file = Path(Location.of_caller().file)
        self._declarations = Declarations(name)

    def read(self, uid: str, source: Source, *, event_time: EventTime | None = None, parallelism: int = 1) -> Stream:
        """A stream of the source's rows.

        Args:
            uid: Name of the source within the job; its positions are stored under it.
            source: What to read, e.g. ``CsvFiles(…)``.
            event_time: Which column says when a row happened, and how much later it may come; needed where anything
                is done by event time.
            parallelism: Number of subtasks that read it; it may change from run to run. With more than one, rows of
                different splits (files) come in no order; those of a split keep theirs.
        """
        declared = DeclaredSource(uid, source, Location.of_caller(), event_time, parallelism)
        return Stream(self._declarations, self._declarations.add(declared))

    def graph(self) -> JobGraph:
        """Validate the job.

        Raises:
            ConfigurationError: Lists everything that is wrong, each with its place and cure.
        """
        graph, findings = build_graph(self._declarations.items)
        findings = [*self._findings(), *findings, *self._forget_findings(graph), *self._renamed_findings()]
        if findings:
            shown = f'"{self.name}"' if isinstance(self.name, str) and self.name.isprintable() else repr(self.name)
            raise ConfigurationError.from_findings(f"job {shown}", findings)
        return graph

    def _findings(self) -> list[Finding]:
        findings: list[Finding] = []
        problem = _name_problem(self.name)
        if problem is not None:
            cure = f"choose 1 to {JOB_NAME_CHARACTERS_MAX} printable characters"
            findings.append(Finding(f"job {self.name!r}", problem, cure))
        if self.schedule is not None:
            problem = schedule_problem(self.schedule)
            if problem is not None:
                findings.append(Finding("schedule", problem, 'e.g. schedule="*/5 * * * *"'))
        if self.mode not in list(CheckpointMode):
            findings.append(Finding("mode", f"{self.mode!r} is not a mode", "use a member of etl.CheckpointMode"))
        if not 0.1 <= self.owner_timeout_s < float("inf"):
            problem = f"{self.owner_timeout_s!r} is not a finite number of at least 0.1"
            findings.append(Finding("owner_timeout_s", problem, "choose another value"))
        if not is_parallelism(self.parallelism):
            findings.append(
                Finding("parallelism", f"{self.parallelism!r} is not 1 to {PARALLELISM_MAX}", "choose another")
            )
        findings += self._stateful_findings()
        return findings

    def _forget_findings(self, graph: JobGraph) -> Iterator[Finding]:
        there = {node.uid for node in graph.sources} | {node.uid for node in graph.operators}
        for uid in self.forget:
            if uid in there:
                problem = f'it names "{uid}", which the job has'
                yield Finding("forget", problem, "to begin anew, give it a new uid and forget the former one")

    def _renamed_findings(self) -> Iterator[Finding]:
        renamed: object = self.renamed
        if not isinstance(renamed, Mapping) or not all(
            isinstance(uid, str) for item in renamed.items() for uid in item
        ):
            yield Finding("renamed", f"{renamed!r} is no mapping of uids", 'e.g. renamed={"old": "new"}')
            return
        # Of the declarations and not of the graph, which leaves out what is broken.
        there = {uid for role, uid, _ in named(self._declarations.items) if role != "sink"}
        for old, new in renamed.items():
            if old in there:
                yield Finding("renamed", f'"{old}" is a former uid, and the job has it', "remove it there")
            if old in self.forget:
                yield Finding("renamed", f'"{old}" is to be forgotten as well', "do one of the two")
            if new not in there:
                problem = f'"{old}" is to be "{new}", and no source and no operator of the job is called so'
                yield Finding("renamed", problem, "name one that is there")

    def _stateful_findings(self) -> Iterator[Finding]:
        for declaration in self._declarations.items:
            match declaration:
                case DeclaredTransformation(transformation=Stateful() as stateful):
                    if stateful.parallelism is not None and not is_parallelism(stateful.parallelism):
                        problem = f"parallelism {stateful.parallelism!r} is not 1 to {PARALLELISM_MAX}"
                        yield stateful.finding(problem, "choose another number")
                    if stateful.keys_in_memory is not None and not _is_count(stateful.keys_in_memory):
                        problem = f"keys_in_memory {stateful.keys_in_memory!r} is no number of at least 1"
                        yield stateful.finding(problem, "choose another number, or leave it out for all keys")
                    if self.mode is CheckpointMode.AT_MOST_ONCE:
                        problem = "in mode at-most-once positions are stored before the state that belongs to them"
                        yield stateful.finding(problem, "choose another mode, or another job for the state")

    def __repr__(self) -> str:
        return f"Job({self.name!r})"


def find_jobs(module: ModuleType) -> list[Job]:
    """The jobs in a module's namespace, in the order of their definition.

    Raises:
        ConfigurationError: Two jobs share a name, and so would share their positions.
    """
    jobs = list({id(value): value for value in vars(module).values() if isinstance(value, Job)}.values())
    names = [job.name for job in jobs]
    for job in jobs:
        count = names.count(job.name)
        if count > 1:
            raise ConfigurationError(f'{module.__name__} has {count} jobs named "{job.name}"; rename one')
    return jobs


def _is_count(number: object) -> bool:
    return type(number) is int and number >= 1


def _name_problem(name: object) -> str | None:
    if not isinstance(name, str):
        return f"the name is of type {type(name).__name__}, not text"
    if not name.strip():
        return "the name is empty"
    if len(name) > JOB_NAME_CHARACTERS_MAX:
        return f"the name has {len(name)} characters"
    if not name.isprintable():
        return "the name has control characters"
    return None
