"""From a job's graph to the subtasks of an attempt, and the channels between them."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from etl.clock import Clock
from etl.graph import SNAPSHOT_UID, JobGraph, SourceNode
from etl.job import Job
from etl.lookup import Lookups
from etl.operator import Operator
from etl.runtime.channel import Channel, InputGate
from etl.runtime.plan import MAIN, Chain, Plan, plan_of
from etl.runtime.rebalance import RebalanceExchange
from etl.runtime.source_subtask import SourceSettings, SourceSubtask
from etl.runtime.split_assigner import SplitAssigner
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
from etl.state import RestoredState, ranks

if TYPE_CHECKING:
    # Not needed by workers, which do not open the store.
    from etl.runtime.environment import RunEnvironment
    from etl.runtime.recovery import SinkPart
    from etl.runtime.workers.frames import ChannelReceiver

Positions = Mapping[str, Mapping[str, Position]]
"""By uid of a source and id of a split where the next read starts."""


class Closable(Protocol):
    """Where threads wait for each other."""

    def close(self) -> None:
        """End all waiting, on both sides."""


class Links(Protocol):
    """The channels between processes."""

    def end(self, number: int, sender: int, receiver: int) -> socket.socket | None:
        """This process's end of a channel; None when it is one between two others.

        Args:
            number: Of the channel, from 0; the same in every process, since all wire the same plan.
            sender: The process that writes.
            receiver: The process that reads.
        """


@dataclass(frozen=True, slots=True)
class Feed:
    """What a subtask feeds; that of a subtask of another process stays empty."""

    place: int
    outputs: list[Output] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StateElsewhere:
    """Stored state of a subtask of another process."""

    place: int
    subtask: str
    state: RestoredState


@dataclass(slots=True)
class Wiring:
    """Subtasks and channels of one process under construction; producers are added before their consumers.

    Attributes:
        report: Where subtasks report to.
        emit: Where they announce steps.
        clock: Their time.
        here: Which process this is; only its subtasks are made.
        links: Channels to other processes; never asked where there are none.
        lookups: Gives lookups what they need; None where no database can be asked.
        subtasks: Those made so far.
        stateful: Those of them that keep state, by name.
        elsewhere: Stored state that other processes are to take in.
        receivers: Of the channels from other processes; each needs a thread.
        channels: Everything at which threads wait.
    """

    report: Report
    emit: Emit
    clock: Clock
    here: int = MAIN
    links: Links | None = None
    lookups: Lookups | None = None
    subtasks: list[Subtask] = field(default_factory=list)
    stateful: dict[str, OperatorSubtask] = field(default_factory=dict)
    elsewhere: list[StateElsewhere] = field(default_factory=list)
    receivers: list[ChannelReceiver] = field(default_factory=list)
    channels: list[Closable] = field(default_factory=list)
    _feeds: dict[str, list[Feed]] = field(default_factory=dict)
    _links_made: int = 0

    def produce(self, node_id: str, places: Sequence[int] = (MAIN,)) -> list[list[Output]]:
        """For each subtask of a node what it feeds; consumers wired later are seen too."""
        feeds = self._feeds.setdefault(node_id, [Feed(place) for place in places])
        return [feed.outputs for feed in feeds]

    def gate(self, inputs: Sequence[str]) -> InputGate:
        """A gate of a subtask of the main process, with one channel from each subtask of the given nodes."""
        (gate,) = self.exchange(inputs, (MAIN,), None)
        return gate

    def input_numbers(self, inputs: Sequence[str]) -> list[int]:
        """For each channel of a gate with these inputs, which of them it belongs to."""
        return [number for number, node_id in enumerate(inputs) for _ in self._feeds[node_id]]

    def forward(self, node_id: str, places: Sequence[int]) -> list[InputGate]:
        """For each of as many subtasks as a node has a gate with a channel from the one of the same number.

        Args:
            node_id: The node.
            places: The process of each subtask.
        """
        gates = [self.open_gate(1) for _ in places]
        for feed, place, gate in zip(self._feeds[node_id], places, gates, strict=True):
            channel = self._connect(feed.place, place, gate.channels[0])
            if feed.place == self.here:
                feed.outputs.append(channel)
        return gates

    def exchange(
        self, inputs: Sequence[str], places: Sequence[int], keys: Sequence[Sequence[int]] | None
    ) -> list[InputGate]:
        """For each of several subtasks a gate with a channel from each subtask of the given nodes.

        Args:
            inputs: The nodes.
            places: The process of each subtask; the gate of one elsewhere is fed by nobody.
            keys: For each node the numbers of its columns by which rows are exchanged; None to deal batches out.
        """
        gates = [self.open_gate(len(self.input_numbers(inputs))) for _ in places]
        feeds = [(number, feed) for number, node_id in enumerate(inputs) for feed in self._feeds[node_id]]
        for index, (number, feed) in enumerate(feeds):
            channels = [
                self._connect(feed.place, place, gate.channels[index])
                for place, gate in zip(places, gates, strict=True)
            ]
            if feed.place == self.here:
                by = None if keys is None else keys[number]
                feed.outputs.append(channels[0] if len(channels) == 1 else _exchange(channels, index, by))
        return gates

    def _connect(self, sender: int, receiver: int, channel: Channel) -> Output:
        """What a sender puts its elements into, so that they come to the receiver's channel."""
        if sender == receiver:
            return channel
        assert self.links is not None
        number = self._links_made
        self._links_made += 1
        end = self.links.end(number, sender, receiver)
        if end is None:
            return channel
        # Imported here: most runs have one process.
        from etl.runtime.workers.frames import ChannelReceiver, ChannelSender

        if receiver == self.here:
            incoming = ChannelReceiver(f"channel-{number}", end, channel, self.report)
            self.receivers.append(incoming)
            self.channels.append(incoming)
            return channel
        outgoing = ChannelSender(end)
        self.channels.append(outgoing)
        return outgoing

    def open_gate(self, inputs: int) -> InputGate:
        """A gate with so many channels, which the caller feeds."""
        gate = InputGate(inputs)
        self.channels.append(gate)
        return gate

    def close(self) -> None:
        """Release what the subtasks hold, in the stead of those that were never started."""
        with ExitStack() as unstarted:
            for subtask in self.subtasks:
                unstarted.callback(subtask.close)


