"""Whether two processes mean the same by a job: each makes it anew from its module."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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
            what = f"{type(node.source).__name__} in {node.parallelism} subtask(s)"
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


def digests_of(job: Job) -> dict[str, str]:
    """SHA-256 of each file of the project that this process has imported, by its path."""
    project = job.base_dir.resolve()
    files = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    # A virtual environment may lie inside the project; what is installed there is not changed while it is in use.
    own = {file for file in files if file.is_relative_to(project) and "site-packages" not in file.parts}
    return {str(file): _digest(file) for file in sorted({*own, job.module_file}) if file.is_file()}


def require_unchanged(digests: Mapping[str, str]) -> None:
    """Refuse to work with other code than the main process has: half of a run would do one thing, half another.

    Args:
        digests: Of its files, as they were when the run began.

    Raises:
        ConfigurationError: Names a file that is another one now.
    """
    for name, digest in digests.items():
        file = Path(name)
        if not file.is_file() or _digest(file) != digest:
            raise ConfigurationError(f"{name} was changed since the run began: run again, with one state of the code")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
