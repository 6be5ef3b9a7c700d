from __future__ import annotations

from datetime import timedelta
from typing import Any

import polars as pl
import pytest

from etl.event_time import EventTime
from etl.guarantee import Guarantee, classic_markdown, classic_table, guarantee_of, guarantees_of
from etl.job import Job
from etl.keyed_process import ValueState
from etl.sink import CheckpointMode
from tests.support.declarations import (
    DeclaredSink,
    DeclaredSource,
    DirectSink,
    IdempotentSink,
    OneTimeSource,
    TwoPhaseSink,
    VersionedSink,
    orders_job,
)


def guarantee(sink: DeclaredSink, mode: CheckpointMode = CheckpointMode.EXACTLY_ONCE) -> Guarantee:
    job = Job("revenue")
    job.read("orders", DeclaredSource()).write("out", sink)
    return guarantees_of(job.graph(), mode)[0].guarantee


@pytest.mark.parametrize(
    ("sink", "expected"),
    [
        (DeclaredSink(), Guarantee.EXACTLY_ONCE),
        (TwoPhaseSink(), Guarantee.EXACTLY_ONCE),
        (VersionedSink(), Guarantee.EXACTLY_ONCE),
        (IdempotentSink(), Guarantee.EFFECTIVELY_ONCE),
        (DirectSink(), Guarantee.AT_LEAST_ONCE),
    ],
)
def test_guarantee_depends_on_the_delivery(sink: DeclaredSink, expected: Guarantee) -> None:
    assert guarantee(sink) is expected


@pytest.mark.parametrize("mode", list(CheckpointMode))
def test_guarantee_is_no_stronger_than_the_mode(mode: CheckpointMode) -> None:
    assert guarantee(TwoPhaseSink(), mode) == str(mode)


def test_guarantee_is_the_weakest_of_all_sources_upstream() -> None:
    job = Job("revenue")
    files, pipe = job.read("files", DeclaredSource()), job.read("pipe", OneTimeSource())
    files.write("safe", TwoPhaseSink())
    files.union(pipe).write("mixed", TwoPhaseSink())
    safe, mixed = guarantees_of(job.graph(), CheckpointMode.EXACTLY_ONCE)
    assert (safe.guarantee, mixed.guarantee) == (Guarantee.EXACTLY_ONCE, Guarantee.AT_MOST_ONCE)
    assert mixed.reasons[0] == (
        'source "pipe": the source cannot be read again: what was read before a failure is lost'
    )


@pytest.mark.parametrize(
    ("sink", "expected"),
    [
        (TwoPhaseSink(), Guarantee.EXACTLY_ONCE),
        (VersionedSink(), Guarantee.AT_LEAST_ONCE),
        (DirectSink(), Guarantee.AT_LEAST_ONCE),
    ],
)
def test_non_deterministic_function_weakens_sinks_that_show_rows_early(sink: DeclaredSink, expected: Guarantee) -> None:
    job = Job("revenue")
    job.read("orders", DeclaredSource()).map(lambda row: row, deterministic=False).write("out", sink)
    graph = job.graph()
    found = guarantee_of(graph, CheckpointMode.EXACTLY_ONCE, graph.sinks[0])
    assert found.guarantee is expected
    assert any(reason.startswith('"map-1" is not deterministic') for reason in found.reasons)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"on_clock_timer": print}, "fires timers by the clock"),
        ({"ttl": timedelta(days=1)}, "forgets by the clock"),
        ({"time": "at", "on_timer": print}, "fires timers between rows in the order of their arrival"),
        ({"time": "at", "on_timer": print, "in_order": True}, None),
        ({"time": "at", "ttl": timedelta(days=1)}, None),
    ],
)
def test_what_goes_by_the_clock_or_by_arrival_weakens_sinks_that_show_rows_early(
    changes: dict[str, Any], problem: str | None
) -> None:
    job = Job("revenue")
    source = DeclaredSource({"id": "int8", "at": "timestamptz"})
    rows = job.read("orders", source, event_time=EventTime("at"))
    results = rows.key_by("id").process("timed", lambda row, state: None, state={"n": ValueState("int8")}, **changes)
    results.write("safe", TwoPhaseSink())
    results.write("early", VersionedSink())
    safe, early = guarantees_of(job.graph(), CheckpointMode.EXACTLY_ONCE)
    assert safe.guarantee is Guarantee.EXACTLY_ONCE
    assert early.guarantee is (Guarantee.EXACTLY_ONCE if problem is None else Guarantee.AT_LEAST_ONCE)
    if problem is not None:
        assert early.reasons[0] == (f'"timed" {problem}: a replay may leave other rows beside those already visible')


