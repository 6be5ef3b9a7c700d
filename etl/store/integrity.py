"""Whether the stored cut is whole: what was deleted or turned back by hand is noticed before anything is read.

Every checkpoint counts the rows that belong to it, in the transaction that writes them. A position that is missing
would make a source read again what the target has; a missing handle would roll back rows of a completed checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from etl.errors import StateError
from etl.store import tables
from etl.store.checkpoints import Restored
from etl.store.database import StoreConnection
from etl.store.lease import Lease

_CURE = "rows were deleted or changed by hand; nothing was read: put them back, from a backup of the store"


@dataclass(frozen=True, slots=True)
class _Counted:
    """What a checkpoint says of itself; the columns of :data:`etl.store.tables.checkpoint`."""

    checkpoint_id: int
    epoch: int
    units: int
    positions: int
    splits: int


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
    _require("committable", lease.checkpoint_id, newest.units, len(restored.committables))
    _require_objects(restored)
    written = _positions_written(connection, lease)
    for row in kept:
        _require("position", row.checkpoint_id, row.positions, written.get(row.checkpoint_id, 0))
    splits = sum(len(positions) for positions in restored.positions.values())
    _require("position", lease.checkpoint_id, newest.splits, splits, what="splits")


def _require_head(kept: Sequence[_Counted], lease: Lease) -> None:
    newest = kept[-1].checkpoint_id if kept else 0
    if newest != lease.checkpoint_id:
        raise StateError(
            f"etl.head names checkpoint {lease.checkpoint_id} of incarnation {lease.incarnation}, and the newest in"
            f" etl.checkpoint is {newest or 'none'}: {_CURE}"
        )
    highest = max((row.epoch for row in kept), default=0)
    if highest >= lease.epoch:
        raise StateError(
            f"etl.head gave out epoch {lease.epoch}, but etl.checkpoint has one of epoch {highest}: an epoch is never"
            f" used twice: {_CURE}"
        )


def _require_objects(restored: Restored) -> None:
    """JSON has more kinds of values than were ever stored; ``null`` would even pass for no position at all."""
    for uid, splits in restored.positions.items():
        for split_id, position in splits.items():
            if not isinstance(position, dict):
                raise StateError(f'etl.position: that of source "{uid}", split "{split_id}", is no object: {_CURE}')
    for one in restored.committables:
        if not isinstance(one.payload, dict):
            raise StateError(f'etl.committable: the payload of sink "{one.uid}" is no object: {_CURE}')


def _require(table: str, checkpoint_id: int, counted: int, found: int, what: str = "rows") -> None:
    if counted != found:
        raise StateError(
            f"etl.{table}: checkpoint {checkpoint_id} has counted {counted} {what}, and {found} are there: {_CURE}"
        )


def _checkpoints(connection: StoreConnection, lease: Lease) -> Sequence[_Counted]:
    column = tables.checkpoint.c
    query = sa.select(column.checkpoint_id, column.epoch, column.units, column.positions, column.splits)
    mine = query.where(column.job_id == lease.job_id, column.incarnation == lease.incarnation)
    return [_Counted(*row) for row in connection.core.execute(mine.order_by(column.checkpoint_id))]


def _positions_written(connection: StoreConnection, lease: Lease) -> dict[int, int]:
    column = tables.position.c
    query = (
        sa.select(column.checkpoint_id, sa.func.count())
        .where(column.job_id == lease.job_id, column.incarnation == lease.incarnation)
        .group_by(column.checkpoint_id)
    )
    return {int(number): int(count) for number, count in connection.core.execute(query)}
