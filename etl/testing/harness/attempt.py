"""An attempt that is driven step by step: the subtasks of a run, without threads."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace

import pyarrow as pa

from etl.clock import Clock
from etl.errors import ConfigurationError, InternalError
from etl.graph import JobGraph, SourceNode
from etl.job import Job
from etl.lookup import LookupContext
from etl.runtime.channel import InputGate
from etl.runtime.message import Message, PositionsSnapshotted, StateSnapshotted, TakeSnapshot, UnitStaged
from etl.runtime.source_subtask import SourceSettings, SourceSubtask
from etl.runtime.split_assigner import SplitAssigner
from etl.runtime.subtask import SinkSubtask
from etl.runtime.wiring import Wiring, wire_chains
from etl.sink import Connection
from etl.testing.harness.ends import CollectingWriter, ScriptEnumerator, ScriptReader
from etl.testing.harness.memory import StoredCheckpoint


class _UnboundedWiring(Wiring):
    """Nobody could make room in a full channel while its only thread waits for it."""

    def open_gate(self, inputs: int) -> InputGate:
        gate = InputGate(inputs, rows_max=sys.maxsize, bytes_max=sys.maxsize)
        self.channels.append(gate)
        return gate


def _lookup_context(uid: str, clock: Clock) -> LookupContext:
    def connect(role: str) -> Connection:  # noqa: ARG001 - as the contract has it
        raise ConfigurationError(
            f'lookup join "{uid}" asks a database, and a play opens none; give the job a Lookup that holds its rows'
        )

    return LookupContext(uid, connect, clock)


class SteppedAttempt:
    """From the restore of a checkpoint to a crash, or to the end of the script.

    Args:
        job: The declaration.
        graph: Its graph.
        batches: By uid what the sources read.
        parallelism: Of operators that declare none.
        stored: Where it begins.
        clock: Time.
    """

    def __init__(
        self,
        job: Job,
        graph: JobGraph,
        batches: Mapping[str, Sequence[pa.RecordBatch]],
        parallelism: int,
        stored: StoredCheckpoint,
        clock: Clock,
    ) -> None:
        self._stored = stored
        self._inbox: list[Message] = []
        self._wiring = _UnboundedWiring(
            self._inbox.append,
            lambda *_event, **_fields: None,
            clock,
            lookups=lambda uid, _database: _lookup_context(uid, clock),
        )
        self._writers: dict[str, CollectingWriter] = {}
        self._readers: dict[str, ScriptReader] = {}
        try:
            self._wire(job, graph, batches, parallelism)
        except BaseException:
            self.close()
            raise

    def _wire(
        self, job: Job, graph: JobGraph, batches: Mapping[str, Sequence[pa.RecordBatch]], parallelism: int
    ) -> None:
        self._sources = {node.uid: self._source(node, batches[node.uid]) for node in graph.sources}
        scaled = copy(job)
        scaled.parallelism = parallelism
        wire_chains(self._wiring, scaled, _in_script_order(graph), self._stored.restored_state())
        for node in graph.sinks:
            gate = self._wiring.gate([node.input])
            writer = self._writers[node.uid] = CollectingWriter(node.uid)
            self._wiring.subtasks.append(
                SinkSubtask(node.uid, self._wiring.report, gate, job.mode, writer, self._wiring.emit)
            )
        for source in self._sources.values():
            source.begin()
        self._settle()

    def _source(self, node: SourceNode, batches: Sequence[pa.RecordBatch]) -> SourceSubtask:
        reader = self._readers[node.uid] = ScriptReader(batches)
        wiring = self._wiring
        subtask = SourceSubtask(
            node.uid,
            wiring.report,
            SplitAssigner(ScriptEnumerator(), self._stored.restored_positions().get(node.uid, {})),
            reader,
            wiring.produce(node.id)[0],
            SourceSettings(node.schema.to_arrow(), None, False, wiring.clock, node.event_time),
            wiring.emit,
        )
        wiring.subtasks.append(subtask)
        return subtask

    @property
    def uncommitted(self) -> Mapping[str, Sequence[pa.RecordBatch]]:
        """By uid of a sink what it was given since the last checkpoint."""
        return {uid: writer.open for uid, writer in self._writers.items()}

    def read(self, source: str) -> None:
        """Read the next batch of a source, and let it flow through to the sinks."""
        self._sources[source].poll()
        self._settle()

    def advance(self, source: str, time: int) -> None:
        """Let a source say that event time has come to a moment."""
        self._sources[source].advance(time)
        self._readers[source].touch()
        self._settle()

    def drain(self) -> None:
        """Close what is still open in event time."""
        for source in self._sources.values():
            source.drain()
        self._settle()

    def tick(self) -> None:
        """Do what is due by the clock."""
        self._settle()

    def checkpoint(self) -> StoredCheckpoint:
        """Send barriers from all sources, and complete the checkpoint."""
        number = self._stored.checkpoint_id + 1
        self._inbox.clear()
        for source in self._sources.values():
            source.command(TakeSnapshot(number))
            source.poll()
        self._settle()
        self._require_acknowledged()
        self._stored = self._stored.followed_by(
            self._inbox, {uid: writer.staged for uid, writer in self._writers.items()}
        )
        return self._stored

    def close(self) -> None:
        """Release what the operators hold; may be called again."""
        self._wiring.close()
        self._wiring.subtasks.clear()

    def _settle(self) -> None:
        """Until nothing flows any more."""
        between = [subtask for subtask in self._wiring.subtasks if not isinstance(subtask, SourceSubtask)]
        while any(subtask.poll() for subtask in between):
            pass

    def _require_acknowledged(self) -> None:
        acknowledged = {
            message.subtask if isinstance(message, StateSnapshotted) else message.uid
            for message in self._inbox
            if isinstance(message, PositionsSnapshotted | StateSnapshotted | UnitStaged)
        }
        missing = {*self._sources, *self._writers, *self._wiring.stateful} - acknowledged
        if missing:
            raise InternalError(f"a barrier did not come to {', '.join(sorted(missing))}")


def _in_script_order(graph: JobGraph) -> JobGraph:
    """The graph with one subtask a source, which reads what the script says, in its order."""
    nodes = (replace(node, parallelism=1) if isinstance(node, SourceNode) else node for node in graph.nodes)
    return JobGraph(tuple(nodes))