def test_forgetting_keys_by_the_clock_weakens_sinks_that_show_rows_early() -> None:
    job = Job("revenue")
    job.read("orders", DeclaredSource()).deduplicate("once", "id", ttl=timedelta(days=1)).write("out", VersionedSink())
    (found,) = guarantees_of(job.graph(), CheckpointMode.EXACTLY_ONCE)
    assert found.guarantee is Guarantee.AT_LEAST_ONCE
    assert found.reasons[0].startswith('"once" forgets by the clock')


def test_classic_table_is_the_table_of_stream_processing() -> None:
    assert [(row.source, row.sink, str(row.guarantee)) for row in classic_table()] == [
        ("cannot be replayed", "any sink", "at-most-once"),
        ("replayable", "any sink that writes at once", "at-least-once"),
        ("replayable", "idempotent (upsert by key)", "exactly-once in the end"),
        ("replayable", "idempotent (upsert by key) with a version guard", "exactly-once"),
        ("replayable", "write-ahead log, target without transactions", "at-least-once"),
        ("replayable", "write-ahead log, rows and ledger in one transaction", "exactly-once"),
        ("replayable", "two-phase commit", "exactly-once"),
        ("replayable", "one transaction with the positions", "exactly-once"),
    ]


def test_classic_table_as_markdown_has_a_line_for_each_row() -> None:
    lines = classic_markdown().splitlines()
    assert lines[:2] == ["| source | sink | guarantee | because |", "|---|---|---|---|"]
    assert len(lines) == 2 + len(classic_table())


@pytest.mark.parametrize(
    ("sink", "united", "expected"),
    [
        (TwoPhaseSink(), True, Guarantee.EXACTLY_ONCE),
        (VersionedSink(), True, Guarantee.AT_LEAST_ONCE),
        (VersionedSink(), False, Guarantee.EXACTLY_ONCE),
    ],
)
def test_first_of_several_inputs_weakens_sinks_that_show_rows_early(
    sink: DeclaredSink, united: bool, expected: Guarantee
) -> None:
    job, orders = orders_job()
    stream = orders.union(job.read("more", DeclaredSource())) if united else orders
    stream.deduplicate("seen", "status").write("out", sink)
    (found,) = guarantees_of(job.graph(), CheckpointMode.EXACTLY_ONCE)
    assert found.guarantee is expected
    assert '"seen": its state is stored with the positions' in found.reasons


@pytest.mark.parametrize("rebalanced", [False, True])
def test_rows_out_of_order_weaken_sinks_that_show_rows_early(rebalanced: bool) -> None:
    job = Job("revenue")
    orders = job.read("orders", DeclaredSource(), parallelism=1 if rebalanced else 2)
    orders = orders.rebalance(2) if rebalanced else orders
    orders.deduplicate("seen", "status").write("out", VersionedSink())
    assert guarantees_of(job.graph(), CheckpointMode.EXACTLY_ONCE)[0].guarantee is Guarantee.AT_LEAST_ONCE


def test_aggregation_does_not_care_which_input_comes_first() -> None:
    job, orders = orders_job()
    united = orders.union(job.read("more", DeclaredSource()))
    united.key_by("status").aggregate("rows", rows=pl.len()).write("out", VersionedSink())
    assert guarantees_of(job.graph(), CheckpointMode.EXACTLY_ONCE)[0].guarantee is Guarantee.EXACTLY_ONCE
