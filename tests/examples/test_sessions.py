"""Visits over several runs against visits that are worked out from the logs at once."""

from __future__ import annotations

import csv
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.examples.conftest import ExampleProject

GAP, PROMISE = timedelta(minutes=30), timedelta(seconds=10)
COLUMNS = ("visitor", "window_start", "window_end", "clicks", "entry", "exit")
Click = tuple[datetime, str, str]


def log_of(examples: ExampleProject, host: str) -> Path:
    return examples.dir / "jobs" / "clicks" / f"host-{host}.csv"


def clicks_of(examples: ExampleProject, host: str) -> list[Click]:
    with log_of(examples, host).open(encoding="utf-8", newline="") as file:
        return [(datetime.fromisoformat(row["at"]), row["visitor"], row["page"]) for row in csv.DictReader(file)]


def append(examples: ExampleProject, host: str, *clicks: Click) -> None:
    with log_of(examples, host).open("a", encoding="utf-8", newline="") as file:
        file.writelines(f"{at.isoformat()},{visitor},{page}\n" for at, visitor, page in clicks)


def visits(clicks: list[Click], *, until: datetime | None = None) -> list[tuple[Any, ...]]:
    """Those that have ended at a moment."""
    found = []
    for visitor in sorted({visitor for _, visitor, _ in clicks if visitor}):
        # Sorting is stable: of clicks in the same second the one that was read first comes first.
        mine = sorted((click for click in clicks if click[1] == visitor), key=lambda click: click[0])
        begins = [number for number, (at, _, _) in enumerate(mine) if not number or at - mine[number - 1][0] >= GAP]
        for first, end in zip(begins, [*begins[1:], len(mine)], strict=True):
            one = mine[first:end]
            found.append((visitor, one[0][0], one[-1][0] + GAP, len(one), one[0][2], one[-1][2]))
    return [one for one in found if until is None or one[2] <= until]


def check(examples: ExampleProject, clicks: list[Click], *, until: datetime | None = None) -> None:
    expected = visits(clicks, until=until)
    assert expected
    assert sorted(examples.rows("visits", *COLUMNS)) == sorted(expected)


def test_visits_go_on_from_run_to_run(examples: ExampleProject) -> None:
    examples.run("jobs.sessions")
    second = clicks_of(examples, "b")
    check(examples, clicks_of(examples, "a") + second, until=max(second)[0] - PROMISE)

    at = max(clicks_of(examples, "a") + second)[0] + timedelta(minutes=1)
    append(examples, "a", (at, "ada", "/signup"), (at - PROMISE, "ada", "/prices"))
    append(examples, "b", (at + 2 * GAP, "ada", "/"))
    examples.run("jobs.sessions")
    check(examples, clicks_of(examples, "a") + clicks_of(examples, "b"), until=at + 2 * GAP - PROMISE)

    examples.run("jobs.sessions", "--drain")
    everything = clicks_of(examples, "a") + clicks_of(examples, "b")
    check(examples, everything)
    assert examples.rows("late_clicks", "visitor") == []

    append(examples, "b", (datetime(2024, 5, 17, 8, tzinfo=UTC), "eve", "/"))
    examples.run("jobs.sessions")
    check(examples, everything)
    assert examples.rows("late_clicks", "visitor", "page") == [("eve", "/")]
