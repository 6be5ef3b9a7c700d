"""Stored state of operators: written with the checkpoint it belongs to, read back whole or not at all.

Which chunks belong together is told in :mod:`etl.state`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import LiteralString, Protocol

from etl.codec import decode_rows, digest
from etl.errors import StateError
from etl.state import Fragment, StateChunk
from etl.store.database import Connection, StoreConnection
from etl.store.lease import Lease

CURE = "rows were deleted or changed by hand; nothing was read: put them back, from a backup of the store"

_COPY: LiteralString = (
    "COPY etl.state (job_id, incarnation, uid, key_group, checkpoint_id, sequence, rows, content, digest)"
    " FROM STDIN (FORMAT BINARY)"
)
_TYPES = ("text", "int8", "text", "int2", "int8", "int2", "int8", "bytea", "bytea")

# Of each chain the newest one only: what lies before its full chunk has been replaced by it.
_CHAINS: LiteralString = (
    "SELECT uid, key_group, sequence, rows, content, digest, checkpoint_id FROM ("
    "  SELECT *, max(checkpoint_id) FILTER (WHERE sequence = 0) OVER (PARTITION BY uid, key_group) AS since"
    "  FROM etl.state WHERE job_id = %s AND incarnation = %s AND checkpoint_id <= %s AND uid = ANY (%s)) AS chunk"
    " WHERE checkpoint_id >= since ORDER BY uid, key_group, checkpoint_id"
)
_SUBSUMED: LiteralString = (
    "DELETE FROM etl.state old USING etl.state newer"
    " WHERE newer.job_id = %(job)s AND newer.incarnation = %(incarnation)s"
    " AND newer.sequence = 0 AND newer.checkpoint_id <= %(oldest)s"
    " AND old.job_id = newer.job_id AND old.incarnation = newer.incarnation AND old.uid = newer.uid"
    " AND old.key_group = newer.key_group AND old.checkpoint_id < newer.checkpoint_id"
)
_FORGOTTEN: LiteralString = (
    "DELETE FROM etl.state WHERE job_id = %(job)s AND incarnation = %(incarnation)s AND uid NOT IN ("
    "  SELECT jsonb_object_keys(states) FROM etl.checkpoint WHERE job_id = %(job)s AND incarnation = %(incarnation)s)"
)


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


def restore(connection: Connection, key: CheckpointKey, states: Mapping[str, int]) -> dict[str, list[Fragment]]:
    """The state of operators at a checkpoint, each chain in its order.

    Args:
        connection: To the store.
        key: The checkpoint.
        states: By uid of an operator, how many chunks the checkpoint has counted.

    Raises:
        StateError: A chunk is missing or not the one that was written; names operator, key group and checkpoint.
    """
    found: dict[str, list[Fragment]] = {uid: [] for uid in states}
    if not states:
        return found
    rows_found = connection.execute(_CHAINS, [key.job_id, key.incarnation, key.checkpoint_id, list(states)])
    for uid, key_group, sequence, rows, content, stored_digest, checkpoint_id in rows_found:
        chunk = StateChunk(uid, key_group, sequence, rows, content, hashlib.sha256(content).digest())
        if _digest(key, checkpoint_id, chunk) != stored_digest:
            raise StateError(f"{_place(chunk, checkpoint_id)}, is not the one that was written: {CURE}")
        chain = found[chunk.uid]
        _require_next(chunk, checkpoint_id, chain[-1] if chain else None)
        chain.append(_fragment(chunk, checkpoint_id))
    for uid, counted in states.items():
        if counted != len(found[uid]):
            raise StateError(
                f'etl.state: checkpoint {key.checkpoint_id} has counted {counted} chunks of operator "{uid}", and'
                f" {len(found[uid])} are there: {CURE}"
            )
    return found


def prune(connection: StoreConnection, lease: Lease, oldest: int) -> None:
    """Drop chunks that a newer full one has replaced for all checkpoints from ``oldest`` on; the caller commits."""
    key = {"job": lease.job_id, "incarnation": lease.incarnation, "oldest": oldest}
    connection.driver.execute(_SUBSUMED, key)


def prune_forgotten(connection: StoreConnection, lease: Lease) -> None:
    """Drop the state of operators that no kept checkpoint has any more; the caller commits."""
    connection.driver.execute(_FORGOTTEN, {"job": lease.job_id, "incarnation": lease.incarnation})


def _require_next(chunk: StateChunk, checkpoint_id: int, before: Fragment | None) -> None:
    is_same = before is not None and before.key_group == chunk.key_group
    if chunk.sequence != (before.sequence + 1 if before is not None and is_same else 0):
        raise StateError(f"{_place(chunk, checkpoint_id)}, does not follow the one before it: {CURE}")


def _fragment(chunk: StateChunk, checkpoint_id: int) -> Fragment:
    try:
        rows = decode_rows(chunk.content)
    except StateError as error:
        raise StateError(f"{_place(chunk, checkpoint_id)}: {error}") from error
    return Fragment(chunk.key_group, chunk.sequence, rows)


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
