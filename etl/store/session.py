"""A connection that knows how long it has been waiting for the server, and that another thread can cut."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from threading import Lock
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen

Result = TypeVar("Result")


class Session(psycopg.Connection[Any]):
    """One session of the server.

    Attributes:
        server_pid: Its process on the server, by which the server can be asked about it; None until that is known.
        waiting_since_s: When it began to wait for the server, monotonic; None while it does not.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_pid: int | None = None
        self.waiting_since_s: float | None = None
        self._ending = Lock()
        self._cut_because: str | None = None

    def wait(self, gen: PQGen[Result], *args: Any, **kwargs: Any) -> Result:
        """See :meth:`psycopg.Connection.wait`, through which everything goes that may block."""
        self.waiting_since_s = time.monotonic()
        try:
            return super().wait(gen, *args, **kwargs)
        except psycopg.OperationalError as error:
            if self._cut_because is None:
                raise
            raise psycopg.OperationalError(self._cut_because) from error
        finally:
            self.waiting_since_s = None

    def cut(self, because: str) -> None:
        """End the connection under whoever waits on it, who gets an :class:`psycopg.OperationalError`.

        Args:
            because: The text of that error.
        """
        # close() gives the number of the socket back, which may soon be that of another one.
        with self._ending:
            if self.closed:
                return
            self._cut_because = because
            # One that is not connected any more needs no cutting.
            with socket.socket(fileno=os.dup(self.fileno())) as view, suppress(OSError):
                view.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the session; an open transaction is rolled back by the server."""
        with self._ending:
            super().close()
