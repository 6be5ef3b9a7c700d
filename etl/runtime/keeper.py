"""Keeps the lease: moves the heartbeat from the owner's session, and notices what others want of the run.

That is: to take the job over, which ends it, or a savepoint of it.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

from etl.clock import Clock
from etl.store import lease as leases
from etl.store.database import Connection
from etl.store.lease import Lease

HEARTBEAT_MAX_S = 1.0


class LeaseKeeper:
    """A thread that beats until it is stopped; what goes wrong is reported once and ends it.

    Args:
        connection: The owner's session, used by nobody else meanwhile.
        lease: The lease to keep.
        owner_timeout_s: Others take over after so long without a beat; four beats fit in.
        report: Called with the error.
        asked: Called while a savepoint is asked for, with whether the run is to end with it.
        clock: For waiting.
    """

    def __init__(
        self,
        connection: Connection,
        lease: Lease,
        owner_timeout_s: float,
        report: Callable[[BaseException], None],
        asked: Callable[[bool], None],
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._lease = lease
        self._interval_s = min(HEARTBEAT_MAX_S, owner_timeout_s / 4)
        self._report = report
        self._asked = asked
        self._clock = clock
        self._ended = Event()
        self._thread = Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """End; the owner's session is free for others when this returns."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._clock.wait(self._ended, self._interval_s):
                stop = leases.beat(self._connection, self._lease)
                if stop is not None:
                    self._asked(stop)
        except Exception as error:  # noqa: BLE001 - reported, and raised by the coordinator
            self._report(error)
