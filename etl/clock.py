"""Time and randomness as the engine sees them: injected, so that tests can turn them."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime, timedelta
from threading import Event
from typing import Protocol

SPAN_MAX = timedelta(days=366_000)
"""Declared spans of a thousand years are a mistake, and integers would overflow some time behind them."""


class Clock(Protocol):
    """What the engine asks of time. No wall clock ever decides about ownership, order or positions."""

    def monotonic_s(self) -> float:
        """Seconds that only grow; for intervals and timeouts."""
        ...

    def now(self) -> datetime:
        """Aware wall-clock time in UTC; for people to read."""
        ...

    def wait(self, event: Event, timeout_s: float) -> bool:
        """Wait until ``event`` is set or ``timeout_s`` has passed; True when it was set."""
        ...

    def jitter(self) -> float:
        """A random factor in [0.5, 1.0) that keeps restarting runs from moving in step."""
        ...


class SystemClock:
    """The machine's own clock."""

    def monotonic_s(self) -> float:
        """Seconds that only grow."""
        return time.monotonic()

    def now(self) -> datetime:
        """Wall-clock time in UTC."""
        return datetime.now(UTC)

    def wait(self, event: Event, timeout_s: float) -> bool:
        """Wait for an event."""
        return event.wait(timeout_s)

    def jitter(self) -> float:
        """A random factor."""
        return random.uniform(0.5, 1.0)
