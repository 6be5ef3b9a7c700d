"""Whether the stored cut is whole: what was deleted or changed by hand is noticed before anything is read.

Every checkpoint counts the rows that belong to it, in the transaction that writes them, and each of these rows has a
digest of what it says. A position that is missing or changed would make a source read again what the target has, or
leave something out; a missing handle would roll back rows of a completed checkpoint. The digests of state are looked
at where it is read, in :mod:`etl.store.state`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import LiteralString

import sqlalchemy as sa

from etl.errors import StateError
from etl.store import tables
from etl.store.checkpoints import Restored
from etl.store.database import StoreConnection
from etl.store.lease import Lease
from etl.store.state import CURE

_MINE: LiteralString = " WHERE job_id = %s AND incarnation = %s AND digest <> "
_EDITED_POSITION: LiteralString = " FROM etl.position" + _MINE + tables.POSITION_DIGEST
_EDITED_COMMITTABLE: LiteralString = " FROM etl.committable" + _MINE + tables.COMMITTABLE_DIGEST
_EDITED_STATES: LiteralString = (
    " FROM etl.checkpoint WHERE job_id = %s AND incarnation = %s AND states_digest <> " + tables.STATES_DIGEST
)
_EDITED_SAVEPOINT: LiteralString = " FROM etl.savepoint WHERE job_id = %s AND digest <> " + tables.SAVEPOINT_DIGEST


@dataclass(frozen=True, slots=True)
class _Counted:
    """What a checkpoint says of itself; the columns of :data:`etl.store.tables.checkpoint`."""

    checkpoint_id: int
    epoch: int
    units: int
    positions: int
    splits: int
    chunks: int


def require_whole(connection: StoreConnection, lease: Lease, restored: Restored) -> None:
    """Compare the restored cut with what its checkpoints have counted.

    Raises:
        StateError: Names the table, the checkpoint and what is wrong.
    """
    kept = _checkpoints(connection, lease)
    _require_head(kept, lease)
    if not lease.checkpoint_id:
        return
    newest = kept[-1]
    _require_unchanged(connection, lease)
    _require_objects(restored)
    _require("committable", lease.checkpoint_id, newest.units, len(restored.committables))
    positions = _written(connection, lease, tables.position)
    chunks = _written(connection, lease, tables.state)
    for row in kept:
        _require("position", row.checkpoint_id, row.positions, positions.get(row.checkpoint_id, 0))
        _require("state", row.checkpoint_id, row.chunks, chunks.get(row.checkpoint_id, 0))
    splits = sum(len(positions) for positions in restored.positions.values())
    _require("position", lease.checkpoint_id, newest.splits, splits, what="splits")


def _require_head(kept: Sequence[_Counted], lease: Lease) -> None:
    newest = kept[-1].checkpoint_id if kept else 0
    if newest != lease.checkpoint_id:
        raise StateError(
            f"etl.head names checkpoint {lease.checkpoint_id} of incarnation {lease.incarnation}, and the newest in"
            f" etl.checkpoint is {newest or 'none'}: {CURE}"
        )
    highest = max((row.epoch for row in kept), default=0)
    if highest >= lease.epoch:
        raise StateError(
            f"etl.head gave out epoch {lease.epoch}, but etl.checkpoint has one of epoch {highest}: an epoch is never"
            f" used twice: {CURE}"
        )


def _require_unchanged(connection: StoreConnection, lease: Lease) -> None:
    """A position that somebody has edited may be a fine one, only not that of the rows in the target."""
    mine = [lease.job_id, lease.incarnation]
    edited = connection.driver.execute("SELECT uid, split_id, checkpoint_id" + _EDITED_POSITION, mine).fetchone()
    if edited is not None:
        uid, split_id, number = edited
        raise StateError(
            f'etl.position: that of source "{uid}", split "{split_id}", checkpoint {number}, is not the one that was'
            f" written: {CURE}"
        )
    edited = connection.driver.execute("SELECT uid, checkpoint_id" + _EDITED_COMMITTABLE, mine).fetchone()
    if edited is not None:
        uid, number = edited
        raise StateError(
            f'etl.committable: that of sink "{uid}", checkpoint {number}, is not the one that was written: {CURE}'
        )
    edited = connection.driver.execute("SELECT name" + _EDITED_SAVEPOINT, mine[:1]).fetchone()
    if edited is not None:
        raise StateError(f'etl.savepoint: "{edited[0]}" is not the one that was written: {CURE}')


def require_states_unchanged(connection: StoreConnection, lease: Lease) -> None:
    """What a checkpoint says of the state of operators: without an entry an operator would begin anew.

    Raises:
        StateError: Names the checkpoint.
    """
    mine = [lease.job_id, lease.incarnation]
    edited = connection.driver.execute("SELECT checkpoint_id" + _EDITED_STATES, mine).fetchone()
    if edited is not None:
        raise StateError(f"etl.checkpoint: states of checkpoint {edited[0]} are not those that were written: {CURE}")


def _require_objects(restored: Restored) -> None:
    """What was edited before there were digests got one all the same; ``null`` would even pass for no position."""
    for uid, splits in restored.positions.items():
        for split_id, position in splits.items():
            if not isinstance(position, dict):
                raise StateError(f'etl.position: that of source "{uid}", split "{split_id}", is no object: {CURE}')
    for one in restored.committables:
        if not isinstance(one.payload, dict):
            raise StateError(f'etl.committable: the payload of sink "{one.uid}" is no object: {CURE}')


def _require(table: str, checkpoint_id: int, counted: int, found: int, what: str = "rows") -> None:
    if counted != found:
        raise StateError(
            f"etl.{table}: checkpoint {checkpoint_id} has counted {counted} {what}, and {found} are there: {CURE}"
        )


def _checkpoints(connection: StoreConnection, lease: Lease) -> Sequence[_Counted]:
    column = tables.checkpoint.c
    query = sa.select(column.checkpoint_id, column.epoch, column.units, column.positions, column.splits, column.chunks)
    mine = query.where(column.job_id == lease.job_id, column.incarnation == lease.incarnation)
    return [_Counted(*row) for row in connection.core.execute(mine.order_by(column.checkpoint_id))]


def _written(connection: StoreConnection, lease: Lease, table: sa.Table) -> dict[int, int]:
    """By checkpoint, how many rows it has in a table."""
    column = table.c
    query = (
        sa.select(column.checkpoint_id, sa.func.count())
        .where(column.job_id == lease.job_id, column.incarnation == lease.incarnation)
        .group_by(column.checkpoint_id)
    )
    return {int(number): int(count) for number, count in connection.core.execute(query)}
