"""Plays a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import pyarrow as pa

from etl.errors import ConfigurationError, Finding
from etl.graph import JobGraph
from etl.job import Job
from etl.testing.harness.attempt import SteppedAttempt
from etl.testing.harness.clock import ManualClock, clock_begins
from etl.testing.harness.marks import Checkpoint, Crash, Drain, Mark, Rescale, Wait
from etl.testing.harness.memory import StoredCheckpoint
from etl.testing.harness.result import Result
from etl.testing.harness.script import AdvanceTo, Read, Script, Step, read_script
from etl.transformation import PARALLELISM_MAX


def play(
    job: Job,
    script: Sequence[Mark],
    *,
    parallelism: int | None = None,
    batch_rows: int | None = None,
    final_checkpoint: bool = True,
    now: datetime | None = None,
) -> Result:
    """Run a job on scripted input, without a database, files or threads.

    ::

        result = play(job, [rows("payments", {"card": 1, "amount": Decimal("1.00")}), crash()])
        assert result.output["jumps"] == []

    Sources and sinks are not opened. What is between them works as in a run; the order of everything is defined by
    the script.

    Args:
        job: The job.
        script: Marks, in the order in which they happen.
        parallelism: Of operators with state that declare none; the job's when left out.
        batch_rows: Cut the batches that ``rows(…)`` gives into such of at most so many rows.
        final_checkpoint: Whether a checkpoint is taken at the end, as a run does. Without it, what came after the last
            one is :attr:`~etl.testing.Result.uncommitted`.
        now: What the clock shows at the beginning, an aware moment; that of the machine when left out.

    Returns:
        What the sinks were given, and what operators remember.

    Raises:
        ConfigurationError: The job or the script is wrong; lists everything at once.
        EtlError: What the job itself raises.
    """
    graph = job.graph()
    parsed = read_script(graph, script, batch_rows)
    wanted = job.parallelism if parallelism is None else parallelism
    if not 1 <= wanted <= PARALLELISM_MAX:
        finding = Finding("parallelism", f"{wanted} is not 1 to {PARALLELISM_MAX}", "choose another number")
        raise ConfigurationError.from_findings("play", [finding])
    return play_script(job, graph, parsed, wanted, clock_begins(now), final_checkpoint=final_checkpoint)


def play_script(
    job: Job, graph: JobGraph, script: Script, parallelism: int, now: datetime, *, final_checkpoint: bool = True
) -> Result:
    """Like :func:`play`, for a script that was read."""
    player = _Player(job, graph, script.batches, parallelism, ManualClock(now))
    try:
        for step in script.steps:
            player.do(step)
        if final_checkpoint:
            player.do(Checkpoint())
        return player.result()
    finally:
        player.close()


class _Player:
    def __init__(
        self,
        job: Job,
        graph: JobGraph,
        batches: Mapping[str, Sequence[pa.RecordBatch]],
        parallelism: int,
        clock: ManualClock,
    ) -> None:
        self._job = job
        self._graph = graph
        self._batches = batches
        self._stored = StoredCheckpoint()
        self._since: list[Step] = []
        self._is_drained = False
        self._clock = clock
        self._attempt = self._start(parallelism)

    def do(self, step: Step) -> None:
        match step:
            case Read() | AdvanceTo() | Drain():
                if self._is_drained:
                    # That was the end of a run: event time has no end for the next one.
                    self._checkpoint()
                    self._restart(self._parallelism)
                self._is_drained = isinstance(step, Drain)
                self._since.append(step)
                self._flow(step)
            case Checkpoint():
                self._checkpoint()
            case Wait():
                self._clock.advance(step.span)
                self._attempt.tick()
            case Crash():
                self._restart(self._parallelism)
            case Rescale():
                self._restart(step.parallelism)

    def _checkpoint(self) -> None:
        self._stored = self._attempt.checkpoint()
        self._since.clear()

    def _flow(self, step: Step) -> None:
        match step:
            case Read():
                self._attempt.read(step.source)
            case AdvanceTo():
                for source, time in step.times.items():
                    self._attempt.advance(source, time)
            case Drain():
                self._attempt.drain()

    def result(self) -> Result:
        return Result(self._graph, self._stored, self._attempt.uncommitted)

    def close(self) -> None:
        self._attempt.close()

    def _start(self, parallelism: int) -> SteppedAttempt:
        self._parallelism = parallelism
        return SteppedAttempt(self._job, self._graph, self._batches, parallelism, self._stored, self._clock)

    def _restart(self, parallelism: int) -> None:
        self._attempt.close()
        self._attempt = self._start(parallelism)
        for step in self._since:
            self._flow(step)
