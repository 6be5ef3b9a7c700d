"""From the job graph to subtasks: transformations without an exchange between them share one subtask."""

from __future__ import annotations

from dataclasses import dataclass

from etl.graph import JobGraph, TransformationNode


@dataclass(frozen=True, slots=True)
class Chain:
    """Transformations that one subtask runs one after the other.

    Attributes:
        id: Id of the last node, under which consumers find the chain.
        inputs: Ids of the nodes it reads, one channel each.
        nodes: In order of execution.
    """

    id: str
    inputs: tuple[str, ...]
    nodes: tuple[TransformationNode, ...]


def chains_of(graph: JobGraph) -> tuple[Chain, ...]:
    """Group the transformations of a graph; a node joins the chain of its only input if it is the only consumer."""
    chains: dict[str, Chain] = {}
    for node in graph.nodes:
        if not isinstance(node, TransformationNode):
            continue
        before = chains.get(node.inputs[0])
        if before is not None and len(node.inputs) == 1 and graph.consumers(before.id) == (node.id,):
            del chains[before.id]
            chains[node.id] = Chain(node.id, before.inputs, (*before.nodes, node))
        else:
            chains[node.id] = Chain(node.id, node.inputs, (node,))
    return tuple(chains.values())
