"""Rates, lines and bars."""

from __future__ import annotations

import io
import sys
from datetime import UTC, datetime
from threading import Event

import pytest

from etl.cli.progress import (
    BarReporter,
    LineReporter,
    Rate,
    SilentReporter,
    Watched,
    choose_reporter,
    details,
    summary_line,
)
from etl.runtime.monitor import MonitorSnapshot, RunMonitor
from etl.runtime.summary import RunSummary
from etl.source import Progress
from etl.store.tables import RunStatus


class ManualClock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic_s(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return datetime(2024, 5, 1, tzinfo=UTC)

    def wait(self, event: Event, timeout_s: float) -> bool:
        self.seconds += timeout_s
        return event.is_set()

    def jitter(self) -> float:
        return 0.5


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate(window_s=5)
    for second, count in [(0, 0), (10, 1000), (15, 1500), (20, 3500)]:
        rate.add(second, count)

    assert rate.per_second == 400


def test_rate_is_unknown_at_first_and_after_a_restart() -> None:
    rate = Rate()
    rate.add(0, 10)
    assert rate.per_second is None

    rate.add(1, 20)
    rate.add(2, 5)
    assert rate.per_second is None


def test_details_name_everything_that_is_known() -> None:
    watched = Watched("orders", RunMonitor())
    for second in (0.0, 2.0):
        watched.rows.add(second, int(second * 1_000_000))
        watched.size_bytes.add(second, int(second * 10_000_000))

    snapshot = MonitorSnapshot("running", 2_000_000, 20_000_000, 120_000_000, {}, 7, 3.2, 1)

    assert details(watched, snapshot) == (
        "2,000,000 rows, 1,000,000 rows/s, 20.0 MB of 120.0 MB, 10s left, checkpoint 7 3.2s ago, 1 restarts"
    )


def test_details_leave_out_what_is_unknown() -> None:
    assert details(Watched("orders", RunMonitor()), MonitorSnapshot("starting", 0, 0, 0)) == "0 rows"


def test_summary_line_tells_all_counts() -> None:
    summary = RunSummary("orders", RunStatus.SUCCEEDED, 1234, {"a": 1000, "b": 5}, 2, 7, 1, 83.0)

    assert summary_line(summary) == (
        "orders: succeeded: 1,234 rows read; a 1,000, b 5 rows written; 2 rejected; checkpoint 7; 1 restarts; 1m 23s"
    )


def test_line_reporter_tells_the_rate_of_the_last_half_minute() -> None:
    clock, lines, monitor = ManualClock(), list[str](), RunMonitor()
    reporter = LineReporter(follow=False, write=lines.append, clock=clock)
    reporter.started("orders", monitor)

    clock.seconds = 30
    monitor.attempt_started(lambda: 600, lambda: [Progress(50, 100)])
    reporter.tick()
    reporter.ended("orders")
    reporter.tick()

    assert lines == ["orders: started", "orders: running: 600 rows, 20 rows/s, 50 B of 100 B, 30s left"]


def test_bar_reporter_draws_bars_and_prints_lines_above_them(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, monitor = Terminal(), RunMonitor()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    monitor.attempt_started(lambda: 600, lambda: [Progress(50, 100)])

    with BarReporter() as reporter:
        reporter.started("orders [red]", monitor)
        reporter.tick()
        reporter.say("orders: warning \x1b[2J")
        reporter.ended("orders [red]")

    shown = terminal.getvalue()
    assert "orders [red]" in shown
    assert "600 rows" in shown
    assert "50 B of 100 B" in shown
    assert "orders: warning \\x1b[2J" in shown


def test_reporter_is_chosen_by_where_stderr_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with choose_reporter(quiet=False, follow=False) as on_terminal:
        assert isinstance(on_terminal, BarReporter)
    assert isinstance(choose_reporter(quiet=True, follow=False), SilentReporter)

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with choose_reporter(quiet=False, follow=True) as on_file:
        assert isinstance(on_file, LineReporter)
