"""Waiting for what the server or another process does in its own time: looked for again and again, and not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT_S = 10.0
PAUSE_S = 0.005


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Return as soon as the condition holds.

    Raises:
        AssertionError: It never held.
    """
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"never came: {what}"
        time.sleep(PAUSE_S)
