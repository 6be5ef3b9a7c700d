"""Going back to a checkpoint: a new incarnation that begins with what that checkpoint holds.

The copy is a checkpoint itself, of the number that follows the last one: numbers grow over all incarnations, so none
ever stands for two things, in the store or in a target. What the abandoned incarnation has staged must have been
settled before; none of its handles goes along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import LiteralString

import sqlalchemy as sa

from etl.errors import FencedError, StateError
from etl.sink import Ledger
from etl.store import state, tables
from etl.store.checkpoints import states_digest
from etl.store.database import Connection, StoreConnection
from etl.store.lease import Lease
from etl.store.savepoints import Cut
from etl.store.state import CURE
from etl.store.tables import Trigger

_OF_CUT: LiteralString = " FROM etl.position WHERE job_id = %(job)s AND incarnation = %(incarnation)s"
_UP_TO: LiteralString = " AND checkpoint_id <= %(checkpoint)s"
_SOURCES: LiteralString = "SELECT DISTINCT uid" + _OF_CUT + _UP_TO
_EDITED: LiteralString = (
    "SELECT uid, split_id, checkpoint_id" + _OF_CUT + _UP_TO + " AND digest <> " + tables.POSITION_DIGEST
)
_COPIED: LiteralString = (
    " FROM (SELECT job_id, %(new_incarnation)s::int8 AS incarnation, coalesce(new_uid, uid) AS uid, split_id,"
    "              %(new_checkpoint)s::int8 AS checkpoint_id, position FROM ("
    "        SELECT DISTINCT ON (uid, split_id) * FROM etl.position WHERE job_id = %(job)s"
    "        AND incarnation = %(incarnation)s AND checkpoint_id <= %(checkpoint)s"
    "        ORDER BY uid, split_id, checkpoint_id DESC) AS newest"
    "  LEFT JOIN unnest(%(renamed)s::text[], %(new_uids)s::text[]) AS renamed (uid, new_uid) USING (uid)) AS copied"
)
_COPY_POSITIONS: LiteralString = (
    "INSERT INTO etl.position (job_id, incarnation, uid, split_id, checkpoint_id, position, digest)"
    " SELECT job_id, incarnation, uid, split_id, checkpoint_id, position, " + tables.POSITION_DIGEST + _COPIED
)


def sources_of(connection: Connection, cut: Cut) -> set[str]:
    """Uids of sources that have a position at a checkpoint."""
    key = {"job": cut.job_id, "incarnation": cut.incarnation, "checkpoint": cut.checkpoint_id}
    return {uid for (uid,) in connection.execute(_SOURCES, key)}


def rewind(
    connection: StoreConnection,
    lease: Lease,
    ledger: Ledger,
    run_id: int,
    cut: Cut,
    renamed: Mapping[str, str],
    rows_written_total: Mapping[str, int],
) -> int:
    """Begin a new incarnation, in the caller's transaction; the caller commits.

    Args:
        connection: In a transaction; not the owner's session, whose heartbeat goes on.
        lease: Of the owner, to whom everything of former epochs gave way.
        ledger: The store's own, for its fence.
        run_id: The run.
        cut: Where to go back to.
        renamed: New uids of sources and operators by the former ones.
        rows_written_total: What the job has written up to its last completed checkpoint, by sink uid.

    Returns:
        The number of the checkpoint that the new incarnation begins with.

    Raises:
        FencedError: A newer run owns the job.
        StateError: What is stored of the checkpoint is not whole.
    """
    number = lease.checkpoint_id + 1
    ledger.hold_fence(connection.driver)
    _copy_positions(connection, lease, cut, renamed, number)
    state.copy(connection.driver, cut, cut.states, lease.incarnation + 1, renamed)
    _record(connection, lease, run_id, cut, renamed, rows_written_total, number)
    # Last, and not first as in a checkpoint: the heartbeat shall not wait for the copy.
    head = tables.head
    done = connection.core.execute(
        sa.update(head)
        .where(
            head.c.job_id == lease.job_id,
            head.c.epoch == lease.epoch,
            head.c.incarnation == lease.incarnation,
            head.c.checkpoint_id == lease.checkpoint_id,
        )
        .values(incarnation=lease.incarnation + 1, checkpoint_id=number, failures=0)
    )
    if done.rowcount != 1:
        raise FencedError(f"epoch {lease.epoch} was overtaken by a newer run of the job")
    return number


def _copy_positions(
    connection: StoreConnection, lease: Lease, cut: Cut, renamed: Mapping[str, str], number: int
) -> None:
    key = {"job": cut.job_id, "incarnation": cut.incarnation, "checkpoint": cut.checkpoint_id}
    edited = connection.driver.execute(_EDITED, key).fetchone()
    if edited is not None:
        uid, split_id, checkpoint_id = edited
        raise StateError(
            f'etl.position: that of source "{uid}", split "{split_id}", checkpoint {checkpoint_id}, is not the one that'
            f" was written: {CURE}"
        )
    copied = connection.driver.execute(
        _COPY_POSITIONS,
        {
            **key,
            "new_incarnation": lease.incarnation + 1,
            "new_checkpoint": number,
            "renamed": list(renamed),
            "new_uids": list(renamed.values()),
        },
    )
    if copied.rowcount != cut.splits:
        raise StateError(
            f"etl.position: checkpoint {cut.checkpoint_id} has counted {cut.splits} splits, and {copied.rowcount} are"
            f" there: {CURE}"
        )


def _record(
    connection: StoreConnection,
    lease: Lease,
    run_id: int,
    cut: Cut,
    renamed: Mapping[str, str],
    rows_written_total: Mapping[str, int],
    number: int,
) -> None:
    key = {"job_id": lease.job_id, "incarnation": lease.incarnation + 1, "checkpoint_id": number}
    states = {renamed.get(uid, uid): asdict(one) for uid, one in cut.states.items()}
    connection.core.execute(
        sa.insert(tables.checkpoint).values(
            **key,
            epoch=lease.epoch,
            run_id=run_id,
            trigger=Trigger.REWIND,
            duration_ms=0,
            rows_read=0,
            rows_written={},
            rows_written_total=dict(rows_written_total),
            units=0,
            positions=cut.splits,
            splits=cut.splits,
            chunks=0,
            states=states,
            states_digest=states_digest(key, 0, states),
        )
    )
