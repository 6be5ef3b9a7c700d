"""Time that goes on only when a script says so."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from threading import Event

from etl.errors import ConfigurationError, Finding


class ManualClock:
    """See :class:`etl.clock.Clock`.

    Args:
        now: What it shows at first.
    """

    def __init__(self, now: datetime) -> None:
        self._began = now
        self._now = now

    def advance(self, span: timedelta) -> None:
        """Let time pass."""
        self._now += span

    def monotonic_s(self) -> float:
        """See :class:`etl.clock.Clock`."""
        return (self._now - self._began).total_seconds()

    def now(self) -> datetime:
        """See :class:`etl.clock.Clock`."""
        return self._now

    def wait(self, event: Event, timeout_s: float) -> bool:
        """See :class:`etl.clock.Clock`; nothing happens meanwhile."""
        self._now += timedelta(seconds=timeout_s)
        return event.is_set()

    def jitter(self) -> float:
        """See :class:`etl.clock.Clock`."""
        return 1.0


def clock_begins(now: datetime | None) -> datetime:
    """What the clock shows at the beginning of a play: what was asked for, or what the machine shows.

    Raises:
        ConfigurationError: It has no time zone.
    """
    if now is not None and now.utcoffset() is None:
        finding = Finding("now", f"{now!r} has no time zone", "e.g. datetime(2024, 5, 1, tzinfo=UTC)")
        raise ConfigurationError.from_findings("play", [finding])
    return now or datetime.now(UTC)
