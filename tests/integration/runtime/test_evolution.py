"""Functions whose state changes its shape from one version of a job to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import polars as pl
import psycopg
import pytest

from etl import CheckpointPolicy, Job, ListState, MapState, Upcaster, ValueState
from etl.errors import ConfigurationError
from etl.keyed_process import StateSpec
from etl.runtime.rewinding import StartFrom
from etl.runtime.run import RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.summary import RunSummary
from etl.runtime.telemetry import Telemetry
from etl.store import pruning
from etl.store.database import Database
from sinks import PostgresTable, UpsertSink
from tests.support.scripted import Numbers

KEYS = 5
FORMER: Mapping[str, StateSpec] = {"total": ValueState("int8"), "seen": ListState("int8")}


def remember(row: dict[str, Any], state: Any) -> Iterator[dict[str, Any]]:
    """The total and number of the ids of a key so far."""
    state.total.value = (state.total.value or 0) + row["id"]
    state.seen.append(row["id"])
    yield {"key": row["key"], "shown": f"{state.total.value} of {len(state.seen)}"}


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the job."""

    function: Callable[..., Any] = remember
    state: Mapping[str, StateSpec] = field(default_factory=lambda: FORMER)
    upcast: Sequence[Upcaster] = ()
    forget: Sequence[str] = ()
    parallelism: int = 2
    keys_in_memory: int | None = None

    def job(self, count: int) -> Job:
        job = Job("evolving", checkpoint=CheckpointPolicy(interval_s=60.0, rows=10), parallelism=self.parallelism)
        keyed = job.read("numbers", Numbers(count, batch_rows=5)).with_columns(key=pl.col("id") % KEYS).key_by("key")
        shown = keyed.process(
            "memory",
            self.function,
            state=self.state,
            upcast=self.upcast,
            forget=self.forget,
            schema={"key": "int8", "shown": "text"},
            keys_in_memory=self.keys_in_memory,
        )
        shown.write("out", UpsertSink(PostgresTable("shown", key="key", create=True)))
        return job


def run(url: str, job: Job, start: str | None = None) -> RunSummary:
    options = RunOptions(start=None if start is None else StartFrom(start, keep_written=True))
    return run_job(job, Database(url, "store"), {}, options, Telemetry(), StopSignal())


def go(url: str, version: Version, count: int, start: str | None = None) -> None:
    summary = run(url, version.job(count), start)
    assert (summary.exit_code, summary.error) == (0, None)


def shown(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        return [text for (text,) in connection.execute("SELECT shown FROM shown ORDER BY key").fetchall()]


def former(count: int) -> list[str]:
    return [f"{sum(range(key, count, KEYS))} of {len(range(key, count, KEYS))}" for key in range(KEYS)]


# --- a changed type ---------------------------------------------------------------------------------------------------


def in_cents(row: dict[str, Any], state: Any) -> Iterator[dict[str, Any]]:
    state.total.value = (state.total.value or Decimal("0.00")) + Decimal(row["id"])
    state.counts["seen"] = state.counts.get("seen", 0) + 1
    yield {"key": row["key"], "shown": f"{state.total.value} of {state.counts['seen']}"}


def to_cents(before: dict[str, Any]) -> dict[str, Any]:
    return {"total": Decimal(before["total"]), "counts": {"seen": len(before["seen"])}}


CENTS: Mapping[str, StateSpec] = {"total": ValueState("numeric(12,2)"), "counts": MapState("text", "int8")}
UPCAST = Upcaster(FORMER, to_cents)


def cents(count: int) -> list[str]:
    return [f"{sum(range(key, count, KEYS))}.00 of {len(range(key, count, KEYS))}" for key in range(KEYS)]


@pytest.mark.parametrize("keys_in_memory", [None, 1])
def test_upcaster_turns_former_state_into_the_present_one_once(
    store_url: str, keys_in_memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "PRUNE_STATE_EVERY", 1)
    go(store_url, Version(), 37)
    assert shown(store_url) == former(37)
    # One row: most key groups are not touched by it, and are in the present shape all the same.
    go(store_url, Version(in_cents, CENTS, [UPCAST], keys_in_memory=keys_in_memory), 38)
    go(store_url, Version(in_cents, CENTS, parallelism=3), 80)
    assert shown(store_url) == cents(80)
    # Number 4 is the last one in the former shape: it is still there to go back to.
    go(store_url, Version(in_cents, CENTS, [UPCAST]), 80, "4")
    assert shown(store_url) == cents(80)


def test_upcaster_that_is_not_needed_is_not_called(store_url: str) -> None:
    def never(_before: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("it is in the present shape already")

    go(store_url, Version(in_cents, CENTS), 37)
    go(store_url, Version(in_cents, CENTS, [Upcaster(FORMER, never)]), 80)
    assert shown(store_url) == cents(80)


def test_each_former_shape_has_its_upcaster(store_url: str) -> None:
    oldest: Mapping[str, StateSpec] = {"total": ValueState("text")}

    def spelled(row: dict[str, Any], state: Any) -> Iterator[dict[str, Any]]:
        state.total.value = str(int(state.total.value or "0") + row["id"])
        yield {"key": row["key"], "shown": state.total.value}

    def from_text(before: dict[str, Any]) -> dict[str, Any]:
        return {"total": Decimal(before["total"]), "counts": {"seen": 2}}

    go(store_url, Version(spelled, oldest), 10)
    go(store_url, Version(in_cents, CENTS, [UPCAST, Upcaster(oldest, from_text)]), 42)
    assert shown(store_url) == cents(42)


def test_changed_type_without_an_upcaster_is_refused_with_the_cure(store_url: str) -> None:
    go(store_url, Version(), 37)
    refused = run(store_url, Version(in_cents, CENTS).job(50))
    assert (refused.exit_code, refused.restarts) == (70, 0)
    assert refused.error == (
        'state of operator "memory" has columns key (int64), total (int8), seen (list of int8), and the job\'s operator'
        " keeps key (int64), total (numeric(12,2)), counts (map of text to int8); say with"
        " process(…, upcast=[Upcaster({…}, function)]) how the one becomes the other, or give states up with"
        ' process(…, forget=[…]); or give the changed operator a new uid, and the old one to Job(…, forget=["memory"])'
    )
    go(store_url, Version(), 50)
    assert shown(store_url) == former(50)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ({"total": 7}, "Decimal"),
        ({"total": Decimal("0.001")}, "0.001"),
        ({"counts": [1]}, 'state "counts": list is no dictionary'),
        ({"counts": {None: 1}}, 'state "counts": None is no key'),
        ({"other": 1}, "it returned states other, which are not declared"),
        (None, "it returned NoneType, not states by name"),
    ],
)
def test_upcaster_that_returns_what_does_not_fit_stops_the_run(store_url: str, returned: Any, problem: str) -> None:
    go(store_url, Version(), 37)
    stopped = run(store_url, Version(in_cents, CENTS, [Upcaster(FORMER, lambda _before: returned)]).job(50))
    assert (stopped.exit_code, stopped.restarts) == (70, 0)
    assert str(stopped.error).startswith('state of operator "memory": upcaster ')
    assert problem in str(stopped.error)
    go(store_url, Version(), 50)
    assert shown(store_url) == former(50)


