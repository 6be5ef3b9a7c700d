"""Ways to get the protocol wrong. Each has to be caught by the model, and by a test on a real server too.

A mutant of the model is a switch in :mod:`tests.model.protocol`; that of the product is a change made to it inside the
test (:mod:`tests.faults.mutations`), under the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Mutant(StrEnum):
    """What is wrong, in the words of somebody who thought it would do."""

    NO_FENCE = "outdated runs are not fenced out"
    NO_COMPARE_AND_SET = "the head is advanced without looking at its epoch and number"
    NO_EPOCH = "a claim does not raise the epoch"
    STALE_READ = "the last checkpoint is read before the claim, not by it"
    SETTLE_ONCE = "what was left is settled before the fence, not again after it"
    GID_WITHOUT_EPOCH = "prepared transactions are named by job and checkpoint alone"
    TOUCH_NEWER = "recovery touches units of newer runs"
    COMMIT_ALL = "recovery commits every unit it finds"
    ROLLBACK_ALL = "recovery drops every unit it finds"
    ABSENT_IS_DONE = "a prepared transaction that is gone counts as committed"
    COMPLETE_BEFORE_PREPARE = "a checkpoint completes before its units are prepared"
    COMMIT_BEFORE_COMPLETE = "units are committed before their checkpoint completes"
    TWO_TRANSACTIONS = "rows and what says that they are there are written in two transactions"
    LOG_WITHOUT_EPOCH = "the log is read by checkpoint, whoever has written it"
    PRUNE_BEFORE_DELIVERY = "the log is pruned before its rows are delivered"
    DELIVER_BLINDLY = "what is in the log is delivered, whatever the ledger says"
    SKIP_REPLAY = "a replayed upsert is skipped when its checkpoint's number was seen before"


CAUGHT: Mapping[Mutant, tuple[str, ...]] = {
    Mutant.NO_FENCE: ("two-phase", "write-ahead", "upsert", "united"),
    Mutant.NO_COMPARE_AND_SET: ("transactional", "two-phase", "write-ahead"),
    Mutant.NO_EPOCH: ("two-phase", "write-ahead"),
    Mutant.STALE_READ: ("two-phase", "write-ahead"),
    Mutant.SETTLE_ONCE: ("write-ahead",),
    Mutant.GID_WITHOUT_EPOCH: ("two-phase",),
    Mutant.TOUCH_NEWER: ("two-phase", "write-ahead", "united"),
    Mutant.COMMIT_ALL: ("two-phase",),
    Mutant.ROLLBACK_ALL: ("two-phase",),
    Mutant.ABSENT_IS_DONE: ("two-phase",),
    Mutant.COMPLETE_BEFORE_PREPARE: ("two-phase", "write-ahead"),
    Mutant.COMMIT_BEFORE_COMPLETE: ("two-phase", "write-ahead"),
    Mutant.TWO_TRANSACTIONS: ("transactional", "two-phase", "write-ahead"),
    Mutant.LOG_WITHOUT_EPOCH: ("write-ahead",),
    Mutant.PRUNE_BEFORE_DELIVERY: ("write-ahead",),
    Mutant.DELIVER_BLINDLY: ("write-ahead",),
    Mutant.SKIP_REPLAY: ("upsert",),
}
"""In the models of which jobs each mutant has to be found."""
