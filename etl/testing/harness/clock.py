"""Time that stands still while a script is played."""

from __future__ import annotations

from datetime import datetime
from threading import Event


class FrozenClock:
    """See :class:`etl.clock.Clock`.

    Args:
        now: What it shows.
    """

    def __init__(self, now: datetime) -> None:
        self._now = now

    def monotonic_s(self) -> float:
        """See :class:`etl.clock.Clock`."""
        return 0.0

    def now(self) -> datetime:
        """See :class:`etl.clock.Clock`."""
        return self._now

    def wait(self, event: Event, timeout_s: float) -> bool:  # noqa: ARG002 - no time passes
        """See :class:`etl.clock.Clock`."""
        return event.is_set()

    def jitter(self) -> float:
        """See :class:`etl.clock.Clock`."""
        return 1.0
