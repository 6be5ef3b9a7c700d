"""From a job's graph to the subtasks of an attempt, and the channels between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from etl.clock import Clock
from etl.graph import SNAPSHOT_UID, JobGraph, SourceNode
from etl.job import Job
from etl.operator import Operator
from etl.runtime.channel import Channel, InputGate
from etl.runtime.environment import RunEnvironment
from etl.runtime.plan import Chain, chains_of
from etl.runtime.recovery import SinkPart
from etl.runtime.source_subtask import SourceSettings, SourceSubtask
from etl.runtime.subtask import (
    OperatorSubtask,
    Output,
    Report,
    SinkSubtask,
    SnapshotSubtask,
    Subtask,
)
from etl.sink import Emit
from etl.source import Position, SourceContext
from etl.state import Fragment, RestoredState, StatefulOperator, ranks

Positions = Mapping[str, Mapping[str, Position]]
"""By uid of a source and id of a split where the next read starts."""


@dataclass(slots=True)
class Wiring:
    """Subtasks and channels under construction; producers are added before their consumers.

    Attributes:
        report: Where subtasks report to.
        emit: Where they announce steps.
        clock: Their time.
        subtasks: Those made so far.
        stateful: Names of those that keep state.
        gates: All input gates.
    """

    report: Report
    emit: Emit
    clock: Clock
    subtasks: list[Subtask] = field(default_factory=list)
    stateful: list[str] = field(default_factory=list)
    gates: list[InputGate] = field(default_factory=list)
    _outputs: dict[str, list[list[Output]]] = field(default_factory=dict)

    def produce(self, node_id: str, parallelism: int = 1) -> list[list[Output]]:
        """For each subtask of a node what it feeds; consumers wired later are seen too."""
        return self._outputs.setdefault(node_id, [[] for _ in range(parallelism)])

    def gate(self, inputs: Sequence[str]) -> InputGate:
        """A gate with one channel from each subtask of the given nodes."""
        feeds = [outputs for node_id in inputs for outputs in self._outputs[node_id]]
        gate = self.open_gate(len(feeds))
        for outputs, channel in zip(feeds, gate.channels, strict=True):
            outputs.append(channel)
        return gate

    def exchange(self, inputs: Sequence[str], parallelism: int, keys: Sequence[Sequence[int]]) -> list[InputGate]:
        """For each of several subtasks a gate with a channel from each subtask of the given nodes.

        Args:
            inputs: The nodes.
            parallelism: Number of subtasks.
            keys: For each node the numbers of its columns by which rows are exchanged.
        """
        if parallelism == 1:
            return [self.gate(inputs)]
        # Imported here: jobs without keyed state do not wait for NumPy.
        from etl.runtime.exchange import HashExchange

        numbers = self.input_numbers(inputs)
        gates = [self.open_gate(len(numbers)) for _ in range(parallelism)]
        feeds = [outputs for node_id in inputs for outputs in self._outputs[node_id]]
        for channel, (number, outputs) in enumerate(zip(numbers, feeds, strict=True)):
            outputs.append(HashExchange([gate.channels[channel] for gate in gates], keys[number]))
        return gates

    def input_numbers(self, inputs: Sequence[str]) -> list[int]:
        """For each channel of a gate with these inputs, which of them it belongs to."""
        return [number for number, node_id in enumerate(inputs) for _ in self._outputs[node_id]]

    def open_gate(self, inputs: int) -> InputGate:
        """A gate with so many channels, which the caller feeds."""
        gate = InputGate(inputs)
        self.gates.append(gate)
        return gate

    def close(self) -> None:
        """Release what the subtasks hold, in the stead of those that were never started."""
        with ExitStack() as unstarted:
            for subtask in self.subtasks:
                unstarted.callback(subtask.close)


def wire(
    wiring: Wiring,
    environment: RunEnvironment,
    parts: Sequence[SinkPart],
    positions: Positions,
    stored: dict[str, RestoredState],
) -> list[SourceSubtask]:
    """Make all subtasks of an attempt.

    Args:
        wiring: Gets them, also those made before an error.
        environment: Of the run.
        parts: The sinks, in the order of their declaration.
        positions: Where the sources go on.
        stored: By uid what operators remember; each takes its own out.

    Returns:
        Those of the sources, in the order of their declaration.
    """
    sources = [_wire_source(wiring, environment, node, positions) for node in environment.graph.sources]
    wire_chains(wiring, environment.job, environment.graph, stored)
    for node, part in zip(environment.graph.sinks, parts, strict=True):
        gate = wiring.gate([node.input])
        writer = node.sink.create_writer(part.context)
        mode = environment.job.mode
        wiring.subtasks.append(SinkSubtask(node.uid, wiring.report, gate, mode, writer, wiring.emit))
    return sources


def _wire_source(wiring: Wiring, environment: RunEnvironment, node: SourceNode, positions: Positions) -> SourceSubtask:
    context = SourceContext(node.uid, environment.job.base_dir, environment.follow, environment.warn)
    subtask = SourceSubtask(
        node.uid,
        wiring.report,
        node.source.create_enumerator(context),
        node.source.create_reader(context),
        positions.get(node.uid, {}),
        wiring.produce(node.id)[0],
        SourceSettings(
            node.schema.to_arrow(),
            environment.job.checkpoint.rows,
            environment.follow,
            environment.clock,
            node.event_time,
            environment.drain,
        ),
        wiring.emit,
    )
    wiring.subtasks.append(subtask)
    return subtask


def wire_chains(wiring: Wiring, job: Job, graph: JobGraph, stored: dict[str, RestoredState]) -> None:
    """Make the subtasks between sources and sinks.

    Args:
        wiring: Has the sources, and gets them.
        job: The declaration.
        graph: Its graph.
        stored: By uid what operators remember; each takes its own out.
    """
    chains = chains_of(graph, job.parallelism)
    cuts = iter(_wire_snapshots(wiring, chains))
    for chain in chains:
        gates = wiring.exchange(chain.inputs, chain.parallelism, _key_columns(graph, chain))
        outputs = wiring.produce(chain.id, chain.parallelism)
        # Taken out: what is restored lies in the operators' own columns and is not kept a second time.
        restored = stored.pop(chain.stateful.uid, None) if chain.stateful is not None else None
        for number, gate in enumerate(gates):
            operators = _operators(graph, chain)
            snapshots = next(cuts) if chain.stateful is not None else None
            uid = chain.subtask_uid(number)
            subtask = OperatorSubtask(
                uid,
                wiring.report,
                gate,
                job.mode,
                operators,
                outputs[number],
                snapshots,
                side_outputs={
                    tag: wiring.produce(node_id, chain.parallelism)[number] for tag, node_id in chain.sides.items()
                },
                inputs=wiring.input_numbers(chain.inputs),
                clock=wiring.clock,
            )
            wiring.subtasks.append(subtask)
            if chain.stateful is not None:
                wiring.stateful.append(uid)
            if restored is not None:
                _restore(operators[0], restored.fragments, number, chain.parallelism)
                if restored.watermark is not None:
                    subtask.resume(restored.watermark)


def _wire_snapshots(wiring: Wiring, chains: Sequence[Chain]) -> Sequence[Channel]:
    """For each stateful subtask the channel that takes its cuts."""
    subtasks = sum(chain.parallelism for chain in chains if chain.stateful is not None)
    if not subtasks:
        return ()
    gate = wiring.open_gate(subtasks)
    wiring.subtasks.append(SnapshotSubtask(SNAPSHOT_UID, wiring.report, gate, wiring.emit))
    return gate.channels


def _key_columns(graph: JobGraph, chain: Chain) -> list[list[int]]:
    """For each input of a chain, by which of its columns rows are exchanged."""
    if chain.stateful is None:
        return []
    found = []
    for node_id, keys in zip(chain.inputs, chain.stateful.keys_of_inputs, strict=True):
        names = graph.node(node_id).schema.names
        found.append([names.index(name) for name in keys])
    return found


def _operators(graph: JobGraph, chain: Chain) -> list[Operator]:
    # Imported here: jobs that transform nothing do not wait for polars.
    from etl.operators import operator_for

    return [
        operator_for(node.transformation, [graph.node(one).schema for one in node.inputs], node.schema)
        for node in chain.nodes
    ]


def _restore(operator: Operator, fragments: Sequence[Fragment], subtask: int, parallelism: int) -> None:
    """Give a subtask the state of its own key groups, however they were spread when it was stored."""
    # Imported here: jobs without keyed state do not wait for NumPy.
    from etl.key_group import groups_of_subtask

    assert isinstance(operator, StatefulOperator)
    groups = groups_of_subtask(subtask, parallelism)
    for rank in ranks(one for one in fragments if one.key_group in groups):
        operator.restore(rank)
