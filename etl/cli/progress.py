"""What a person sees while jobs run: bars on a terminal, a few quiet lines elsewhere, nothing with ``--quiet``.

Numbers come from each run's monitor, which any thread may read; nothing here slows the run down. All of it goes to
stderr: stdout belongs to the summary.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from etl.cli.output import format_bytes, format_duration, printable, write_line
from etl.clock import Clock, SystemClock
from etl.runtime.monitor import MonitorSnapshot, RunMonitor
from etl.runtime.summary import RunSummary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

LINE_INTERVAL_S = 30.0
BAR_INTERVAL_S = 0.2
RATE_WINDOW_S = 5.0
_SAMPLES_MAX = 256


class Rate:
    """Rows or bytes a second over the last few seconds, from a growing count."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: list[tuple[float, int]] = []

    def add(self, at_s: float, count: int) -> None:
        """Note a count. One that went down (a restart) begins anew."""
        if self._samples and count < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((at_s, count))
        while len(self._samples) > 2 and (
            at_s - self._samples[1][0] >= self._window_s or len(self._samples) > _SAMPLES_MAX
        ):
            del self._samples[0]

    @property
    def per_second(self) -> float | None:
        """None until two samples are there."""
        if len(self._samples) < 2:
            return None
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


@dataclass(slots=True)
class Watched:
    """One running job and how fast it moves."""

    name: str
    monitor: RunMonitor
    rows: Rate = field(default_factory=Rate)
    size_bytes: Rate = field(default_factory=Rate)

    def sample(self, at_s: float) -> MonitorSnapshot:
        """Read the monitor and update the rates."""
        snapshot = self.monitor.snapshot()
        self.rows.add(at_s, snapshot.rows_read)
        self.size_bytes.add(at_s, snapshot.bytes_done)
        return snapshot


