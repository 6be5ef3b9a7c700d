"""Pruning: what is stored goes when no kept checkpoint reads it any more.

Kept are the newest checkpoints of a job, and those that have a name (:mod:`etl.store.savepoints`) however old they
are. Numbers grow over all incarnations, so an abandoned one loses its checkpoints as they grow old, like any other.

A checkpoint reads of each split the newest position up to its own number, and of each key group the chunks from the
newest full one up to its own number.
"""

from __future__ import annotations

from typing import LiteralString

from etl.store.database import StoreConnection
from etl.store.lease import Lease

PRUNE_STATE_EVERY = 8
"""Chunks that nobody needs harm nobody: they are looked for at one checkpoint in so many."""

_CHECKPOINTS: LiteralString = (
    "DELETE FROM etl.checkpoint c WHERE job_id = %(job)s AND checkpoint_id < %(oldest)s AND NOT EXISTS ("
    "  SELECT FROM etl.savepoint s WHERE s.job_id = c.job_id AND s.incarnation = c.incarnation"
    "  AND s.checkpoint_id = c.checkpoint_id) RETURNING incarnation"
)
_HANDLES: LiteralString = "DELETE FROM etl.committable WHERE job_id = %(job)s AND checkpoint_id < %(oldest)s"

_POSITIONS: LiteralString = "DELETE FROM etl.position p WHERE job_id = %(job)s AND incarnation = %(incarnation)s"
# A row that is replaced by a newer one up to the oldest kept checkpoint is read by none but a named one before that.
_THAT_ARE_REPLACED: LiteralString = (
    " AND checkpoint_id < %(oldest)s AND EXISTS ("
    "  SELECT FROM etl.position n WHERE n.job_id = p.job_id AND n.incarnation = p.incarnation AND n.uid = p.uid"
    "  AND n.split_id = p.split_id AND n.checkpoint_id > p.checkpoint_id AND n.checkpoint_id <= %(oldest)s)"
)
_THAT_NONE_READS: LiteralString = (
    " AND NOT EXISTS (SELECT FROM etl.checkpoint c WHERE c.job_id = p.job_id AND c.incarnation = p.incarnation"
    "  AND c.checkpoint_id >= p.checkpoint_id AND c.checkpoint_id < %(before)s AND NOT EXISTS ("
    "   SELECT FROM etl.position n WHERE n.job_id = p.job_id AND n.incarnation = p.incarnation AND n.uid = p.uid"
    "   AND n.split_id = p.split_id AND n.checkpoint_id > p.checkpoint_id AND n.checkpoint_id <= c.checkpoint_id))"
)

_REPLACED: LiteralString = (
    "SELECT uid, key_group, max(checkpoint_id) FILTER (WHERE sequence = 0 AND checkpoint_id <= %(oldest)s)"
    " FROM etl.state WHERE job_id = %(job)s AND incarnation = %(incarnation)s GROUP BY 1, 2"
    " HAVING min(checkpoint_id) < max(checkpoint_id) FILTER (WHERE sequence = 0 AND checkpoint_id <= %(oldest)s)"
)
_CHUNKS: LiteralString = "DELETE FROM etl.state s WHERE job_id = %(job)s AND incarnation = %(incarnation)s"
# One by one and by key: without statistics the planner joins the table with itself row by row.
_OF_ONE_CHAIN: LiteralString = " AND uid = %(uid)s AND key_group = %(key_group)s AND checkpoint_id < %(full)s"
_THAT_NO_RESTORE_READS: LiteralString = (
    " AND NOT EXISTS (SELECT FROM etl.checkpoint c WHERE c.job_id = s.job_id AND c.incarnation = s.incarnation"
    "  AND c.checkpoint_id >= s.checkpoint_id AND c.checkpoint_id < %(before)s AND NOT EXISTS ("
    "   SELECT FROM etl.state f WHERE f.job_id = s.job_id AND f.incarnation = s.incarnation AND f.uid = s.uid"
    "   AND f.key_group = s.key_group AND f.sequence = 0 AND f.checkpoint_id > s.checkpoint_id"
    "   AND f.checkpoint_id <= c.checkpoint_id))"
)
_THAT_ARE_FORGOTTEN: LiteralString = (
    " AND NOT EXISTS ("
    "  SELECT FROM etl.checkpoint c WHERE c.job_id = s.job_id AND c.incarnation = s.incarnation"
    "  AND c.checkpoint_id >= s.checkpoint_id AND (c.states -> s.uid ->> 'since')::int8 <= s.checkpoint_id)"
)

_NONE_IS_LATER = 2**63 - 1

_LEFT: LiteralString = (
    "SELECT unnest(%(incarnations)s::int8[]) EXCEPT"
    " SELECT incarnation FROM etl.checkpoint WHERE job_id = %(job)s AND checkpoint_id >= %(oldest)s"
)


def prune(connection: StoreConnection, lease: Lease, checkpoint_id: int, keep: int) -> None:
    """Drop what no checkpoint reads but those before the newest ``keep``; the caller's transaction commits it.

    Args:
        connection: In the transaction that completes a checkpoint.
        lease: Of the run.
        checkpoint_id: The checkpoint that is being completed, recorded already.
        keep: How many of the newest checkpoints are kept.
    """
    oldest = checkpoint_id - keep + 1
    if oldest <= 1:
        return
    driver = connection.driver
    key: dict[str, str | int] = {
        "job": lease.job_id,
        "incarnation": lease.incarnation,
        "oldest": oldest,
        "before": oldest,
    }
    pruned = {incarnation for (incarnation,) in driver.execute(_CHECKPOINTS, key)}
    driver.execute(_HANDLES, key)
    driver.execute(_POSITIONS + _THAT_ARE_REPLACED + _THAT_NONE_READS, key)
    if checkpoint_id % PRUNE_STATE_EVERY == 0:
        _prune_replaced(connection, key)
    if checkpoint_id == lease.checkpoint_id + 1:
        # The state of operators, or of earlier lives of theirs, that no kept checkpoint has.
        driver.execute(_CHUNKS + _THAT_ARE_FORGOTTEN, key)
    if abandoned := pruned - {lease.incarnation}:
        _prune_abandoned(connection, key, sorted(abandoned))


def _prune_replaced(connection: StoreConnection, key: dict[str, str | int]) -> None:
    """Drop chunks that a newer full one has replaced."""
    replaced = connection.driver.execute(_REPLACED, key).fetchall()
    if replaced:
        chains = ({**key, "uid": uid, "key_group": key_group, "full": full} for uid, key_group, full in replaced)
        with connection.driver.cursor() as cursor:
            cursor.executemany(_CHUNKS + _OF_ONE_CHAIN + _THAT_NO_RESTORE_READS, chains)


def _prune_abandoned(connection: StoreConnection, key: dict[str, str | int], incarnations: list[int]) -> None:
    """Drop what abandoned incarnations have left, once the last checkpoint without a name is gone."""
    left = connection.driver.execute(_LEFT, {**key, "incarnations": incarnations}).fetchall()
    for (incarnation,) in left:
        for statement in (_POSITIONS + _THAT_NONE_READS, _CHUNKS + _THAT_NO_RESTORE_READS):
            connection.driver.execute(statement, {**key, "incarnation": incarnation, "before": _NONE_IS_LATER})
