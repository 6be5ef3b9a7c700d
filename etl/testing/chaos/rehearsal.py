"""The job as a crash test runs it: the same graph under another name, aimed at a scratch place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from etl.errors import ConfigurationError, Finding
from etl.graph import JobGraph, Node, SinkNode, SourceNode
from etl.job import Job
from etl.sink import Scratch, Sink, SupportsScratch
from etl.testing.chaos.sample import Sample, SampledSource

CHECKPOINTS = 4
"""A run is to have about so many checkpoints, however small its input is."""


class Rehearsal(Job):
    """A job in all but its name, its targets and, if wanted, the amount of its input.

    Args:
        original: The job.
        name: Its name in the store.
        scratch: Where its sinks write to.
        sample: How much of each source it reads, None for all.
        checkpoint_rows: Take a checkpoint also after so many rows of a source, None as the job says.
    """

    def __init__(
        self, original: Job, name: str, scratch: Scratch, sample: Sample | None, checkpoint_rows: int | None
    ) -> None:
        # Whatever a job declares, this one declares as well.
        vars(self).update(vars(original))
        self.name = name
        self._original = original
        self._scratch = scratch
        self._sample = sample
        if checkpoint_rows is not None:
            self.checkpoint = replace(original.checkpoint, rows=checkpoint_rows)

    def graph(self) -> JobGraph:
        """The original's graph with other ends."""
        return JobGraph(tuple(self._turned(node) for node in self._original.graph().nodes))

    def _turned(self, node: Node) -> Node:
        if isinstance(node, SinkNode):
            return replace(node, sink=aimed(node, self._scratch))
        if isinstance(node, SourceNode) and self._sample is not None:
            # In one subtask: which rows are the first ones must not be decided by chance.
            return replace(node, source=SampledSource(node.source, self._sample), parallelism=1)
        return node


def aimed(node: SinkNode, scratch: Scratch) -> Sink:
    """The sink of a node, aimed at a scratch place."""
    assert isinstance(node.sink, SupportsScratch), "such a job was refused"
    return node.sink.aimed_at(scratch)


def require_fit(job: Job, graph: JobGraph) -> None:
    """Refuse what cannot be tested, before anything runs.

    Raises:
        ConfigurationError: Names every sink that would write to its real target, every source that yields rows once.
    """
    findings = [*_sink_findings(graph), *_source_findings(graph)]
    if findings:
        raise ConfigurationError.from_findings(f'job "{job.name}" cannot be crash-tested', findings)


def _sink_findings(graph: JobGraph) -> Sequence[Finding]:
    cure = "have the class implement etl.sink.SupportsScratch"
    return [
        Finding(
            f'sink "{node.uid}" at {node.location}',
            f"{type(node.sink).__name__} cannot be aimed at a scratch target, and the real one must not be written",
            cure,
        )
        for node in graph.sinks
        if not isinstance(node.sink, SupportsScratch)
    ]


def _source_findings(graph: JobGraph) -> Sequence[Finding]:
    return [
        Finding(
            f'source "{node.uid}" at {node.location}',
            "it cannot be read again, so no two runs can be compared",
            "test the job with a source that can",
        )
        for node in graph.sources
        if not node.source.replayable
    ]


def denser_checkpoints(declared_rows: int | None, source_rows: int, checkpoints: int) -> int | None:
    """Rows of a source after which to take a checkpoint so that there are several; None when there are already."""
    if checkpoints >= CHECKPOINTS:
        return None
    rows = max(1, source_rows // CHECKPOINTS)
    return rows if declared_rows is None else min(rows, declared_rows)
