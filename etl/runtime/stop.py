"""A request to stop, from a signal handler or a test, seen by whoever drives the run."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event


class StopSignal:
    """Set once, never cleared. ``request`` is safe inside a signal handler.

    Attributes:
        event: Set by a request.
        signum: Decides the exit code.
        with_savepoint: Whether somebody asked for a savepoint that the run ends with. That is no hurry: the run takes
            the time it needs, and tries again when an attempt fails.
    """

    def __init__(self) -> None:
        self.event = Event()
        self.signum: int | None = None
        self.with_savepoint = False
        self._listener: Callable[[], None] | None = None

    @property
    def requested(self) -> bool:
        """Whether somebody asked."""
        return self.event.is_set()

    def request(self, signum: int) -> None:
        """Ask for a final checkpoint and the end of the run; ``signum`` decides the exit code."""
        self.signum = signum
        self.event.set()
        if self._listener is not None:
            self._listener()

    def tell(self, listener: Callable[[], None] | None) -> None:
        """Have the running attempt told, at once when the request has already been made."""
        self._listener = listener
        if listener is not None and self.requested:
            listener()
