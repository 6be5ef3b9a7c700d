"""One attempt: recover, restore, wire the subtasks, run them to a final checkpoint, release everything."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from etl.errors import FencedError, LostRowsError, StateError, TransientError
from etl.graph import SinkNode
from etl.lookup import LookupContext
from etl.runtime import recovery
from etl.runtime.coordinator import Coordinator, Outlets, SourceHandle
from etl.runtime.environment import RunEnvironment
from etl.runtime.executor import SHUTDOWN_TIMEOUT_S, STOPPING_TIMEOUT_S, ThreadExecutor
from etl.runtime.keeper import LeaseKeeper
from etl.runtime.message import Failed, Message, SavepointRequested, StopRequested
from etl.runtime.plan import plan_of
from etl.runtime.recovery import SinkPart
from etl.runtime.rewinding import Rewind
from etl.runtime.source_subtask import SourceSubtask
from etl.runtime.transactions import StoreTransactions
from etl.runtime.wiring import Wiring, wire
from etl.runtime.workers.fleet import SHUTDOWN_TIMEOUT_S as WORKERS_TIMEOUT_S
from etl.runtime.workers.fleet import Fleet
from etl.sink import CheckpointMode, Committer, Connect, Connection, Delivery, SinkContext, SupportsCommitter
from etl.sqlstate import translated_in_store
from etl.state import RestoredState, StateSummary
from etl.store import checkpoints, pruning, rewinding, savepoints, state
from etl.store.checkpoints import CompletedCheckpoint, Restored
from etl.store.database import Database, StoreConnection
from etl.store.integrity import require_states_unchanged, require_whole
from etl.store.lease import (
    Lease,
    application_name,
    beat,
    known_targets,
    observe,
    register_sinks,
    terminate_sessions,
)
from etl.store.ledger import DatabaseLedger
from etl.store.runs import RunTotals, save_totals
from etl.store.state import OperatorState
from etl.store.tables import Trigger
from etl.store.write_ahead_log import DatabaseWriteAheadLog
from etl.transaction import begin, commit

STORE_SINK_ID = 0
"""The store's own fence row belongs to no sink."""