class Reporter(ABC):
    """Tells people how runs go. Methods may be called from several threads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def started(self, job: str, monitor: RunMonitor) -> None:
        """A run begins."""

    @abstractmethod
    def ended(self, job: str) -> None:
        """A run has ended, well or not."""

    @abstractmethod
    def say(self, line: str) -> None:
        """Show a line that is no error."""

    def close(self) -> None:
        """No run is left."""
        return


class SilentReporter(Reporter):
    """Nothing on success; errors are printed by the caller."""

    def started(self, job: str, monitor: RunMonitor) -> None:
        """Say nothing."""

    def ended(self, job: str) -> None:
        """Say nothing."""

    def say(self, line: str) -> None:
        """Say nothing."""


class LineReporter(Reporter):
    """Start, end and warnings as lines; while following, a line every half minute."""

    def __init__(self, *, follow: bool, write: Callable[[str], None] = write_line, clock: Clock | None = None) -> None:
        self._write = write
        self._clock = clock or SystemClock()
        self._watched: dict[str, Watched] = {}
        self._ticker = Ticker(LINE_INTERVAL_S, self.tick) if follow else None

    def started(self, job: str, monitor: RunMonitor) -> None:
        """One line."""
        self._watched[job] = Watched(job, monitor, Rate(LINE_INTERVAL_S))
        self._watched[job].sample(self._clock.monotonic_s())
        self.say(f"{job}: started")

    def ended(self, job: str) -> None:
        """No more half-minute lines about it."""
        self._watched.pop(job, None)

    def say(self, line: str) -> None:
        """Write it."""
        self._write(line)

    def tick(self) -> None:
        """A line for each running job."""
        for watched in list(self._watched.values()):
            self.say(progress_line(watched, watched.sample(self._clock.monotonic_s())))

    def close(self) -> None:
        """Stop the half-minute lines."""
        if self._ticker is not None:
            self._ticker.stop()


class BarReporter(Reporter):
    """A bar for each running job on a terminal; lines above the bars for everything else."""

    def __init__(self, clock: Clock | None = None) -> None:
        # Imported here: rich costs 0.1 s that a run from cron need not pay.
        from rich.console import Console

        self._clock = clock or SystemClock()
        self._progress = _bars(Console(stderr=True, highlight=False))
        self._tasks: dict[str, tuple[Watched, TaskID]] = {}
        self._lock = threading.Lock()
        self._progress.start()
        self._ticker = Ticker(BAR_INTERVAL_S, self.tick)

    def started(self, job: str, monitor: RunMonitor) -> None:
        """Add a bar."""
        with self._lock:
            task = self._progress.add_task(printable(job), total=None, details="starting")
            self._tasks[job] = (Watched(job, monitor), task)

    def ended(self, job: str) -> None:
        """Remove the bar."""
        with self._lock:
            _, task = self._tasks.pop(job)
            self._progress.remove_task(task)
        self._progress.refresh()

    def say(self, line: str) -> None:
        """Print above the bars."""
        from rich.text import Text

        self._progress.console.print(Text(printable(line)), soft_wrap=True)

    def tick(self) -> None:
        """Move the bars."""
        with self._lock:
            for watched, task in self._tasks.values():
                snapshot = watched.sample(self._clock.monotonic_s())
                total = snapshot.bytes_total or None
                self._progress.update(
                    task, total=total, completed=snapshot.bytes_done, details=details(watched, snapshot)
                )
        self._progress.refresh()

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._ticker.stop()
        self._progress.stop()


class Ticker:
    """Calls a function at an interval, in a thread of its own, until stopped."""

    def __init__(self, interval_s: float, function: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._function = function
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etl-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for a call under way, and end."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._function()


def choose_reporter(*, quiet: bool, follow: bool) -> Reporter:
    """The reporter that suits where stderr goes."""
    if quiet:
        return SilentReporter()
    return BarReporter() if sys.stderr.isatty() else LineReporter(follow=follow)


def summary_line(summary: RunSummary) -> str:
    """``orders: succeeded: 9 rows read; paid_orders 6, customers 9 rows written; checkpoint 1; 0.8s``."""
    written = ", ".join(f"{uid} {rows:,}" for uid, rows in summary.rows_written.items())
    parts = [
        f"{summary.rows_read:,} rows read",
        f"{written} rows written" if written else "",
        f"{summary.rows_rejected:,} rejected" if summary.rows_rejected else "",
        f"checkpoint {summary.checkpoint}" if summary.checkpoint else "",
        f"{summary.restarts} restarts" if summary.restarts else "",
        format_duration(summary.duration_s),
    ]
    return f"{summary.job}: {summary.status}: {'; '.join(part for part in parts if part)}"


def progress_line(watched: Watched, snapshot: MonitorSnapshot) -> str:
    """One line about a running job."""
    return f"{watched.name}: {snapshot.state}: {details(watched, snapshot)}"


def details(watched: Watched, snapshot: MonitorSnapshot) -> str:
    """Rows, rows a second, bytes done of total, time left, last checkpoint; what is unknown is left out."""
    rate = watched.rows.per_second
    parts = [
        f"{snapshot.rows_read:,} rows",
        f"{rate:,.0f} rows/s" if rate is not None else "",
        f"{format_bytes(snapshot.bytes_done)} of {format_bytes(snapshot.bytes_total)}" if snapshot.bytes_total else "",
        _time_left(watched, snapshot),
        _last_checkpoint(snapshot),
        f"{snapshot.restarts} restarts" if snapshot.restarts else "",
    ]
    return ", ".join(part for part in parts if part)


def _time_left(watched: Watched, snapshot: MonitorSnapshot) -> str:
    rate = watched.size_bytes.per_second
    left = snapshot.bytes_total - snapshot.bytes_done
    return f"{format_duration(left / rate)} left" if rate and left > 0 else ""


def _last_checkpoint(snapshot: MonitorSnapshot) -> str:
    if not snapshot.checkpoint:
        return ""
    age = snapshot.checkpoint_age_s
    return f"checkpoint {snapshot.checkpoint}" + (f" {format_duration(age)} ago" if age is not None else "")


def _bars(console: Console) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(24),
        TextColumn("{task.fields[details]}", markup=False),
    )
    return Progress(*columns, console=console, auto_refresh=False, transient=True)
