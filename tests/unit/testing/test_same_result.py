"""The check that a result depends on the input alone: right jobs pass, wrong ones are shown in the smallest way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl import key_group
from etl.errors import ConfigurationError, RecordError
from etl.job import Job
from etl.keyed_process import ValueState
from etl.operators.keyed.state import KeyedState
from etl.testing import assert_same_result, checkpoint, crash, rows
from etl.testing.harness.marks import Checkpoint, Mark
from etl.testing.harness.script import read_script
from etl.testing.harness.variation import Rows, Variation, simpler, variations
from etl.transformation import Row
from sinks import PostgresTable, TwoPhaseCommitSink, UpsertSink
from tests.support.declarations import DeclaredSource
from tests.support.payments import jumps, payment, payments_job

AMOUNTS = ("1", "20", "3", "40", "500", "6", "70", "8", "900", "1")
PAYMENTS = [payment(f"card-{number % 3}", amount) for number, amount in enumerate(AMOUNTS)]
SCRIPT = [rows("payments", *PAYMENTS[:4]), crash(), checkpoint(), rows("payments", *PAYMENTS[4:])]

APPENDED = TwoPhaseCommitSink(PostgresTable("t"))


def number_job(transform: Callable[[Any], Any], sink: Any = APPENDED) -> Job:
    job = Job("numbers")
    transform(job.read("numbers", DeclaredSource({"n": "int8"}))).write("sink", sink)
    return job


def numbers(*values: int) -> Mark:
    return rows("numbers", *({"n": value} for value in values))


def failure(job: Job, script: Sequence[Mark], **arguments: Any) -> list[str]:
    with pytest.raises(AssertionError) as caught:
        assert_same_result(job, script, **arguments)
    return str(caught.value).splitlines()


def test_right_job_passes() -> None:
    assert_same_result(payments_job(parallelism=2), SCRIPT)


def test_scripts_without_rows_pass() -> None:
    assert_same_result(payments_job(), [rows("payments"), checkpoint()])


def test_function_that_looks_at_its_batch_is_caught() -> None:
    job = number_job(lambda numbers: numbers.map_batches(lambda frame: frame.filter(pl.col("n") == pl.col("n").max())))

    assert failure(job, [numbers(1, 2, 3)]) == [
        'job "numbers" yields something else when its input is played so:',
        "",
        '    rows("numbers", …)  # rows 1 to 2',
        '    rows("numbers", …)  # row 3',
        "    checkpoint()",
        "",
        'sink "sink":',
        "    only played so: {'n': 2}",
    ]


def test_function_that_remembers_outside_of_its_state_is_caught() -> None:
    seen: set[str] = set()

    def first_of_card(row: Row, _state: Any) -> Iterator[Row]:
        if row["card"] not in seen:
            seen.add(row["card"])
            yield row

    assert failure(payments_job(first_of_card), [rows("payments", PAYMENTS[0])]) == [
        'job "payments" yields something else when its input is played once more:',
        "",
        '    rows("payments", …)  # row 1',
        "    checkpoint()",
        "",
        'sink "jumps":',
        "    only as written: {'card': 'card-0', 'amount': Decimal('1.00')}",
    ]


def test_state_that_is_not_stored_is_caught_by_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyedState, "touch", lambda _state, _ids: None)

    assert failure(payments_job(), [rows("payments", payment("a", "1"), payment("a", "20"))]) == [
        'job "payments" yields something else when its input is played so:',
        "",
        '    rows("payments", …)  # row 1',
        "    checkpoint()",
        '    rows("payments", …)  # row 2',
        "    crash()",
        "    checkpoint()",
        "",
        'sink "jumps":',
        "    only as written: {'card': 'a', 'amount': Decimal('20.00')}",
        "",
        'sink "totals":',
        "    only as written: {'card': 'a', 'total': Decimal('21.00'), 'payments': 2}",
        "    only played so: {'card': 'a', 'total': Decimal('20.00'), 'payments': 1}",
    ]


def test_state_that_does_not_move_with_its_keys_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_group, "groups_of_subtask", lambda subtask, _parallelism: () if subtask else range(64))
    everywhere = rows("payments", *(payment(f"card-{number}", "1") for number in range(20)))

    lines = failure(payments_job(), [everywhere, everywhere], number=5)

    assert "    crash()" in lines
    assert re.fullmatch(
        r'It raises InternalError: operator "last_payment" has counted \d+ chunks of state, and \d+ are there',
        lines[-1],
    )


def test_result_that_depends_on_checkpoints_is_caught_in_a_sink_without_a_key() -> None:
    def totals(stream: Any) -> Any:
        return stream.key_by("n").aggregate("counts", times=pl.len())

    script = [numbers(7, 7)]
    assert_same_result(number_job(totals, UpsertSink(PostgresTable("t", key=["n"]))), script)

    assert failure(number_job(totals), script) == [
        'job "numbers" yields something else when its input is played so:',
        "",
        '    rows("numbers", …)  # row 1',
        "    checkpoint()",
        '    rows("numbers", …)  # row 2',
        "    checkpoint()",
        "",
        'sink "sink":',
        "    only played so: {'n': 7, 'times': 1}",
    ]


def test_result_that_depends_on_the_parallelism_is_caught() -> None:
    def last_of_all(stream: Any) -> Any:
        passed = stream.key_by("n").process("pass", lambda row, _state: [row], state={"s": ValueState("int8")})
        return passed.with_columns(all=pl.lit(1))

    job = number_job(last_of_all, UpsertSink(PostgresTable("t", key=["all"])))

    lines = failure(job, [numbers(*range(21))])
    assert lines[2:5] == ["    parallelism=2", '    rows("numbers", …)  # rows 1 to 21', "    checkpoint()"]
    assert lines[6:8] == ['sink "sink":', "    only as written: {'n': 20, 'all': 1}"]


def test_error_that_comes_only_sometimes_is_shown() -> None:
    def at_most_two(frame: pl.DataFrame) -> pl.DataFrame:
        if len(frame) > 2:
            raise RecordError("too many rows")
        return frame

    job = number_job(lambda stream: stream.map_batches(at_most_two, schema={"n": "int8"}))

    assert failure(job, [numbers(1), numbers(2), numbers(3)]) == [
        'job "numbers" yields something else when its input is played so:',
        "",
        '    rows("numbers", …)  # rows 1 to 3',
        "    checkpoint()",
        "",
        f"It raises RecordError: {_place(job)}: too many rows",
    ]
    with pytest.raises(RecordError, match="too many rows"):
        assert_same_result(job, [numbers(1, 2, 3)])


def _place(job: Job) -> str:
    [transformation] = [node.transformation for node in job.graph().nodes if hasattr(node, "transformation")]
    return str(transformation)


def test_many_differences_are_shown_shortly() -> None:
    job = number_job(lambda numbers: numbers.map_batches(lambda frame: frame.head(1)))

    lines = failure(job, [numbers(*range(9)), *map(numbers, range(9, 20))], number=3)

    assert "    only as written: {'n': 12}" not in lines[:8]
    assert lines[-1].startswith("    only")


def test_mistakes_of_the_script_are_reported() -> None:
    with pytest.raises(ConfigurationError, match="the job has no such source"):
        assert_same_result(payments_job(), [numbers(1)])


def test_same_seed_plays_the_same() -> None:
    played = Rows(read_script(payments_job().graph(), SCRIPT))

    some, same, others = (list(variations(played, 1, 20, seed)) for seed in (1, 1, 2))

    assert some == same
    assert some != others
    assert len(some) == 20


def two_sources() -> tuple[Job, list[Mark]]:
    job = Job("two")
    left, right = (job.read(uid, DeclaredSource({"n": "int8"})) for uid in ("left", "right"))
    left.union(right).write("sink", APPENDED)
    return job, [
        rows("left", *({"n": number} for number in range(3))),
        rows("right", {"n": 3}),
        rows("right", {"n": 4}, {"n": 5}),
        rows("left", {"n": 6}),
        rows("left", {"n": 7}),
    ]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6))
def test_variations_play_all_rows_in_their_order(seed: int) -> None:
    job, script = two_sources()
    played = Rows(read_script(job.graph(), script))

    for variation in variations(played, 1, 20, seed):
        parts = played.script(variation)
        taken = {uid: iter(batches) for uid, batches in parts.batches.items()}
        read = [value for step in parts.steps if hasattr(step, "source") for value in next(taken[step.source])["n"]]
        assert [value.as_py() for value in read] == list(range(8))
        assert all(next(rest, None) is None for rest in taken.values())
        marks = [mark for at in variation.marks.values() for mark in at]
        assert [step for step in parts.steps if isinstance(step, Checkpoint)] == [
            mark for mark in marks if isinstance(mark, Checkpoint)
        ]


def test_simpler_variations_end_with_the_script_as_it_is_written() -> None:
    job, script = two_sources()
    played = Rows(read_script(job.graph(), script))
    *_, variation = variations(played, 2, 30, 0)

    steps = 0
    while (simple := next(simpler(variation, played, 2), None)) is not None:
        variation, steps = simple, steps + 1

    assert variation == Variation(2, played.written, {})
    assert 1 <= steps <= 60


def test_right_function_is_right_with_crashes_between_all_its_rows() -> None:
    """That a wrong one is caught is no luck: the same job with the right function passes under many seeds."""
    script = [rows("payments", *PAYMENTS)]
    for seed in range(2):
        assert_same_result(payments_job(jumps), script, seed=seed, number=8)
