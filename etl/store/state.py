"""Stored state of operators: written with the checkpoint it belongs to, read back whole or not at all.

Which chunks belong together is told in :mod:`etl.state`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import LiteralString, NamedTuple, Protocol

import pyarrow as pa
from msgspec import ValidationError, convert

from etl.codec import decode_all, decode_rows, digest
from etl.errors import StateError
from etl.state import Fragment, StateChunk
from etl.store.database import Connection, StoreConnection
from etl.store.lease import Lease

CURE = "rows were deleted or changed by hand; nothing was read: put them back, from a backup of the store"

_DECODED_TOGETHER = 16
"""Chunks that are decompressed in one go."""

_COPY: LiteralString = (
    "COPY etl.state (job_id, incarnation, uid, key_group, checkpoint_id, sequence, rows, content, digest)"
    " FROM STDIN (FORMAT BINARY)"
)
_TYPES = ("text", "int8", "text", "int2", "int8", "int2", "int8", "bytea", "bytea")

# Of each chain the newest one only: what lies before its full chunk has been replaced by it. And of an operator that
# was removed and has come back only what it has stored since.
_OF_CHAINS: LiteralString = (
    " FROM ("
    "  SELECT s.*, max(checkpoint_id) FILTER (WHERE sequence = 0) OVER (PARTITION BY uid, key_group) AS first"
    "  FROM etl.state s JOIN unnest(%s::text[], %s::int8[]) AS life (uid, since) USING (uid)"
    "  WHERE job_id = %s AND incarnation = %s AND checkpoint_id BETWEEN since AND %s"
    "  AND (%s::int2 IS NULL OR key_group = %s)) AS chunk"
    " WHERE checkpoint_id >= first ORDER BY uid, key_group, checkpoint_id"
)
_CHAINS: LiteralString = "SELECT uid, key_group, sequence, rows, content, digest, checkpoint_id" + _OF_CHAINS
_DIGESTS: LiteralString = "SELECT uid, key_group, sequence, rows, sha256(content), digest, checkpoint_id" + _OF_CHAINS
_COPY_CHUNKS: LiteralString = (
    "INSERT INTO etl.state (job_id, incarnation, uid, key_group, checkpoint_id, sequence, rows, content, digest)"
    " SELECT job_id, %s, copied.new_uid, key_group, checkpoint_id, sequence, rows, content, copied.new_digest"
    " FROM etl.state JOIN unnest(%s::text[], %s::int2[], %s::int8[], %s::text[], %s::bytea[])"
    " AS copied (uid, key_group, checkpoint_id, new_uid, new_digest) USING (uid, key_group, checkpoint_id)"
    " WHERE job_id = %s AND incarnation = %s"
)


@dataclass(frozen=True, slots=True)
class OperatorState:
    """What a checkpoint says of the state of an operator.

    Attributes:
        chunks: How many a restore reads.
        since: The first checkpoint that this state was part of; what the operator has stored before, in an earlier
            life, is no part of it.
        declared: What the operator does, for people.
        watermark: See :class:`etl.state.StateSummary`.
        forgotten: See there.
        late_rows: How many rows have come too late since then.
    """

    chunks: int
    since: int
    declared: str
    watermark: int | None = None
    late_rows: int = 0
    forgotten: int | None = None


def operator_states(stored: object) -> dict[str, OperatorState]:
    """The column ``states`` of a checkpoint.

    Raises:
        StateError: It holds something else.
    """
    try:
        return convert(stored, type=dict[str, OperatorState])
    except ValidationError as error:
        raise StateError(f"etl.checkpoint.states: {error}: {CURE}") from error


class CheckpointKey(Protocol):
    """Which checkpoint of which job; a lease is one."""

    @property
    def job_id(self) -> str:
        """The job."""

    @property
    def incarnation(self) -> int:
        """The line of checkpoints."""

    @property
    def checkpoint_id(self) -> int:
        """The checkpoint."""


@dataclass(frozen=True, slots=True)
class _Key:
    job_id: str
    incarnation: int
    checkpoint_id: int


def record(connection: StoreConnection, lease: Lease, checkpoint_id: int, chunks: Sequence[StateChunk]) -> None:
    """Write the chunks of a checkpoint in the transaction that completes it."""
    with connection.driver.cursor() as cursor, cursor.copy(_COPY) as copy:
        copy.set_types(_TYPES)
        for chunk in chunks:
            copy.write_row(
                (
                    lease.job_id,
                    lease.incarnation,
                    chunk.uid,
                    chunk.key_group,
                    checkpoint_id,
                    chunk.sequence,
                    chunk.rows,
                    chunk.content,
                    _digest(lease, checkpoint_id, chunk),
                )
            )


def restore(
    connection: Connection, key: CheckpointKey, states: Mapping[str, OperatorState]
) -> dict[str, list[Fragment]]:
    """The state of operators at a checkpoint, each chain in its order.

    Args:
        connection: To the store.
        key: The checkpoint.
        states: By uid of an operator, what the checkpoint says of it.

    Raises:
        StateError: A chunk is missing or not the one that was written; names operator, key group and checkpoint.
    """
    if not states:
        return {}
    found = _stored(connection, key, states)
    require_counted(key, states, {uid: len(chain) for uid, chain in found.items()})
    return {uid: list(_fragments(stored)) for uid, stored in found.items()}


def restore_group(
    connection: Connection, key: CheckpointKey, uid: str, state: OperatorState, key_group: int
) -> list[Fragment]:
    """The same of one operator and key group; whether none is missing, :func:`require_counted` tells of all together.

    Raises:
        StateError: See :func:`restore`.
    """
    return list(_fragments(_stored(connection, key, {uid: state}, key_group)[uid]))


def _stored(
    connection: Connection, key: CheckpointKey, states: Mapping[str, OperatorState], key_group: int | None = None
) -> dict[str, list[_Stored]]:
    found: dict[str, list[_Stored]] = {uid: [] for uid in states}
    for uid, group, sequence, rows, content, stored_digest, checkpoint_id in connection.execute(
        _CHAINS, _parameters(key, states, key_group), binary=True
    ):
        chunk = StateChunk(uid, group, sequence, rows, content, hashlib.sha256(content).digest())
        chain = found[uid]
        _require_unchanged(key, chunk, checkpoint_id, stored_digest)
        _require_next(chunk, checkpoint_id, chain[-1].chunk if chain else None)
        chain.append(_Stored(chunk, checkpoint_id))
    return found


def copy(
    connection: Connection,
    key: CheckpointKey,
    states: Mapping[str, OperatorState],
    incarnation: int,
    renamed: Mapping[str, str],
) -> None:
    """Give another incarnation the state of operators at a checkpoint; the content stays in the server.

    Args:
        connection: In the transaction that begins the incarnation.
        key: The checkpoint.
        states: By uid of an operator, what the checkpoint says of it.
        incarnation: The other one; the chunks keep their numbers in it.
        renamed: New uids by the former ones.

    Raises:
        StateError: As of :func:`restore`.
    """
    if not states:
        return
    copied: list[tuple[str, int, int, str, bytes]] = []
    counts = dict.fromkeys(states, 0)
    found = connection.execute(_DIGESTS, _parameters(key, states))
    for uid, key_group, sequence, rows, content_digest, stored_digest, checkpoint_id in found:
        chunk = StateChunk(uid, key_group, sequence, rows, b"", content_digest)
        _require_unchanged(key, chunk, checkpoint_id, stored_digest)
        counts[uid] += 1
        moved = replace(chunk, uid=renamed.get(uid, uid))
        target = _Key(key.job_id, incarnation, checkpoint_id)
        copied.append((uid, key_group, checkpoint_id, moved.uid, _digest(target, checkpoint_id, moved)))
    require_counted(key, states, counts)
    columns = [list(column) for column in zip(*copied, strict=True)] or [[], [], [], [], []]
    connection.execute(_COPY_CHUNKS, [incarnation, *columns, key.job_id, key.incarnation])


def _parameters(key: CheckpointKey, states: Mapping[str, OperatorState], key_group: int | None = None) -> list[object]:
    lives = [list(states), [one.since for one in states.values()]]
    return [*lives, key.job_id, key.incarnation, key.checkpoint_id, key_group, key_group]


def _require_unchanged(key: CheckpointKey, chunk: StateChunk, checkpoint_id: int, stored_digest: bytes) -> None:
    if _digest(key, checkpoint_id, chunk) != stored_digest:
        raise StateError(f"{_place(chunk, checkpoint_id)}, is not the one that was written: {CURE}")


def require_counted(key: CheckpointKey, states: Mapping[str, OperatorState], found: Mapping[str, int]) -> None:
    """Compare what a checkpoint says of the state of operators with what is there.

    Args:
        key: The checkpoint.
        states: By uid of an operator, what it says.
        found: How many chunks a restore reads.

    Raises:
        StateError: They differ.
    """
    for uid, counted in states.items():
        if counted.chunks != found[uid]:
            raise StateError(
                f"etl.state: checkpoint {key.checkpoint_id} has counted {counted.chunks} chunks of operator"
                f' "{uid}", and {found[uid]} are there: {CURE}'
            )


class _Stored(NamedTuple):
    chunk: StateChunk
    checkpoint_id: int


def _require_next(chunk: StateChunk, checkpoint_id: int, before: StateChunk | None) -> None:
    is_same = before is not None and before.key_group == chunk.key_group
    if chunk.sequence != (before.sequence + 1 if before is not None and is_same else 0):
        raise StateError(f"{_place(chunk, checkpoint_id)}, does not follow the one before it: {CURE}")


def _fragments(stored: Sequence[_Stored]) -> Iterator[Fragment]:
    for first in range(0, len(stored), _DECODED_TOGETHER):
        some = stored[first : first + _DECODED_TOGETHER]
        try:
            decoded = decode_all([one.chunk.content for one in some])
        except StateError:
            decoded = [_decoded(one) for one in some]  # one by one: the error names the chunk
        for (chunk, _), rows in zip(some, decoded, strict=True):
            yield Fragment(chunk.key_group, chunk.sequence, rows)


def _decoded(stored: _Stored) -> pa.RecordBatch:
    try:
        return decode_rows(stored.chunk.content)
    except StateError as error:
        raise StateError(f"{_place(*stored)}: {error}") from error


def _place(chunk: StateChunk, checkpoint_id: int) -> str:
    return f'etl.state: that of operator "{chunk.uid}", key group {chunk.key_group}, checkpoint {checkpoint_id}'


def _digest(key: CheckpointKey, checkpoint_id: int, chunk: StateChunk) -> bytes:
    return digest(
        key.job_id,
        key.incarnation,
        chunk.uid,
        chunk.key_group,
        checkpoint_id,
        chunk.sequence,
        chunk.rows,
        chunk.content_digest,
    )