def test_upcaster_that_raises_stops_the_run_and_names_the_key(store_url: str) -> None:
    def broken(before: dict[str, Any]) -> dict[str, Any]:
        return {"total": Decimal(before["totall"])}

    go(store_url, Version(), 3)
    stopped = run(store_url, Version(in_cents, CENTS, [Upcaster(FORMER, broken)]).job(50))
    assert stopped.exit_code == 70
    assert str(stopped.error).startswith('state of operator "memory": upcaster test_upcaster_that_raises')
    assert ", key {'key': " in str(stopped.error)
    assert str(stopped.error).endswith("KeyError: 'totall'")


def test_key_of_which_an_upcaster_leaves_nothing_is_forgotten(store_url: str) -> None:
    def only_even(before: dict[str, Any]) -> dict[str, Any]:
        return to_cents(before) if before["total"] % 2 == 0 else {}

    go(store_url, Version(), 37)
    go(store_url, Version(in_cents, CENTS, [Upcaster(FORMER, only_even)]), 42)
    expected = []
    for key in range(KEYS):
        before = range(key, 37, KEYS) if sum(range(key, 37, KEYS)) % 2 == 0 else range(0)
        after = range(37 + (key - 37) % KEYS, 42, KEYS)
        expected.append(f"{sum(before) + sum(after)}.00 of {len(before) + len(after)}")
    assert shown(store_url) == expected


# --- states that come and go ------------------------------------------------------------------------------------------


def noting(row: dict[str, Any], state: Any) -> Iterator[dict[str, Any]]:
    state.total.value = (state.total.value or 0) + row["id"]
    state.noted[row["id"]] = "x"
    yield {"key": row["key"], "shown": f"{state.total.value} of {len(state.noted)}"}


NOTING: Mapping[str, StateSpec] = {"noted": MapState("int8", "text"), "total": ValueState("int8")}


def test_new_state_begins_empty_and_one_that_is_given_up_goes(store_url: str) -> None:
    go(store_url, Version(), 37)
    go(store_url, Version(noting, NOTING, forget=["seen"]), 38)
    go(store_url, Version(noting, NOTING), 60)
    assert shown(store_url) == [
        f"{sum(range(key, 60, KEYS))} of {len([one for one in range(37, 60) if one % KEYS == key])}"
        for key in range(KEYS)
    ]


def test_state_that_is_gone_is_not_given_up_silently(store_url: str) -> None:
    go(store_url, Version(), 37)
    refused = run(store_url, Version(noting, NOTING).job(50))
    assert refused.exit_code == 70
    assert "or give states up with process(…, forget=[…])" in str(refused.error)


def test_mistakes_in_the_declaration_are_reported_together() -> None:
    same = [Upcaster(FORMER, to_cents), Upcaster(dict(FORMER), to_cents)]
    version = Version(
        upcast=[*same, Upcaster({"x": ValueState("nothing")}, to_cents), "no"],  # type: ignore[list-item]
        forget=["seen"],
    )
    with pytest.raises(ConfigurationError) as refused:
        version.job(1).graph()
    assert [finding.problem.partition(" is not supported")[0] for finding in refused.value.findings] == [
        'it is to forget state "seen", which it has',
        'state "x": column type "nothing"',
        "'no' is no Upcaster",
        "two upcasters are for one shape",
    ]