class Attempt:
    """One try of a run at one epoch.

    Args:
        environment: Shared by all attempts.
        session: The owner's session; carries the heartbeat.
        lease: The claim.
        run_id: The run's row.
        totals: Rows of the checkpoints this run has completed; updated in place.
    """

    def __init__(
        self, environment: RunEnvironment, session: StoreConnection, lease: Lease, run_id: int, totals: RunTotals
    ) -> None:
        self._environment = environment
        self._session = session
        self._lease = lease
        self._run_id = run_id
        self._totals = totals
        self._emit = environment.telemetry.emit
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._former: dict[str, OperatorState] = {}
        self._rows_written: Mapping[str, int] = {}

    def run(self) -> None:
        """Run to the end of the input or until stopped; everything read is then committed and visible.

        Raises:
            BaseException: Whatever failed; nothing of the unfinished checkpoint is visible.
        """
        with ExitStack() as resources:
            restored, sink_ids = self._take_up(resources)
            # With the heartbeat going on: there may be much to read.
            stored = self._stored_state(restored)
            transactions = self._transactions(resources)
            parts = self._parts(sink_ids, transactions, resources)
            self._recover(parts, restored)
            self._settle_sources(restored)
            self._run_subtasks(parts, restored, stored, transactions, resources)

    def rewind(self, target: Rewind) -> None:
        """Settle what former runs left, as ever, and then begin a new incarnation instead of reading.

        The owner claims again afterwards: an epoch is never used twice.

        Raises:
            BaseException: Whatever failed; unless the answer to the commit was lost, nothing has changed.
        """
        with ExitStack() as resources:
            restored, sink_ids = self._take_up(resources)
            self._settle(self._parts(sink_ids, self._transactions(resources), resources), restored, target)
            session = resources.enter_context(closing(self._open_session()))
            self._emit("rewind.begin", checkpoint=target.cut.checkpoint_id)
            with translated_in_store(f"going back to checkpoint {target.cut.checkpoint_id}"):
                begin(session.driver)
                number = rewinding.rewind(
                    session,
                    self._lease,
                    self._ledger(STORE_SINK_ID),
                    self._run_id,
                    target.cut,
                    target.renamed,
                    restored.rows_written_total,
                )
                save_totals(session, self._run_id, self._totals, number)
            self._emit("rewind.copied", checkpoint=number)
            commit(session.driver)
            self._emit("rewind.completed", checkpoint=number)

    def _take_up(self, resources: ExitStack) -> tuple[Restored, Mapping[str, int]]:
        """The cut that the last completed checkpoint left, found whole, and numbers of the sinks; the heart beats."""
        keeper = LeaseKeeper(
            self._session.driver,
            self._lease,
            self._environment.owner_timeout_s,
            lambda error: self._inbox.put(Failed(error)),
            self._savepoint_asked,
            self._environment.clock,
        )
        require_states_unchanged(self._session, self._lease)
        restored = checkpoints.restore(self._session, self._lease)
        self._former = dict(restored.states)
        self._rows_written = restored.rows_written_total
        require_whole(self._session, self._lease, restored)
        sink_ids = self._register_sinks()
        if self._environment.stop.with_savepoint and (asked := beat(self._session.driver, self._lease)) is not None:
            # Noticed before the attempt finds that nothing is to be read, and ends.
            self._savepoint_asked(asked)
        keeper.start()
        resources.callback(keeper.stop)
        return restored, sink_ids

    def _transactions(self, resources: ExitStack) -> StoreTransactions:
        writing = [node for node in self._environment.graph.sinks if node.sink.delivery is Delivery.TRANSACTIONAL]
        transactions = StoreTransactions(
            self._open_session, self._ledger(STORE_SINK_ID), self._emit, exclusive=len(writing) == 1
        )
        resources.callback(transactions.close)
        return transactions

    def _savepoint_asked(self, stop: bool) -> None:
        if stop:
            self._environment.stop.with_savepoint = True
        self._inbox.put(SavepointRequested(stop))

    def _stored_state(self, restored: Restored) -> dict[str, RestoredState]:
        """What the job's operators remember; each operator takes its own out.

        Raises:
            StateError: It is not whole, or belongs to an operator that the job does not have.
        """
        job, operators = self._environment.job, {node.uid for node in self._environment.graph.operators}
        unused = sorted(restored.states.keys() - operators - set(job.forget))
        if unused:
            raise StateError(
                f"stored state of operator(s) {', '.join(unused)} has no operator in the job; declare a new uid with"
                f' Job(…, renamed={{"{unused[0]}": "…"}}), or Job(…, forget={unused}) to give this state up'
            )
        new = sorted(operators - restored.states.keys())
        if new and restored.checkpoint_id:
            self._environment.warn(
                f"new operator(s) {', '.join(new)}: they know what is read from now on, not what was read before"
            )
        self._warn_of_changed_operators(restored)
        wanted = {uid: one for uid, one in restored.states.items() if uid in operators}
        if not wanted:
            return {}
        with closing(self._open_session()) as session:
            found = state.restore(session.driver, self._lease, wanted)
        return {
            uid: RestoredState(fragments, wanted[uid].watermark, wanted[uid].forgotten)
            for uid, fragments in found.items()
        }

    def _warn_of_changed_operators(self, restored: Restored) -> None:
        for node in self._environment.graph.operators:
            former = restored.states.get(node.uid)
            declared = node.transformation.describe()
            if former is not None and former.declared != declared:
                self._environment.warn(
                    f'operator "{node.uid}" was "{former.declared}" and is "{declared}" now: it goes on from what it'
                    " remembers; to begin anew, give it a new uid"
                )

    def _register_sinks(self) -> dict[str, int]:
        targets = {node.uid: node.sink.target_name for node in self._environment.graph.sinks}
        known = known_targets(self._session, self._lease.job_id)
        if self._lease.checkpoint_id > 0:
            self._warn_of_new_targets(targets, known)
        return register_sinks(self._session, self._lease.job_id, targets)

    def _warn_of_new_targets(self, targets: Mapping[str, str], known: Mapping[str, str | None]) -> None:
        from_now_on = "what is read from now on, not what was read before; for all of it, use a job of another name"
        new = sorted(targets.keys() - known.keys())
        if new:
            self._environment.warn(f"new sink(s) {', '.join(new)}: they get {from_now_on}")
        for uid, target in targets.items():
            former = known.get(uid)
            if former is not None and former != target:
                self._environment.warn(
                    f'sink "{uid}" wrote to {former} before and writes to {target} now: unless that was renamed, it'
                    f" gets {from_now_on}"
                )

    # --- recovery ---------------------------------------------------------------------------------------------------

    def _end_former_sessions(self) -> None:
        """What a dead run sent may still be executed: nothing is concluded from absence before that has ended."""
        names = {None, *(node.sink.database for node in self._environment.graph.sinks)}
        for name in sorted(names, key=str):
            with closing(self._connect_to(self._environment.database_of(name), "terminate")) as connection:
                left = terminate_sessions(connection, self._lease.job_id, below_epoch=self._lease.epoch)
            if left:
                listed = ", ".join(map(str, left))
                raise TransientError(
                    f"session(s) {listed} of a former run did not end when told to; what they do is unknown"
                )
        self._emit("recovery.sessions_ended")

    def _fence_store(self) -> None:
        """Outdate former runs in the store, so that nothing they left in flight can still complete a checkpoint."""
        with closing(self._connect_to(self._environment.store, "fence")) as connection:
            self._ledger(STORE_SINK_ID).fence(connection)

    def _recover(self, parts: Sequence[SinkPart], restored: Restored) -> None:
        self._environment.monitor.state_changed("recovering")
        self._emit("recovery.begin", checkpoint=restored.checkpoint_id)
        self._end_former_sessions()
        try:
            visible = recovery.recover(parts, restored, self._fence_store, self._emit)
        except (FencedError, StateError) as error:
            self._require_ownership(error)
            raise
        rows = sum(visible.values())
        if rows:
            self._environment.warn(
                f"checkpoint {restored.checkpoint_id} of an earlier attempt was complete but not yet visible:"
                f" committed {rows} row(s) of it"
            )

    def _settle(self, parts: Sequence[SinkPart], restored: Restored, target: Rewind) -> None:
        """Recover before going back: lost rows that are read again then are no reason to stop."""
        while True:
            try:
                self._recover(parts, restored)
            except LostRowsError as error:
                left = [one for one in restored.committables if one.uid != error.uid]
                if target.cut.checkpoint_id == restored.checkpoint_id or len(left) == len(restored.committables):
                    raise
                self._environment.warn(
                    f'rows of checkpoint {restored.checkpoint_id} that are lost to sink "{error.uid}" are read again'
                )
                restored = replace(restored, committables=left)
            else:
                return

    def _require_ownership(self, error: FencedError | StateError) -> None:
        """Tell what a newer run has done from what is wrong: every epoch comes from the head, and it alone decides."""
        with closing(self._open_session()) as session:
            owned = observe(session, self._lease.job_id).epoch == self._lease.epoch
        if not owned:
            raise FencedError(f"epoch {self._lease.epoch} was overtaken by a newer run of the job") from error
        if isinstance(error, FencedError):
            raise StateError(
                f"etl.fence of a database is ahead of the store, which gave out epoch {self._lease.epoch} last: the"
                " store was restored to an earlier state, or the row was changed by hand; nothing was written."
                " Bring store and target to the same moment"
            ) from error

    def _settle_sources(self, restored: Restored) -> None:
        """Refuse what looks like a renamed source: under its new uid it would read everything again."""
        job, sources = self._environment.job, {node.uid for node in self._environment.graph.sources}
        unused = sorted(set(restored.positions) - sources - set(job.forget))
        new = sorted(sources - set(restored.positions))
        if unused and new:
            raise StateError(
                f"stored positions of source(s) {', '.join(unused)} have no source in the job, and source(s)"
                f" {', '.join(new)} have no position: a renamed source would read everything again; declare a new uid"
                f' with Job(…, renamed={{"{unused[0]}": "…"}}), or Job(…, forget={unused}) to give these positions up'
            )
        if unused:
            self._environment.warn(f"stored positions of {', '.join(unused)} are not used: the job has no such source")

    # --- running ------------------------------------------------------------------------------------------------------

    def _connect_to(self, database: Database, role: str) -> Connection:
        return database.connect(application_name(self._lease.job_id, self._lease.epoch, role))

    def _open_session(self) -> StoreConnection:
        return self._environment.store.open(application_name(self._lease.job_id, self._lease.epoch, "checkpoint"))

    def _ledger(self, sink_id: int) -> DatabaseLedger:
        lease = self._lease
        keep = self._environment.job.checkpoint.keep
        return DatabaseLedger(lease.job_id, lease.incarnation, lease.epoch, sink_id, keep)

    def _parts(
        self, sink_ids: Mapping[str, int], transactions: StoreTransactions, resources: ExitStack
    ) -> list[SinkPart]:
        parts = []
        for node in self._environment.graph.sinks:
            context = self._sink_context(node, sink_ids[node.uid], transactions)
            resources.callback(context.log.close)
            committer: Committer | None = None
            if isinstance(node.sink, SupportsCommitter):
                committer = node.sink.create_committer(context)
                resources.callback(committer.close)
            parts.append(SinkPart(node.uid, node.sink, context, committer))
        return parts

    def _sink_context(self, node: SinkNode, sink_id: int, transactions: StoreTransactions) -> SinkContext:
        environment, lease = self._environment, self._lease
        database = environment.database_of(node.sink.database)
        connect: Connect = lambda role: self._connect_to(database, f"{node.uid}:{role}")  # noqa: E731
        log = DatabaseWriteAheadLog(
            lambda: self._connect_to(environment.store, f"{node.uid}:log"),
            self._ledger(STORE_SINK_ID),
            uid=node.uid,
            job_id=lease.job_id,
            incarnation=lease.incarnation,
            epoch=lease.epoch,
            sink_id=sink_id,
            subtask=0,
        )
        return SinkContext(
            job_id=lease.job_id,
            uid=node.uid,
            sink_id=sink_id,
            subtask=0,
            epoch=lease.epoch,
            checkpoint_id=lease.checkpoint_id,
            schema=node.schema,
            connect=connect,
            ledger=self._ledger(sink_id),
            log=log,
            transactions=transactions,
            base_dir=environment.job.base_dir,
            unit_time_s=environment.unit_time_s,
            emit=self._emit,
        )

    def _lookup_context(self, uid: str, database_name: str | None) -> LookupContext:
        database = self._environment.database_of(database_name)
        connect: Connect = lambda role: self._connect_to(database, f"{uid}:{role}")  # noqa: E731
        return LookupContext(uid, connect, self._environment.clock)

    def _run_subtasks(
        self,
        parts: Sequence[SinkPart],
        restored: Restored,
        stored: dict[str, RestoredState],
        transactions: StoreTransactions,
        resources: ExitStack,
    ) -> None:
        environment = self._environment
        plan = plan_of(environment.graph, environment.job.parallelism, environment.workers)
        fleet = Fleet(environment, plan, self._inbox.put)
        resources.callback(lambda: fleet.shut_down(self._patience_s(WORKERS_TIMEOUT_S)))
        wiring = Wiring(self._inbox.put, self._emit, environment.clock, links=fleet.ends, lookups=self._lookup_context)
        try:
            sources = wire(wiring, environment, parts, restored.positions, stored, plan)
            fleet.start(wiring.elsewhere)
        except BaseException:
            wiring.close()
            raise
        coordinator = self._coordinator(sources, parts, wiring, fleet, transactions)
        executor = ThreadExecutor(wiring)
        resources.callback(self._shut_down, executor)
        resources.callback(environment.stop.tell, None)
        environment.monitor.attempt_started(
            lambda: sum(source.rows_total for source in sources), lambda: [source.progress() for source in sources]
        )
        for subtask in wiring.stateful.values():
            subtask.announce_due()
        if environment.stop.with_savepoint:
            # An attempt before was to end with a savepoint, and has made it perhaps: nothing comes behind that.
            coordinator.stop_reading()
        executor.start()
        environment.stop.tell(lambda: self._inbox.put(StopRequested()))
        coordinator.run()

    def _patience_s(self, timeout_s: float) -> float:
        """How long to wait for what is to end: less when the user waits for it."""
        return min(timeout_s, STOPPING_TIMEOUT_S) if self._environment.stop.requested else timeout_s

    def _shut_down(self, executor: ThreadExecutor) -> None:
        stuck = executor.shut_down(self._patience_s(SHUTDOWN_TIMEOUT_S))
        if stuck:
            self._environment.warn(f"subtask(s) {', '.join(stuck)} did not end in time; their sessions are fenced out")

    # --- completing -------------------------------------------------------------------------------------------------

    def _coordinator(
        self,
        sources: Sequence[SourceSubtask],
        parts: Sequence[SinkPart],
        wiring: Wiring,
        fleet: Fleet,
        transactions: StoreTransactions,
    ) -> Coordinator:
        environment = self._environment
        return Coordinator(
            mode=environment.job.mode,
            policy=environment.job.checkpoint,
            checkpoint_id=self._lease.checkpoint_id,
            sources=[SourceHandle(one.uid, one.source, one.command, one.activity) for one in sources],
            committers={part.uid: part.committer for part in parts},
            subtasks=[*(subtask.uid for subtask in wiring.subtasks), *fleet.subtasks],
            stateful=[*wiring.stateful, *fleet.stateful],
            inbox=self._inbox,
            outlets=Outlets(
                complete=lambda completed: self._complete(transactions, self._as_recorded(completed)),
                commit_unrecorded=lambda checkpoint_id: self._commit_unrecorded(transactions, checkpoint_id),
                committed=self._committed,
                emit=self._emit,
            ),
            clock=environment.clock,
        )

    def _as_recorded(self, completed: CompletedCheckpoint) -> CompletedCheckpoint:
        sinks = {node.uid: node.sink for node in self._environment.graph.sinks}
        handles = [recovery.recorded(one, sinks[one.uid]) for one in completed.committables]
        operators = {node.uid: node.transformation for node in self._environment.graph.operators}
        states = {
            uid: self._operator_state(uid, completed.checkpoint_id, summary, operators[uid].describe())
            for uid, summary in completed.summaries.items()
        }
        written = RunTotals(0, dict(self._rows_written)).plus(0, completed.rows_written).rows_written
        return replace(completed, committables=handles, states=states, rows_written_total=written)

    def _operator_state(self, uid: str, checkpoint_id: int, summary: StateSummary, declared: str) -> OperatorState:
        """With what began at the first checkpoint of the operator's life in this job, and goes on."""
        before = self._former.get(uid)
        since = checkpoint_id if before is None else before.since
        late_rows = summary.late_rows + (0 if before is None else before.late_rows)
        self._former[uid] = OperatorState(
            summary.chunks, since, declared, summary.watermark, late_rows, summary.forgotten
        )
        return self._former[uid]

    def _complete(self, transactions: StoreTransactions, completed: CompletedCheckpoint) -> None:
        """THE transaction: head, positions, handles, and every row of transactional sinks, or nothing of it."""
        number = completed.checkpoint_id
        apart = self._environment.job.mode is CheckpointMode.AT_MOST_ONCE
        totals = self._totals.plus(completed.rows_read, completed.rows_written)
        with transactions.completing(number, apart=apart) as session:
            self._emit("checkpoint.completing", checkpoint=number)
            with translated_in_store(f"recording checkpoint {number}"):
                checkpoints.advance_head(session, self._lease, number)
                self._emit("checkpoint.head_advanced", checkpoint=number)
                checkpoints.record(session, self._lease, self._run_id, completed)
                save_totals(session, self._run_id, totals, number)
                if completed.trigger is Trigger.SAVEPOINT:
                    savepoints.grant(session, self._lease, number, ending=completed.ending)
                pruning.prune(session, self._lease, number, self._environment.job.checkpoint.keep)
            self._emit("checkpoint.recorded", checkpoint=number)
            commit(session.driver)
            self._emit("checkpoint.completed", checkpoint=number)
        self._totals.set(totals)
        self._rows_written = completed.rows_written_total

    def _commit_unrecorded(self, transactions: StoreTransactions, checkpoint_id: int) -> None:
        with transactions.completing(checkpoint_id) as session:
            commit(session.driver)

    def _committed(self, checkpoint_id: int, rows_written: Mapping[str, int]) -> None:
        if self._environment.job.mode is CheckpointMode.AT_MOST_ONCE:
            self._totals.set(self._totals.plus(0, rows_written))
        self._environment.monitor.checkpoint_completed(checkpoint_id, rows_written)
