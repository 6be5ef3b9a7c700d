"""What a play has in place of the store: the last completed checkpoint, in the form in which it is stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from etl.codec import decode_rows
from etl.errors import InternalError
from etl.runtime.message import Message, PositionsSnapshotted, StateSnapshotted
from etl.source import Position
from etl.state import Fragment, RestoredState, StateChunk, StateSummary

Chain = tuple[StateChunk, ...]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A completed checkpoint.

    Attributes:
        checkpoint_id: Its number, 0 before the first one.
        positions: By uid and split, as JSON.
        chains: By uid and key group the chunks of state, as bytes.
        summaries: By uid of an operator; late rows are those since the beginning.
        output: By uid of a sink all rows that are visible.
    """

    checkpoint_id: int = 0
    positions: str = "{}"
    chains: Mapping[str, Mapping[int, Chain]] = field(default_factory=dict)
    summaries: Mapping[str, StateSummary] = field(default_factory=dict)
    output: Mapping[str, tuple[pa.RecordBatch, ...]] = field(default_factory=dict)

    def restored_positions(self) -> Mapping[str, Mapping[str, Position]]:
        """Where sources go on."""
        found: dict[str, dict[str, Any]] = json.loads(self.positions)
        return found

    def restored_state(self) -> dict[str, RestoredState]:
        """What operators remember, decoded; each chain in its order."""
        return {
            uid: RestoredState(self.fragments(uid), one.watermark, one.forgotten) for uid, one in self.summaries.items()
        }

    def fragments(self, uid: str) -> list[Fragment]:
        """All chains of an operator, decoded."""
        chains = self.chains.get(uid, {})
        return [_decoded(chunk) for group in sorted(chains) for chunk in chains[group]]

    def followed_by(
        self, messages: Iterable[Message], staged: Mapping[str, Iterable[pa.RecordBatch]]
    ) -> StoredCheckpoint:
        """The next checkpoint.

        Args:
            messages: What subtasks have acknowledged it with.
            staged: By uid of a sink the rows that become visible.
        """
        positions = {uid: dict(of_source) for uid, of_source in self.restored_positions().items()}
        chains = {uid: dict(of_operator) for uid, of_operator in self.chains.items()}
        summaries: dict[str, StateSummary] = {}
        for message in messages:
            match message:
                case PositionsSnapshotted():
                    positions.setdefault(message.uid, {}).update(message.positions)
                case StateSnapshotted():
                    before = summaries.get(message.uid)
                    summaries[message.uid] = message.summary if before is None else before.plus(message.summary)
                    for chunk in message.chunks:
                        of_operator = chains.setdefault(message.uid, {})
                        of_operator[chunk.key_group] = _appended(of_operator.get(chunk.key_group, ()), chunk)
                case _:
                    continue
        for uid, summary in summaries.items():
            _require_counted(uid, summary.chunks, chains.get(uid, {}))
            if uid in self.summaries:
                late_rows = self.summaries[uid].late_rows + summary.late_rows
                summaries[uid] = replace(summary, late_rows=late_rows)
        output = {uid: (*self.output.get(uid, ()), *batches) for uid, batches in staged.items()}
        return StoredCheckpoint(self.checkpoint_id + 1, json.dumps(positions), chains, summaries, output)


def _appended(chain: Chain, chunk: StateChunk) -> Chain:
    if chunk.sequence not in (0, len(chain)):
        raise InternalError(
            f'operator "{chunk.uid}": chunk {chunk.sequence} of key group {chunk.key_group} follows {len(chain)} others'
        )
    return (chunk,) if chunk.sequence == 0 else (*chain, chunk)


def _require_counted(uid: str, counted: int, chains: Mapping[int, Chain]) -> None:
    there = sum(map(len, chains.values()))
    if there != counted:
        raise InternalError(f'operator "{uid}" has counted {counted} chunks of state, and {there} are there')


def _decoded(chunk: StateChunk) -> Fragment:
    if hashlib.sha256(chunk.content).digest() != chunk.content_digest:
        raise InternalError(f'operator "{chunk.uid}": a chunk of key group {chunk.key_group} has another digest')
    return Fragment(chunk.key_group, chunk.sequence, decode_rows(chunk.content))
