"""Whether two processes mean the same by a job: each makes it anew from its module."""

from __future__ import annotations

from collections.abc import Sequence

from etl.errors import ConfigurationError
from etl.graph import JobGraph, Node, SinkNode, SourceNode, inputs_of
from etl.job import Job

Outline = Sequence[tuple[str, str]]
"""What there is in a job, and what it is."""


def outline_of(job: Job, graph: JobGraph) -> Outline:
    """Everything by which subtasks, their channels and their state are told apart."""
    declared = f"{job.name}, {job.mode}, parallelism {job.parallelism}"
    return [("job", declared), *((node.id, _described(node)) for node in graph.nodes)]


def _described(node: Node) -> str:
    match node:
        case SourceNode():
            what = type(node.source).__name__
        case SinkNode():
            what = type(node.sink).__name__
        case _:
            what = node.transformation.describe()
    return f"{what} of ({', '.join(inputs_of(node))}) with ({node.schema})"


def require_same(outline: Outline, ours: Outline) -> None:
    """Refuse to work for a job that is another one here.

    Args:
        outline: What the main process has.
        ours: What this process has.

    Raises:
        ConfigurationError: Names what differs.
    """
    theirs_by_id, ours_by_id = dict(outline), dict(ours)
    for node_id in [*theirs_by_id, *ours_by_id]:
        there, here = theirs_by_id.get(node_id, "absent"), ours_by_id.get(node_id, "absent")
        if there != here:
            raise ConfigurationError(
                f'"{node_id}" is {there} in the main process and {here} in a worker: a job must be declared the same'
                " whenever its module is imported, with nothing in it by chance, by the clock or from a set; if its"
                " file was changed meanwhile, run again"
            )
