"""From the job graph to subtasks: transformations without an exchange between them share one subtask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from etl.graph import JobGraph, TransformationNode
from etl.keyed import Stateful
from etl.transformation import SideStream


@dataclass(frozen=True, slots=True)
class Chain:
    """Transformations that one subtask runs one after the other.

    Attributes:
        id: Id of the last node, under which consumers find the chain.
        inputs: Ids of the nodes it reads, one channel each from each of their subtasks.
        nodes: In order of execution.
        parallelism: How many subtasks run it. Rows are exchanged by the first node's key where it has one; without a
            key there is one subtask.
        sides: By tag of a side output of the first node, the id under which consumers find it.
    """

    id: str
    inputs: tuple[str, ...]
    nodes: tuple[TransformationNode, ...]
    parallelism: int = 1
    sides: Mapping[str, str] = field(default_factory=dict)

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
    sides = _sides_of(graph)
    by_side = {node_id for of_operator in sides.values() for node_id in of_operator.values()}
    for node in graph.nodes:
        if not isinstance(node, TransformationNode) or node.id in by_side:
            continue
        transformation = node.transformation
        before = chains.get(node.inputs[0])
        if isinstance(transformation, Stateful):
            subtasks = transformation.parallelism or parallelism
            chains[node.id] = Chain(node.id, node.inputs, (node,), subtasks, sides.get(node.id, {}))
        elif before is not None and len(node.inputs) == 1 and set(graph.consumers(before.id)) - by_side == {node.id}:
            del chains[before.id]
            chains[node.id] = replace(before, id=node.id, nodes=(*before.nodes, node))
        else:
            chains[node.id] = Chain(node.id, node.inputs, (node,))
    return tuple(chains.values())


def _sides_of(graph: JobGraph) -> dict[str, dict[str, str]]:
    """By id of an operator and tag of a side output, the id of the node that stands for it."""
    sides: dict[str, dict[str, str]] = {}
    for node in graph.nodes:
        if isinstance(node, TransformationNode) and isinstance(node.transformation, SideStream):
            sides.setdefault(node.inputs[0], {})[node.transformation.tag] = node.id
    return sides
