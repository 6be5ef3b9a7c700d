"""From the job graph to subtasks: transformations without an exchange between them share one subtask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from etl.graph import JobGraph, TransformationNode
from etl.joins import LookupJoin
from etl.keyed import Stateful
from etl.transformation import Rebalance, SideStream


@dataclass(frozen=True, slots=True)
class Chain:
    """Transformations that one subtask runs one after the other.

    Attributes:
        id: Id of the last node, under which consumers find the chain.
        inputs: Ids of the nodes it reads, one channel each from each of their subtasks.
        nodes: In order of execution.
        parallelism: How many subtasks run it. Rows are exchanged by the first node's key where it has one, and dealt
            out before a rebalance; else there are as many as the input has.
        sides: By tag of a side output of the first node, the id under which consumers find it.
        forwarded: Whether each subtask reads that subtask of the only input which has its number, and no other.
    """

    id: str
    inputs: tuple[str, ...]
    nodes: tuple[TransformationNode, ...]
    parallelism: int = 1
    sides: Mapping[str, str] = field(default_factory=dict)
    forwarded: bool = False

    @property
    def stateful(self) -> Stateful | None:
        """The transformation that keeps state; always the first, since rows are exchanged before it."""
        first = self.nodes[0].transformation
        return first if isinstance(first, Stateful) else None

    @property
    def runs_python(self) -> bool:
        """Whether it calls functions of the user, or keeps state: what holds the interpreter's lock for long."""
        return self.stateful is not None or any(node.transformation.calls_functions for node in self.nodes)

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
    subtasks = {source.id: source.parallelism for source in graph.sources}
    for node in graph.nodes:
        if not isinstance(node, TransformationNode) or node.id in by_side:
            continue
        transformation = node.transformation
        before = chains.get(node.inputs[0])
        if isinstance(transformation, Stateful):
            count = transformation.parallelism or parallelism
            chain = Chain(node.id, node.inputs, (node,), count, sides.get(node.id, {}))
        elif isinstance(transformation, Rebalance):
            chain = Chain(node.id, node.inputs, (node,), transformation.parallelism)
        elif len(node.inputs) > 1:
            chain = Chain(node.id, node.inputs, (node,))
        elif before is not None and _continues(before, node) and set(graph.consumers(before.id)) - by_side == {node.id}:
            del chains[before.id]
            chain = replace(before, id=node.id, nodes=(*before.nodes, node))
        else:
            count = subtasks[node.inputs[0]]
            chain = Chain(node.id, node.inputs, (node,), count, forwarded=count > 1)
        chains[chain.id] = chain
        subtasks.update(dict.fromkeys([chain.id, *chain.sides.values()], chain.parallelism))
    return tuple(chains.values())


def _continues(before: Chain, node: TransformationNode) -> bool:
    """Whether a node may run in the thread of its input; a lookup waits for a database, and has one of its own."""
    both = (before.nodes[-1].transformation, node.transformation)
    return len(node.inputs) == 1 and not any(isinstance(one, LookupJoin) for one in both)


def _sides_of(graph: JobGraph) -> dict[str, dict[str, str]]:
    """By id of an operator and tag of a side output, the id of the node that stands for it."""
    sides: dict[str, dict[str, str]] = {}
    for node in graph.nodes:
        if isinstance(node, TransformationNode) and isinstance(node.transformation, SideStream):
            sides.setdefault(node.inputs[0], {})[node.transformation.tag] = node.id
    return sides


MAIN = 0
"""The process that has sources, sinks, coordinator and every session; workers are numbered from 1."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The chains of a job, and where their subtasks are; the same in every process of a run.

    Attributes:
        chains: In the order of the graph.
        places: By id of a chain the process of each of its subtasks.
        workers: How many worker processes have any.
    """

    chains: tuple[Chain, ...]
    places: Mapping[str, tuple[int, ...]]
    workers: int


def plan_of(graph: JobGraph, parallelism: int = 1, workers: int = 0) -> Plan:
    """Place the chains of a graph: what runs Python goes to the workers in turn, all else stays in the main process.

    Args:
        graph: The job's.
        parallelism: Of stateful transformations that declare none.
        workers: How many processes there may be besides the main one.
    """
    chains = chains_of(graph, parallelism)
    places: dict[str, tuple[int, ...]] = {}
    placed = 0
    for chain in chains:
        if workers and chain.runs_python:
            turns = range(placed, placed + chain.parallelism)
            places[chain.id] = tuple(turn % workers + 1 for turn in turns)
            placed += chain.parallelism
        else:
            places[chain.id] = (MAIN,) * chain.parallelism
    return Plan(chains, places, min(workers, placed))
