"""Runs attempts until one comes to its end: restarts after what may pass, gives up on what will not.

What is done with an error is decided by its class in :mod:`etl.errors` alone. Delays grow exponentially with the
failures since the last completed checkpoint; the count is kept in the store and outlives the process.
"""

from __future__ import annotations

from contextlib import suppress

import psycopg

from etl.errors import EtlError, TransientError
from etl.runtime import rewinding
from etl.runtime.attempt import Attempt
from etl.runtime.classification import classify
from etl.runtime.environment import RunEnvironment
from etl.sink import CheckpointMode
from etl.store import lease as leases
from etl.store import runs
from etl.store.database import StoreConnection
from etl.store.lease import Lease
from etl.store.runs import RunTotals
from etl.store.savepoints import Cut

SETTLE_PAUSE_S = 0.2
"""Between two tries to reach a database that is gone."""


class Supervisor:
    """Owns the session and the lease of a run across its attempts.

    Args:
        environment: Shared by all attempts.
        session: The session that claimed the job.
        lease: The claim.
        version: Of the program.
        start: An earlier checkpoint to go back to; None for the last one.

    Attributes:
        session: The owner's session, None between a lost one and the next.
        lease: The current claim.
        totals: Rows of the checkpoints that this run has completed.
        checkpoint_id: The last checkpoint that this run is known to have completed, 0 for none.
        restarts: Attempts beyond the first.
        run_id: The run's row in the store; None until the first attempt has written it.
    """

    def __init__(
        self,
        environment: RunEnvironment,
        session: StoreConnection,
        lease: Lease,
        version: str,
        start: Cut | None = None,
    ) -> None:
        self.session: StoreConnection | None = session
        self.lease = lease
        self.run_id: int | None = None
        self.totals = RunTotals()
        self.checkpoint_id = 0
        self.restarts = 0
        self._environment = environment
        self._version = version
        self._start = start
        self._first = lease
        self._failures = 0

    def run(self) -> None:
        """Until an attempt has ended well.

        Raises:
            EtlError: The run is over; the class says why.
        """
        while True:
            error = self._attempt()
            if error is None:
                return
            if not isinstance(error, TransientError):
                raise error
            self._prepare_restart(error)

    def _attempt(self) -> EtlError | None:
        before = self.lease.checkpoint_id
        try:
            session = self._owned_session()
            before = self.lease.checkpoint_id
            if self.run_id is None:
                self.run_id = runs.start(session, self.lease, self._version, self._first.epoch)
            self._rewind(session, self.run_id)
            before = self.lease.checkpoint_id
            Attempt(self._environment, session, self.lease, self.run_id, self.totals).run()
        except Exception as raised:  # noqa: BLE001 - classified, and raised by run() unless it may pass
            error = classify(raised)
            if error is not raised:
                error.__cause__ = raised
            if self._environment.monitor.snapshot().checkpoint > before:
                self._failures = 0
            return error
        return None

    def _rewind(self, session: StoreConnection, run_id: int) -> None:
        """Begin a new incarnation where one is wanted, once: the head tells when the answer to that was lost."""
        start = self._start if self.lease.incarnation == self._first.incarnation else None
        target = rewinding.plan(session, self.lease, self._environment, start)
        if target is not None:
            Attempt(self._environment, session, self.lease, run_id, self.totals).rewind(target)
            self._claim_again(session, failed=False)

    def _owned_session(self) -> StoreConnection:
        """The session of the lease; after a failed attempt a new session and a new claim."""
        if self.session is not None:
            return self.session
        session = leases.open_owner_session(self._environment.store, self.lease.job_id)
        try:
            self._claim_again(session, failed=True)
            self._recount(session)
        except BaseException:
            session.close()
            raise
        self.session = session
        return session

    def _claim_again(self, session: StoreConnection, *, failed: bool) -> None:
        self.lease = leases.reclaim(session, self.lease, failed=failed)
        session.rename(leases.application_name(self.lease.job_id, self.lease.epoch, "owner"))
        self._environment.telemetry.emit("lease.reclaimed", epoch=self.lease.epoch)

    def _prepare_restart(self, error: TransientError) -> None:
        policy = self._environment.job.restart
        self._failures += 1
        if self._failures > policy.attempts:
            raise error
        self.drop_session()
        exponent = min(max(self._failures, self.lease.failures + 1) - 1, 30)
        delay_s = min(policy.delay_s * 2**exponent, policy.delay_max_s) * self._environment.clock.jitter()
        self.restarts += 1
        self._environment.monitor.state_changed("restarting", str(error), self.restarts)
        self._environment.warn(
            f"attempt failed, restart {self._failures} of {policy.attempts} in {delay_s:.1f} s: {error}"
        )
        self._environment.telemetry.emit("attempt.restarting", restart=self.restarts)
        if self._environment.clock.wait(self._environment.stop.event, delay_s):
            raise error

    def settle(self, patience_s: float) -> None:
        """After the last attempt: a session to record the end with, and what the store has counted.

        The owner's session may have been cut unnoticed, and the answer to a checkpoint's commit lost. A database that
        is gone cannot be asked; the session is then None.

        Args:
            patience_s: How long a database that is gone is waited for.
        """
        if self.session is None:
            return
        clock = self._environment.clock
        deadline_s = clock.monotonic_s() + patience_s
        while not self._try_to_settle():
            if clock.monotonic_s() >= deadline_s or clock.wait(self._environment.stop.event, SETTLE_PAUSE_S):
                return

    def _try_to_settle(self) -> bool:
        with suppress(psycopg.OperationalError, TransientError):
            if self.session is None:
                self.session = leases.open_owner_session(self._environment.store, self.lease.job_id)
            self._recount(self.session)
            return True
        self.drop_session()
        return False

    def _recount(self, session: StoreConnection) -> None:
        if self.run_id is None:
            return
        counted = runs.load_totals(session, self.run_id)
        if counted is None:
            return
        totals, self.checkpoint_id = counted
        # At most once, rows are committed after their checkpoint was recorded: the store knows less than we do.
        if self._environment.job.mode is not CheckpointMode.AT_MOST_ONCE:
            self.totals = totals

    def drop_session(self) -> None:
        """Cut the owner's session."""
        if self.session is not None:
            self.session.close()
            self.session = None
