from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest

import etl
from etl import CheckpointMode, CheckpointPolicy, ConfigurationError, Job, RestartPolicy
from etl.event_time import EventTime
from etl.job import find_jobs
from tests.support.declarations import DeclaredSink, DeclaredSource, orders_job


def problems(job: Job) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        job.graph()
    return [f"{finding.subject}: {finding.problem}" for finding in caught.value.findings]


def complete(job: Job) -> Job:
    job.read("orders", DeclaredSource()).write("paid", DeclaredSink())
    return job


def test_public_names_are_all_there() -> None:
    assert [name for name in etl.__all__ if not hasattr(etl, name)] == []
    assert set(etl.__all__) <= set(dir(etl))


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'etl' has no attribute 'Pipeline'"):
        _ = etl.Pipeline


def test_import_of_etl_loads_neither_polars_nor_pyarrow() -> None:
    code = "import etl, sys; print(sorted({'polars', 'pyarrow', 'psycopg', 'sqlalchemy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_job_has_defaults() -> None:
    job = Job("revenue")
    assert job.mode is CheckpointMode.EXACTLY_ONCE
    assert job.checkpoint == CheckpointPolicy(interval_s=10.0, rows=None, timeout_s=600.0, keep=10)
    assert job.restart == RestartPolicy(attempts=10, delay_s=0.5, delay_max_s=30.0)
    assert (job.schedule, job.owner_timeout_s) == (None, 30.0)


def test_job_knows_the_file_that_made_it() -> None:
    assert Job("revenue").module_file == Path(__file__)


@pytest.mark.parametrize("name", ["revenue", "Umsatz täglich (EUR)", "x" * 200, "売上"])
def test_job_accepts_any_printable_name(name: str) -> None:
    assert complete(Job(name)).graph().sources[0].uid == "orders"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "the name is empty"),
        ("  ", "the name is empty"),
        ("x" * 201, "the name has 201 characters"),
        ("a\nb", "the name has control characters"),
        ("a\0b", "the name has control characters"),
    ],
)
def test_job_refuses_a_name(name: str, problem: str) -> None:
    assert problems(complete(Job(name))) == [f"job {name!r}: {problem}"]


def test_name_with_a_newline_does_not_break_the_error_line() -> None:
    with pytest.raises(ConfigurationError, match=re.escape(r"job 'a\nb'")) as caught:
        complete(Job("a\nb")).graph()
    assert "a\nb" not in str(caught.value)


@pytest.mark.parametrize(
    "schedule", ["*/5 * * * *", "0 0 1,15 jan-mar mon", "1-59/2 0-23 * * 7", "5,10-20/5 * 31 12 0"]
)
def test_job_accepts_a_schedule(schedule: str) -> None:
    assert len(complete(Job("revenue", schedule=schedule)).graph().nodes) == 2


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        ("* * * *", '"* * * *" has 4 fields, cron has 5: minute, hour, day of the month, month, day of the week'),
        ("60 * * * *", '"60" is no minute: numbers 0-59, *, a-b, /step and lists of them'),
        ("* 5-3 * * *", '"5-3" is no hour: numbers 0-23, *, a-b, /step and lists of them'),
        ("* * 0 * *", '"0" is no day of the month: numbers 1-31, *, a-b, /step and lists of them'),
        ("* * * may,foo *", '"foo" is no month: numbers 1-12, *, a-b, /step and lists of them'),
        ("*/0 * * * *", '"*/0" is no minute: numbers 0-59, *, a-b, /step and lists of them'),
        ("5/10 * * * *", '"5/10" is no minute: numbers 0-59, *, a-b, /step and lists of them'),
        ("1,,2 * * * *", '"" is no minute: numbers 0-59, *, a-b, /step and lists of them'),
        ("* * * *\n*", "the schedule has more than one line"),
        ("* * * * ٣", '"٣" is no day of the week: numbers 0-7, *, a-b, /step and lists of them'),
    ],
)
def test_job_refuses_a_schedule(schedule: str, problem: str) -> None:
    assert problems(complete(Job("revenue", schedule=schedule))) == [f"schedule: {problem}"]


def test_job_reports_all_mistakes_at_once() -> None:
    job = Job("", schedule="x", owner_timeout_s=float("nan"))
    job.read("orders", DeclaredSource())
    assert len(problems(job)) == 5


@pytest.mark.parametrize(
    "settings",
    [{"interval_s": 0.0}, {"rows": 0}, {"timeout_s": -1.0}, {"keep": 0}, {"interval_s": float("inf")}],
)
def test_checkpoint_policy_refuses_bounds(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=rf"checkpoint policy: 1 problem.*\n.*{next(iter(settings))}"):
        CheckpointPolicy(**settings)  # type: ignore[arg-type]