def _exchange(channels: Sequence[Output], sender: int, keys: Sequence[int] | None) -> Output:
    if keys is None:
        return RebalanceExchange(channels, sender)
    # Imported here: jobs without keyed state do not wait for NumPy.
    from etl.runtime.exchange import HashExchange

    return HashExchange(channels, keys)


def wire(
    wiring: Wiring,
    environment: RunEnvironment,
    parts: Sequence[SinkPart],
    positions: Positions,
    stored: dict[str, RestoredState],
    plan: Plan,
) -> list[SourceSubtask]:
    """Make all subtasks of an attempt that run in the main process.

    Args:
        wiring: Gets them, also those made before an error.
        environment: Of the run.
        parts: The sinks, in the order of their declaration.
        positions: Where the sources go on.
        stored: By uid what operators remember; each takes its own out.
        plan: Of the job.

    Returns:
        Those of the sources, in the order of their declaration.
    """
    sources = [one for node in environment.graph.sources for one in _wire_source(wiring, environment, node, positions)]
    wire_chains(wiring, environment.job, environment.graph, stored, plan)
    for node, part in zip(environment.graph.sinks, parts, strict=True):
        gate = wiring.gate([node.input])
        writer = node.sink.create_writer(part.context)
        mode = environment.job.mode
        wiring.subtasks.append(SinkSubtask(node.uid, wiring.report, gate, mode, writer, wiring.emit))
    return sources


