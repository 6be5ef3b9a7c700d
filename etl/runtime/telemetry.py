"""Named events of the running engine: every step of the protocol announces itself here as it happens.

Listeners see events in the thread in which they happen, before the engine goes on. Tests attach faults to them, so
the list of steps that is tested is the list of steps that is run. docs/telemetry.md has the table of events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One step: its name, such as ``checkpoint.completed``, and what it is about."""

    name: str
    fields: Mapping[str, Any]


Listener = Callable[[Event], None]


class Telemetry:
    """Hands events to listeners. Subscribe before the run starts; emitting is thread-safe."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()

    def subscribe(self, listener: Listener) -> None:
        """Add a listener. What it raises is raised at the step, and fails the attempt there."""
        self._listeners = (*self._listeners, listener)

    def emit(self, name: str, **fields: Any) -> None:
        """Announce a step."""
        if not self._listeners:
            return
        event = Event(name, fields)
        for listener in self._listeners:
            listener(event)
