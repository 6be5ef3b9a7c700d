"""From the job graph to subtasks: transformations without an exchange between them share one subtask."""

from __future__ import annotations

from dataclasses import dataclass

from etl.graph import JobGraph, TransformationNode
from etl.keyed import Stateful


@dataclass(frozen=True, slots=True)
class Chain:
    """Transformations that one subtask runs one after the other.

    Attributes:
        id: Id of the last node, under which consumers find the chain.
        inputs: Ids of the nodes it reads, one channel each from each of their subtasks.
        nodes: In order of execution.
        parallelism: How many subtasks run it. Rows are exchanged by the first node's key where it has one; without a
            key there is one subtask.
    """

    id: str
    inputs: tuple[str, ...]
    nodes: tuple[TransformationNode, ...]
    parallelism: int = 1

    @property
    def stateful(self) -> Stateful | None:
        """The transformation that keeps state; always the first, since rows are exchanged before it."""
        first = self.nodes[0].transformation
        return first if isinstance(first, Stateful) else None

    def subtask_uid(self, number: int) -> str:
        """What one of the subtasks is called in messages and threads."""
        return self.id if self.parallelism == 1 else f"{self.id}[{number}]"


def chains_of(graph: JobGraph, parallelism: int = 1) -> tuple[Chain, ...]:
    """Group the transformations of a graph; a node joins the chain of its only input if it is the only consumer.

    Args:
        graph: The job's.
        parallelism: Of stateful transformations that declare none.
    """
    chains: dict[str, Chain] = {}
    for node in graph.nodes:
        if not isinstance(node, TransformationNode):
            continue
        transformation = node.transformation
        before = chains.get(node.inputs[0])
        if isinstance(transformation, Stateful):
            chains[node.id] = Chain(node.id, node.inputs, (node,), transformation.parallelism or parallelism)
        elif before is not None and len(node.inputs) == 1 and graph.consumers(before.id) == (node.id,):
            del chains[before.id]
            chains[node.id] = Chain(node.id, before.inputs, (*before.nodes, node), before.parallelism)
        else:
            chains[node.id] = Chain(node.id, node.inputs, (node,))
    return tuple(chains.values())