def _wire_source(
    wiring: Wiring, environment: RunEnvironment, node: SourceNode, positions: Positions
) -> list[SourceSubtask]:
    context = SourceContext(node.uid, environment.job.base_dir, environment.follow, environment.warn)
    assigner = SplitAssigner(
        node.source.create_enumerator(context),
        positions.get(node.uid, {}),
        node.parallelism,
        follow=environment.follow,
        clock=environment.clock,
    )
    rows = environment.job.checkpoint.rows
    settings = SourceSettings(
        node.schema.to_arrow(),
        None if rows is None else -(-rows // node.parallelism),
        environment.follow,
        environment.clock,
        node.event_time,
        environment.drain,
    )
    subtasks = []
    for number, outputs in enumerate(wiring.produce(node.id, (MAIN,) * node.parallelism)):
        reader = node.source.create_reader(context)
        subtasks.append(
            SourceSubtask(node.uid, wiring.report, assigner, reader, outputs, settings, wiring.emit, number)
        )
        wiring.subtasks.append(subtasks[-1])
    return subtasks


def wire_chains(
    wiring: Wiring, job: Job, graph: JobGraph, stored: dict[str, RestoredState], plan: Plan | None = None
) -> None:
    """Make the subtasks between sources and sinks that run in this process.

    Args:
        wiring: Has the sources, and gets them.
        job: The declaration.
        graph: Its graph.
        stored: By uid what operators remember; each takes its own out.
        plan: Of the job; one for a single process when left out.
    """
    plan = plan or plan_of(graph, job.parallelism)
    cuts = iter(_wire_snapshots(wiring, plan))
    for chain in plan.chains:
        places = plan.places[chain.id]
        if chain.forwarded:
            gates = wiring.forward(chain.inputs[0], places)
        else:
            gates = wiring.exchange(chain.inputs, places, _key_columns(graph, chain))
        outputs = wiring.produce(chain.id, places)
        side_outputs = {tag: wiring.produce(node_id, places) for tag, node_id in chain.sides.items()}
        # Taken out: what is restored lies in the operators' own columns and is not kept a second time.
        restored = stored.pop(chain.stateful.uid, None) if chain.stateful is not None else None
        for number, (place, gate) in enumerate(zip(places, gates, strict=True)):
            uid = chain.subtask_uid(number)
            if place == wiring.here:
                subtask = OperatorSubtask(
                    uid,
                    wiring.report,
                    gate,
                    job.mode,
                    _operators(wiring, graph, chain),
                    outputs[number],
                    next(cuts) if chain.stateful is not None else None,
                    side_outputs={tag: of_side[number] for tag, of_side in side_outputs.items()},
                    inputs=None if chain.forwarded else wiring.input_numbers(chain.inputs),
                    clock=wiring.clock,
                )
                wiring.subtasks.append(subtask)
                if chain.stateful is not None:
                    wiring.stateful[uid] = subtask
            if restored is not None:
                _restore(wiring, place, uid, _part_of(restored, number, chain.parallelism))


def _wire_snapshots(wiring: Wiring, plan: Plan) -> Sequence[Channel]:
    """For each stateful subtask of this process the channel that takes its cuts."""
    stateful = [chain for chain in plan.chains if chain.stateful is not None]
    subtasks = sum(plan.places[chain.id].count(wiring.here) for chain in stateful)
    if not subtasks:
        return ()
    gate = wiring.open_gate(subtasks)
    uid = SNAPSHOT_UID if wiring.here == MAIN else f"{SNAPSHOT_UID}[{wiring.here}]"
    wiring.subtasks.append(SnapshotSubtask(uid, wiring.report, gate, wiring.emit))
    return gate.channels


def _key_columns(graph: JobGraph, chain: Chain) -> list[list[int]] | None:
    """For each input of a chain, by which of its columns rows are exchanged; None where there is no key."""
    if chain.stateful is None:
        return None
    found = []
    for node_id, keys in zip(chain.inputs, chain.stateful.keys_of_inputs, strict=True):
        names = graph.node(node_id).schema.names
        found.append([names.index(name) for name in keys])
    return found


def _operators(wiring: Wiring, graph: JobGraph, chain: Chain) -> list[Operator]:
    # Imported here: jobs that transform nothing do not wait for polars.
    from etl.operators import operator_for

    return [
        operator_for(
            node.transformation,
            [graph.node(one).schema for one in node.inputs],
            node.schema,
            wiring.clock,
            wiring.lookups,
        )
        for node in chain.nodes
    ]


def _part_of(restored: RestoredState, subtask: int, parallelism: int) -> RestoredState:
    """The state of a subtask's own key groups, however they were spread when it was stored."""
    # Imported here: jobs without keyed state do not wait for NumPy.
    from etl.key_group import groups_of_subtask

    groups = groups_of_subtask(subtask, parallelism)
    fragments = [one for one in restored.fragments if one.key_group in groups]
    return RestoredState(fragments, restored.watermark, restored.forgotten)


def _restore(wiring: Wiring, place: int, uid: str, restored: RestoredState) -> None:
    if place != wiring.here:
        wiring.elsewhere.append(StateElsewhere(place, uid, restored))
        return
    for rank in ranks(restored.fragments):
        wiring.stateful[uid].restore(rank)
    if restored.watermark is not None:
        wiring.stateful[uid].resume(restored.watermark, restored.forgotten)