def test_restart_policy_refuses_a_bound_below_the_first_delay() -> None:
    with pytest.raises(ConfigurationError, match=r"RestartPolicy\.delay_max_s: 1 is not a finite number of at least 2"):
        RestartPolicy(delay_s=2, delay_max_s=1)


def test_union_refuses_a_stream_of_another_job() -> None:
    _, here = orders_job()
    _, there = orders_job()
    with pytest.raises(
        ConfigurationError, match=r"union at .*test_job\.py:\d+: .* is not a stream of Job\('revenue'\)"
    ):
        here.union(there)


def test_union_refuses_no_other_stream() -> None:
    with pytest.raises(ConfigurationError, match="no other stream is given"):
        orders_job()[1].union()


def test_find_jobs_lists_each_job_once_in_order() -> None:
    module = ModuleType("jobs")
    vars(module).update(b=Job("second"), a=Job("first"), number=3)
    vars(module).update(alias=module.b)
    assert [job.name for job in find_jobs(module)] == ["second", "first"]


def test_find_jobs_refuses_two_jobs_of_one_name() -> None:
    module = ModuleType("jobs")
    vars(module).update(a=Job("revenue"), b=Job("revenue"))
    with pytest.raises(ConfigurationError, match='jobs has 2 jobs named "revenue"'):
        find_jobs(module)


def test_graph_can_be_computed_again() -> None:
    job, orders = orders_job()
    orders.filter(pl.col("id") > 1).write("paid", DeclaredSink())
    assert [node.id for node in job.graph().nodes] == [node.id for node in job.graph().nodes]


@pytest.mark.parametrize("parallelism", [0, 129, -1, 1.5, True, "2"])
def test_parallelism_is_a_number_of_key_groups_at_most(parallelism: object) -> None:
    job = complete(Job("revenue", parallelism=parallelism))  # type: ignore[arg-type]
    assert problems(job) == [f"parallelism: {parallelism!r} is not 1 to 128"]
    other = Job("revenue")
    seen = other.read("orders", DeclaredSource()).deduplicate("seen", "id", parallelism=parallelism)  # type: ignore[arg-type]
    seen.write("out", DeclaredSink())
    assert [problem.split(": ", 1)[1] for problem in problems(other)] == [
        f"parallelism {parallelism!r} is not 1 to 128"
    ]


@pytest.mark.parametrize("parallelism", [0, 129, -1, 1.5, True, "2"])
def test_parallelism_of_sources_and_of_a_rebalance_has_the_same_bounds(parallelism: object) -> None:
    job = Job("revenue")
    orders = job.read("orders", DeclaredSource(), parallelism=parallelism)  # type: ignore[arg-type]
    orders.write("out", DeclaredSink())
    orders.rebalance(parallelism).write("dealt", DeclaredSink())  # type: ignore[arg-type]
    assert [problem.split(": ", 1)[1] for problem in problems(job)] == [
        f"parallelism {parallelism!r} is not 1 to 128"
    ] * 2


def test_splits_in_sequence_are_refused_in_parallel() -> None:
    job = Job("revenue")
    source = DeclaredSource({"at": "timestamptz"})
    job.read("a", source, event_time=EventTime("at", in_sequence=True), parallelism=2).write("b", DeclaredSink())
    (problem,) = problems(job)
    assert problem.endswith(": its splits follow one another in time, and 2 subtasks would read them at once")


def test_state_is_refused_where_positions_are_stored_before_it() -> None:
    job = Job("revenue", mode=CheckpointMode.AT_MOST_ONCE)
    job.read("orders", DeclaredSource()).deduplicate("seen", "id").write("out", DeclaredSink())
    (problem,) = problems(job)
    assert problem.endswith("in mode at-most-once positions are stored before the state that belongs to them")


@pytest.mark.parametrize(
    ("renamed", "found"),
    [
        ({"old": "orders"}, []),
        ({"older": "orders", "old": "orders"}, []),
        ({"orders": "orders"}, ['renamed: "orders" is a former uid, and the job has it']),
        (
            {"old": "nobody"},
            ['renamed: "old" is to be "nobody", and no source and no operator of the job is called so'],
        ),
        ({"old": "paid"}, ['renamed: "old" is to be "paid", and no source and no operator of the job is called so']),
        ({"gone": "orders"}, ['renamed: "gone" is to be forgotten as well']),
        ({"old": None}, ["renamed: {'old': None} is no mapping of uids"]),
        (["old"], ["renamed: ['old'] is no mapping of uids"]),
    ],
)
def test_new_uids_are_those_of_the_job_and_former_ones_are_not(renamed: Any, found: list[str]) -> None:
    job = complete(Job("revenue", renamed=renamed, forget=["gone"]))
    if found:
        assert problems(job) == found
    else:
        assert job.graph().sources[0].uid == "orders"
