"""Live figures of a run, for progress displays. Written by the engine, read by anybody, exact only at checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

from etl.clock import Clock, SystemClock
from etl.source import Progress


@dataclass(frozen=True, slots=True)
class MonitorSnapshot:
    """Figures at one moment.

    Attributes:
        state: ``starting``, ``recovering``, ``running``, ``restarting`` or ``ended``.
        rows_read: Records read so far, replayed ones counted again.
        bytes_done: Bytes of the sources read.
        bytes_total: Bytes there are to read, 0 when unknown.
        rows_written: Rows made visible by this run, by sink uid.
        checkpoint: Last completed checkpoint, 0 before the first.
        checkpoint_age_s: Seconds since it was completed by this run, None before the first.
        restarts: Attempts beyond the first.
        message: The reason of the latest restart, or empty.
    """

    state: str
    rows_read: int
    bytes_done: int
    bytes_total: int
    rows_written: dict[str, int] = field(default_factory=dict)
    checkpoint: int = 0
    checkpoint_age_s: float | None = None
    restarts: int = 0
    message: str = ""


class RunMonitor:
    """Collects figures of one run."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = Lock()
        self._state = "starting"
        self._rows_of_former_attempts = 0
        self._count_rows: Callable[[], int] = lambda: 0
        self._measure: Callable[[], Sequence[Progress]] = tuple
        self._rows_written: dict[str, int] = {}
        self._checkpoint = 0
        self._completed_s: float | None = None
        self._restarts = 0
        self._message = ""

    def attempt_started(self, rows: Callable[[], int], progress: Callable[[], Sequence[Progress]]) -> None:
        """A new attempt reads; ``rows`` and ``progress`` are asked for live figures."""
        with self._lock:
            self._rows_of_former_attempts += self._count_rows()
            self._count_rows, self._measure = rows, progress
            self._state = "running"

    def state_changed(self, state: str, message: str = "", restarts: int = 0) -> None:
        """Tell what the run is doing."""
        with self._lock:
            self._state, self._message, self._restarts = state, message, restarts

    def checkpoint_completed(self, checkpoint_id: int, rows_written: Mapping[str, int]) -> None:
        """A checkpoint is complete and its rows, by sink uid, are visible."""
        with self._lock:
            self._checkpoint, self._completed_s = checkpoint_id, self._clock.monotonic_s()
            for uid, rows in rows_written.items():
                self._rows_written[uid] = self._rows_written.get(uid, 0) + rows

    def snapshot(self) -> MonitorSnapshot:
        """Figures now."""
        with self._lock:
            measured = self._measure()
            age_s = None if self._completed_s is None else self._clock.monotonic_s() - self._completed_s
            return MonitorSnapshot(
                state=self._state,
                rows_read=self._rows_of_former_attempts + self._count_rows(),
                bytes_done=sum(one.done_bytes for one in measured),
                bytes_total=sum(one.total_bytes for one in measured),
                rows_written=dict(self._rows_written),
                checkpoint=self._checkpoint,
                checkpoint_age_s=age_s,
                restarts=self._restarts,
                message=self._message,
            )
