"""The mutants of the protocol, made by changing the product inside a run's process; the product knows nothing of it.

Each has the name of a mutant of the model and does to the engine what that one does to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from etl.runtime import recovery
from etl.runtime.coordinator import Coordinator, PendingCheckpoint
from etl.runtime.transactions import StoreTransactions
from etl.sink import Committable
from etl.store import checkpoints, lease
from etl.store import write_ahead_log as log
from etl.store.database import StoreConnection
from etl.store.ledger import DatabaseLedger
from etl.transaction import begin, commit
from sinks import postgres_two_phase as two_phase_table
from sinks import postgres_write_ahead as write_ahead_table
from sinks import two_phase, upsert, write_ahead
from tests.model.mutants import Mutant

_NEVER = 1 << 60
"""An epoch that no run has."""


def apply(mutant: Mutant) -> None:
    """Make the change, for the rest of this process's life."""
    MUTATIONS[mutant]()


def _change(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function by one that gets the original as its first argument."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: change(original, *arguments, **named))


# --- claiming and the head --------------------------------------------------------------------------------------------


def _no_fence() -> None:
    _change(DatabaseLedger, "fence", lambda _original, *_arguments: None)
    _change(DatabaseLedger, "hold_fence", lambda _original, *_arguments: None)


def _no_compare_and_set() -> None:
    def advance(_original: Any, session: StoreConnection, owned: lease.Lease, checkpoint_id: int) -> None:
        session.driver.execute(
            "UPDATE etl.head SET checkpoint_id = %s, failures = 0 WHERE job_id = %s", [checkpoint_id, owned.job_id]
        )

    _change(checkpoints, "advance_head", advance)


def _no_epoch() -> None:
    def claim(
        original: Any, session: StoreConnection, job_id: str, expected_epoch: int, failed: int = 0
    ) -> lease.Lease | None:
        claimed = original(session, job_id, expected_epoch, failed)
        if claimed is None or claimed.epoch == 1:
            return cast("lease.Lease | None", claimed)
        session.driver.execute("UPDATE etl.head SET epoch = 1 WHERE job_id = %s", [job_id])
        return replace(cast("lease.Lease", claimed), epoch=1)

    _change(lease, "_try_claim", claim)


def _stale_read() -> None:
    read: dict[str, int] = {}

    def register(original: Any, session: StoreConnection, name: str) -> str:
        job_id = str(original(session, name))
        (read[job_id],) = session.driver.execute(
            "SELECT checkpoint_id FROM etl.head WHERE job_id = %s", [job_id]
        ).fetchone() or (0,)
        return job_id

    def claim(original: Any, session: StoreConnection, job_id: str, *rest: Any) -> lease.Lease:
        return replace(cast("lease.Lease", original(session, job_id, *rest)), checkpoint_id=read[job_id])

    _change(lease, "register_job", register)
    _change(lease, "claim", claim)


def _settle_once() -> None:
    def settle(original: Any, parts: Any, completed: Any, visible: Any) -> None:
        settled.append(original(parts, completed, visible))

    def until_fenced(original: Any, *arguments: Any) -> None:
        original(*arguments)
        # What comes next is the settling after the fence.
        recovery._settle = lambda *_arguments: None

    settled: list[None] = []
    _change(recovery, "_settle", settle)
    _change(recovery, "_settle_until_fenced", until_fenced)


# --- recovery and committing ------------------------------------------------------------------------------------------


def _gid_without_epoch() -> None:
    def named(_original: Any, unit: two_phase.UnitId) -> str:
        return f"{two_phase.PREFIX}:{unit.job_id}:0:{unit.checkpoint_id}:{unit.sink_id}:{unit.subtask}"

    _change(two_phase.UnitId, "__str__", named)


def _touch_newer() -> None:
    def recover(original: Any, committer: Any, completed: Sequence[Committable]) -> int:
        own = committer._context
        committer._context = replace(own, epoch=_NEVER)
        try:
            return int(original(committer, completed))
        finally:
            committer._context = own

    _change(two_phase._Committer, "recover", recover)


def _commit_all() -> None:
    def roll_back(_original: Any, units: Any, unit: str) -> None:
        units.commit(unit)

    _change(two_phase_table._PreparedTransactions, "rollback", roll_back)


def _rollback_all() -> None:
    _change(two_phase._Committer, "recover", lambda original, committer, _completed: original(committer, []))


def _absent_is_done() -> None:
    def finish(_original: Any, committer: Any, gid: str, committable: Committable) -> int:
        return committable.rows if committer._units.commit(gid) else 0

    _change(two_phase._Committer, "_finish", finish)
    _change(two_phase._Committer, "verify", lambda _original, *_arguments: None)


def _complete_before_prepare() -> None:
    put_off: dict[str, Callable[[], None]] = {}

    def prepare(original: Any, stager: Any, unit: two_phase.UnitId, committable: Committable) -> None:
        put_off[str(unit)] = lambda: original(stager, unit, committable)

    def commit_unit(original: Any, units: Any, unit: str) -> bool:
        if unit in put_off:
            put_off.pop(unit)()
        return bool(original(units, unit))

    _change(two_phase_table._TransactionStager, "prepare", prepare)
    _change(two_phase_table._PreparedTransactions, "commit", commit_unit)


def _commit_before_complete() -> None:
    def complete(_original: Any, coordinator: Any, pending: PendingCheckpoint) -> None:
        for committable in pending.committables:
            coordinator._committers[committable.uid].commit(committable)
        coordinator._record(pending)
        coordinator._make_visible(replace(pending, committables=[]))
        coordinator._last_id, coordinator._pending = pending.checkpoint_id, None

    _change(Coordinator, "_complete", complete)


def _two_transactions() -> None:
    @contextmanager
    def completing(original: Any, transactions: Any, checkpoint_id: int, **named: Any) -> Iterator[StoreConnection]:
        with original(transactions, checkpoint_id, **named) as session:
            commit(session.driver)
            begin(session.driver)
            yield session

    _change(StoreTransactions, "completing", completing)


def _log_without_epoch() -> None:
    def units(original: Any, table: Any, connection: Any) -> list[Committable]:
        own, table._epoch = table._epoch, _NEVER
        try:
            return list(original(table, connection))
        finally:
            table._epoch = own

    def same(_original: Any, one: Committable, other: Committable) -> bool:
        return (one.subtask, one.checkpoint_id) == (other.subtask, other.checkpoint_id)

    _change(log.DatabaseWriteAheadLog, "_units", units)
    _change(log, "_same_unit", same)


def _prune_before_delivery() -> None:
    def finish(_original: Any, committer: Any, unit: Committable) -> int:
        if committer._delivery.is_delivered(unit):
            return 0
        with committer._context.log.read(unit) as batches:
            held = list(batches)
        committer._context.log.prune(unit)
        committer._delivery.deliver(unit, iter(held))
        return unit.rows

    _change(write_ahead._Committer, "_finish", finish)


def _deliver_blindly() -> None:
    def record(_original: Any, delivery: Any, unit: Committable) -> None:
        if not known(delivery, unit):
            delivery._context.ledger.record(delivery._unit.connection, unit)

    known = write_ahead_table._TransactionDelivery.is_delivered
    _change(write_ahead_table._TransactionDelivery, "_record", record)
    _change(write_ahead._Committer, "_finish", _finish_blindly)


def _finish_blindly(_original: Any, committer: Any, unit: Committable) -> int:
    if not committer._deliver(unit, must_be_there=False):
        return 0
    committer._context.log.prune(unit)
    return unit.rows


def _skip_replay() -> None:
    def prepare_commit(original: Any, writer: Any, checkpoint_id: int) -> Committable | None:
        if not writer._unit.begun:
            return original(writer, checkpoint_id)  # type: ignore[no-any-return]
        writer._unit.flush()
        context, connection = writer._context, writer._unit.connection
        seen = "SELECT FROM etl.commit_ledger WHERE job_id = %s AND sink_id = %s AND checkpoint_id = %s"
        if connection.execute(seen, [context.job_id, context.sink_id, checkpoint_id]).fetchone() is not None:
            connection.execute("ROLLBACK; BEGIN")
        else:
            context.ledger.record(connection, Committable(context.uid, 0, checkpoint_id, context.epoch, 0, {}))
        return original(writer, checkpoint_id)  # type: ignore[no-any-return]

    _change(upsert._Writer, "prepare_commit", prepare_commit)


MUTATIONS: Mapping[Mutant, Callable[[], None]] = {
    Mutant.NO_FENCE: _no_fence,
    Mutant.NO_COMPARE_AND_SET: _no_compare_and_set,
    Mutant.NO_EPOCH: _no_epoch,
    Mutant.STALE_READ: _stale_read,
    Mutant.SETTLE_ONCE: _settle_once,
    Mutant.GID_WITHOUT_EPOCH: _gid_without_epoch,
    Mutant.TOUCH_NEWER: _touch_newer,
    Mutant.COMMIT_ALL: _commit_all,
    Mutant.ROLLBACK_ALL: _rollback_all,
    Mutant.ABSENT_IS_DONE: _absent_is_done,
    Mutant.COMPLETE_BEFORE_PREPARE: _complete_before_prepare,
    Mutant.COMMIT_BEFORE_COMPLETE: _commit_before_complete,
    Mutant.TWO_TRANSACTIONS: _two_transactions,
    Mutant.LOG_WITHOUT_EPOCH: _log_without_epoch,
    Mutant.PRUNE_BEFORE_DELIVERY: _prune_before_delivery,
    Mutant.DELIVER_BLINDLY: _deliver_blindly,
    Mutant.SKIP_REPLAY: _skip_replay,
}
