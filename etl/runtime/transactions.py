"""The store transactions in which checkpoints complete, shared by transactional sinks and the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from etl.errors import InternalError
from etl.sink import Connection, Emit, Ledger
from etl.store.database import StoreConnection
from etl.transaction import begin


class StoreTransaction:
    """One open transaction: sinks write rows in it, the coordinator completes the checkpoint in it and commits."""

    def __init__(self, connection: StoreConnection) -> None:
        self.connection = connection
        self._lock = Lock()

    @contextmanager
    def use(self) -> Iterator[Connection]:
        """See :meth:`etl.sink.CheckpointTransaction.use`."""
        with self._lock:
            yield self.connection.driver


class StoreTransactions:
    """Opens one transaction per checkpoint, at the first row; at most two are open (one committing, one filling).

    Args:
        open_session: Opens a session in the store.
        ledger: The store's fence; held from the first statement on.
        emit: Announces steps.
        exclusive: Whether one sink alone writes in them.
    """

    def __init__(
        self, open_session: Callable[[], StoreConnection], ledger: Ledger, emit: Emit, *, exclusive: bool = False
    ) -> None:
        self._open_session = open_session
        self._ledger = ledger
        self._emit = emit
        self._lock = Lock()
        self._filling: dict[int, StoreTransaction] = {}
        self._idle: list[StoreConnection] = []
        self._closed = False
        self._exclusive = exclusive

    @property
    def exclusive(self) -> bool:
        """See :meth:`etl.sink.CheckpointTransactions.exclusive`."""
        return self._exclusive

    def of(self, checkpoint_id: int) -> StoreTransaction:
        """See :meth:`etl.sink.CheckpointTransactions.of`."""
        with self._lock:
            if self._closed:
                raise InternalError("the attempt has ended")
            if checkpoint_id not in self._filling:
                self._filling[checkpoint_id] = self._begin(checkpoint_id)
            return self._filling[checkpoint_id]

    def _begin(self, checkpoint_id: int) -> StoreTransaction:
        connection = self._idle.pop() if self._idle else self._open_session()
        try:
            begin(connection.driver)
            self._emit("transaction.begun", checkpoint=checkpoint_id)
            self._ledger.hold_fence(connection.driver)
            self._emit("transaction.fenced", checkpoint=checkpoint_id)
        except BaseException:
            connection.close()
            raise
        return StoreTransaction(connection)

    @contextmanager
    def completing(self, checkpoint_id: int, *, apart: bool = False) -> Iterator[StoreConnection]:
        """The session of a checkpoint's transaction, for completing and committing it in the block.

        A new transaction when no sink has written, or with ``apart`` (at-most-once records the position first). When
        the block raises the session is cut: whether its commit took place is read from the head row by the next claim.
        """
        with self._lock:
            filled = None if apart else self._filling.pop(checkpoint_id, None)
            connection = (filled or self._begin(checkpoint_id)).connection
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)

    def close(self) -> None:
        """Abandon everything open. Sessions are cut, so the server rolls back."""
        with self._lock:
            self._closed = True
            for connection in [*self._idle, *(one.connection for one in self._filling.values())]:
                connection.close()
            self._idle.clear()
            self._filling.clear()
