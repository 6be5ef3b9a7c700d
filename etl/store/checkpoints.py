"""Completed checkpoints: written in one transaction, restored as one consistent cut, pruned when subsumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, LiteralString

import sqlalchemy as sa
from psycopg.types.json import Jsonb
from sqlalchemy.dialects.postgresql import JSONB, distinct_on

from etl.errors import FencedError
from etl.sink import Committable
from etl.source import Position
from etl.state import StateChunk, StateSummary
from etl.store import state, tables
from etl.store.database import StoreConnection
from etl.store.lease import Lease
from etl.store.state import OperatorState
from etl.store.tables import RunStatus, Trigger

_KEY: LiteralString = (
    " FROM (SELECT %(job_id)s::text AS job_id, %(incarnation)s::int8 AS incarnation,"
    "              %(checkpoint_id)s::int8 AS checkpoint_id) AS key,"
)
# Arrays and not one parameter a split: a checkpoint may move more splits than a statement may have parameters.
_INSERT_POSITIONS: LiteralString = (
    "INSERT INTO etl.position (job_id, incarnation, uid, split_id, checkpoint_id, position, digest)"
    " SELECT job_id, incarnation, uid, split_id, checkpoint_id, position, "
    + tables.POSITION_DIGEST
    + _KEY
    + " unnest(%(uids)s::text[], %(splits)s::text[], %(positions)s::jsonb[]) AS moved (uid, split_id, position)"
)
_INSERT_COMMITTABLES: LiteralString = (
    "INSERT INTO etl.committable (job_id, incarnation, checkpoint_id, uid, subtask, epoch, rows, payload, digest)"
    " SELECT job_id, incarnation, checkpoint_id, uid, subtask, epoch, rows, payload, "
    + tables.COMMITTABLE_DIGEST
    + _KEY
    + " unnest(%(uids)s::text[], %(subtasks)s::int4[], %(epochs)s::int8[], %(rows)s::int8[], %(payloads)s::jsonb[])"
    " AS staged (uid, subtask, epoch, rows, payload)"
)


@dataclass(frozen=True, slots=True)
class CompletedCheckpoint:
    """Everything that one store transaction records to complete a checkpoint.

    Attributes:
        checkpoint_id: Its number; exactly one more than the last completed one.
        trigger: Why it was taken.
        positions: By source uid and split id, where the next read starts; only those that moved.
        committables: Handles of what the sinks staged.
        rows_read: Records of this checkpoint, all sources.
        rows_written: Rows of this checkpoint by sink uid.
        duration_ms: From trigger to the last acknowledgement.
        state: What operators remember, as far as it has changed.
        summaries: By uid of an operator, its state in a few figures.
        states: The same with what else is recorded of each operator.
        rows_written_total: Rows of all checkpoints of the job up to this one, by sink uid.
        ending: Whether the run ends with it: nothing was read after it.
    """

    checkpoint_id: int
    trigger: Trigger
    positions: Mapping[str, Mapping[str, Position]]
    committables: Sequence[Committable]
    rows_read: int
    rows_written: Mapping[str, int]
    duration_ms: int
    state: Sequence[StateChunk] = ()
    summaries: Mapping[str, StateSummary] = field(default_factory=dict)
    states: Mapping[str, OperatorState] = field(default_factory=dict)
    rows_written_total: Mapping[str, int] = field(default_factory=dict)
    ending: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """The cut to start from.

    Attributes:
        checkpoint_id: The last completed checkpoint, 0 before the first.
        positions: By source uid and split id.
        committables: Handles recorded in that checkpoint.
        settled: Whether a run has ended well at that checkpoint: all of it is visible then.
        states: By uid of an operator, what the checkpoint says of its state.
        rows_written_total: Rows that the job has written up to the checkpoint, by sink uid.
    """

    checkpoint_id: int
    positions: Mapping[str, Mapping[str, Position]] = field(default_factory=dict)
    committables: Sequence[Committable] = ()
    settled: bool = False
    states: Mapping[str, OperatorState] = field(default_factory=dict)
    rows_written_total: Mapping[str, int] = field(default_factory=dict)


def advance_head(connection: StoreConnection, lease: Lease, checkpoint_id: int) -> None:
    """Compare-and-set of the head, inside the completing transaction and before anything else in it.

    Raises:
        FencedError: The job has a newer epoch or another checkpoint than this run believes.
    """
    head = tables.head
    done = connection.core.execute(
        sa.update(head)
        .where(head.c.job_id == lease.job_id, head.c.epoch == lease.epoch, head.c.checkpoint_id == checkpoint_id - 1)
        .values(checkpoint_id=checkpoint_id, failures=0)
    )
    if done.rowcount != 1:
        raise FencedError(f"checkpoint {checkpoint_id} of epoch {lease.epoch} was refused: a newer run owns the job")


def record(connection: StoreConnection, lease: Lease, run_id: int, completed: CompletedCheckpoint) -> None:
    """Write a checkpoint after :func:`advance_head`, in the same transaction. The caller commits."""
    key = {
        "job_id": lease.job_id,
        "incarnation": lease.incarnation,
        "checkpoint_id": completed.checkpoint_id,
    }
    states = {uid: asdict(one) for uid, one in completed.states.items()}
    connection.core.execute(
        sa.insert(tables.checkpoint).values(
            **key,
            epoch=lease.epoch,
            run_id=run_id,
            trigger=completed.trigger,
            duration_ms=completed.duration_ms,
            rows_read=completed.rows_read,
            rows_written=dict(completed.rows_written),
            rows_written_total=dict(completed.rows_written_total),
            units=len(completed.committables),
            positions=len(_moved(completed)),
            splits=_splits(connection, lease, completed),
            chunks=len(completed.state),
            states=states,
            states_digest=states_digest(key, len(completed.state), states),
        )
    )
    if moved := _moved(completed):
        _record_positions(connection, key, completed, moved)
    if completed.committables:
        _record_committables(connection, key, completed.committables)
    if completed.state:
        state.record(connection, lease, completed.checkpoint_id, completed.state)


def _record_positions(
    connection: StoreConnection,
    key: Mapping[str, Any],
    completed: CompletedCheckpoint,
    moved: Sequence[tuple[str, str]],
) -> None:
    connection.driver.execute(
        _INSERT_POSITIONS,
        {
            **key,
            "uids": [uid for uid, _ in moved],
            "splits": [split_id for _, split_id in moved],
            "positions": [Jsonb(dict(completed.positions[uid][split_id])) for uid, split_id in moved],
        },
    )


def _record_committables(connection: StoreConnection, key: Mapping[str, Any], units: Sequence[Committable]) -> None:
    connection.driver.execute(
        _INSERT_COMMITTABLES,
        {
            **key,
            "uids": [one.uid for one in units],
            "subtasks": [one.subtask for one in units],
            "epochs": [one.epoch for one in units],
            "rows": [one.rows for one in units],
            "payloads": [Jsonb(dict(one.payload)) for one in units],
        },
    )


def _moved(completed: CompletedCheckpoint) -> list[tuple[str, str]]:
    return [(uid, split_id) for uid, splits in completed.positions.items() for split_id in splits]


def _splits(connection: StoreConnection, lease: Lease, completed: CompletedCheckpoint) -> int:
    """How many splits have a position with this checkpoint: those of the one before, and those that are new."""
    moved = _moved(completed)
    row = connection.driver.execute(
        "SELECT coalesce((SELECT splits FROM etl.checkpoint WHERE job_id = %(job)s AND incarnation = %(incarnation)s"
        "                 AND checkpoint_id = %(before)s), 0) + count(*)"
        " FROM unnest(%(uids)s::text[], %(splits)s::text[]) AS moved (uid, split_id)"
        " WHERE NOT EXISTS (SELECT FROM etl.position p WHERE p.job_id = %(job)s AND p.incarnation = %(incarnation)s"
        "                   AND p.uid = moved.uid AND p.split_id = moved.split_id"
        "                   AND p.checkpoint_id <= %(before)s)",
        {
            "job": lease.job_id,
            "incarnation": lease.incarnation,
            "before": completed.checkpoint_id - 1,
            "uids": [uid for uid, _ in moved],
            "splits": [split_id for _, split_id in moved],
        },
    ).fetchone()
    assert row is not None
    return int(row[0])


def restore(connection: StoreConnection, lease: Lease) -> Restored:
    """Read the cut of the last completed checkpoint; called by the owner, whose claim has locked out others.

    The checkpoint's number comes from the claim itself: it was read under the lock of the head row.
    """
    states, rows_written_total = _of_checkpoint(connection, lease)
    return Restored(
        checkpoint_id=lease.checkpoint_id,
        positions=_positions(connection, lease),
        committables=_committables(connection, lease),
        settled=_is_settled(connection, lease),
        states=state.operator_states(states),
        rows_written_total=rows_written_total,
    )


def _positions(connection: StoreConnection, lease: Lease) -> dict[str, dict[str, Position]]:
    column = tables.position.c
    newest = (
        sa.select(column.uid, column.split_id, column.position)
        .ext(distinct_on(column.uid, column.split_id))
        .where(
            column.job_id == lease.job_id,
            column.incarnation == lease.incarnation,
            column.checkpoint_id <= lease.checkpoint_id,
        )
        .order_by(column.uid, column.split_id, column.checkpoint_id.desc())
    )
    found: dict[str, dict[str, Position]] = {}
    for uid, split_id, position in connection.core.execute(newest):
        found.setdefault(uid, {})[split_id] = position
    return found


def _committables(connection: StoreConnection, lease: Lease) -> list[Committable]:
    column = tables.committable.c
    query = sa.select(
        column.uid, column.subtask, column.checkpoint_id, column.epoch, column.rows, column.payload
    ).where(
        column.job_id == lease.job_id,
        column.incarnation == lease.incarnation,
        column.checkpoint_id == lease.checkpoint_id,
    )
    return [Committable(*row) for row in connection.core.execute(query.order_by(column.uid, column.subtask))]


def states_digest(key: Mapping[str, Any], chunks: int, states: Mapping[str, Any]) -> sa.ColumnElement[bytes]:
    """As :data:`etl.store.tables.STATES_DIGEST`, of a row that is not there yet."""
    parts = (
        sa.cast(key["job_id"], sa.Text),
        sa.cast(key["incarnation"], sa.BigInteger),
        sa.cast(key["checkpoint_id"], sa.BigInteger),
        sa.cast(chunks, sa.Integer),
        sa.cast(states, JSONB),
    )
    return sa.func.sha256(sa.func.convert_to(sa.cast(sa.func.jsonb_build_array(*parts), sa.Text), "UTF8"))


def _of_checkpoint(connection: StoreConnection, lease: Lease) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    """States and total rows of the last completed checkpoint; empty before the first."""
    column = tables.checkpoint.c
    query = sa.select(column.states, column.rows_written_total).where(
        column.job_id == lease.job_id,
        column.incarnation == lease.incarnation,
        column.checkpoint_id == lease.checkpoint_id,
    )
    found = connection.core.execute(query).one_or_none()
    return ({}, {}) if found is None else (found[0], found[1])


def _is_settled(connection: StoreConnection, lease: Lease) -> bool:
    column = tables.run.c
    ended_well = sa.select(column.run_id).where(
        column.job_id == lease.job_id,
        column.checkpoint_id == lease.checkpoint_id,
        column.status.in_([RunStatus.SUCCEEDED, RunStatus.STOPPED]),
    )
    return bool(connection.core.execute(sa.select(ended_well.exists())).scalar_one())
