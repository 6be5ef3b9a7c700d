"""Verdicts, and how they are told."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from etl.testing.chaos.comparison import Difference
from etl.testing.chaos.experiment import first_ones_first, kills_at
from etl.testing.chaos.process import Kill, Step
from etl.testing.chaos.report import ChaosReport, ChaosStatus, NonDeterminism, Trial

FIRST, SECOND = Kill("sink.prepared", "orders", 1), Kill("sink.prepared", "orders", 2)
END = Kill("run.ended", None, 1)


def report(*trials: Trial, untried: Sequence[Kill] = (), found: Sequence[NonDeterminism] = ()) -> ChaosReport:
    return ChaosReport(
        job="revenue",
        sinks={"orders": 9, "refunds": 2},
        promises={"orders": "exactly-once", "refunds": "exactly-once in the end"},
        rows_read=9,
        checkpoints=4,
        sample_rows=None,
        trials=trials,
        untried=untried,
        nondeterminism=found,
    )


def ok(kill: Kill) -> Trial:
    return Trial(kill, reached=True, differences={"orders": Difference(), "refunds": Difference()})


def wrong(kill: Kill, difference: Difference, failure: str = "") -> Trial:
    return Trial(kill, True, failure, {"orders": difference, "refunds": Difference()})


def test_report_is_ok_when_every_cell_is() -> None:
    made = report(ok(FIRST), ok(SECOND), ok(END))

    assert (made.status, made.exit_code, made.kills) == (ChaosStatus.OK, 0, 3)
    made.assert_exact()
    assert str(made).splitlines() == [
        "STEP           KILLS  orders  refunds",
        "sink.prepared      2  ok      ok",
        "run.ended          1  ok      ok",
        "revenue: 3 kills at 2 steps, 9 rows: every target is as after an undisturbed run",
    ]


@pytest.mark.parametrize(
    ("difference", "cell"),
    [
        (Difference(lost=3), "lost 3"),
        (Difference(duplicated=2), "duplicated 2"),
        (Difference(lost=1, duplicated=2), "lost 1, duplicated 2"),
        (Difference(lost=1, duplicated=2, unexpected=1), "differs (1 missing, 3 too many)"),
    ],
)
def test_cell_shows_the_worst_of_its_kills(difference: Difference, cell: str) -> None:
    made = report(wrong(FIRST, Difference(lost=min(1, difference.lost))), wrong(SECOND, difference), ok(END))

    assert (made.status, made.exit_code) == (ChaosStatus.DIFFERENT, 1)
    assert str(made.cell("sink.prepared", "orders")) == cell
    assert str(made.cell("sink.prepared", "refunds")) == "ok"
    assert made.summary().endswith(": 1 cells of 4 are wrong")
    with pytest.raises(AssertionError, match=r"killed at sink\.prepared of orders, occurrence 2: orders: "):
        made.assert_exact()


def test_failure_of_the_run_after_a_kill_is_wrong_for_every_sink() -> None:
    made = report(wrong(FIRST, Difference(), "exit code 70: lost"), ok(SECOND))

    assert str(made.cell("sink.prepared", "refunds")) == "the run after it fails"
    assert made.status is ChaosStatus.DIFFERENT
    assert "killed at sink.prepared of orders, occurrence 1: exit code 70: lost" in str(made).splitlines()


@pytest.mark.parametrize(
    ("trials", "untried", "cell"),
    [
        ([ok(FIRST)], [SECOND], "not tried"),
        ([Trial(FIRST, False, differences={"orders": Difference()})], [], "not reached"),
        ([], [FIRST], "not tried"),
    ],
)
def test_what_was_not_tried_is_not_ok(trials: list[Trial], untried: list[Kill], cell: str) -> None:
    made = report(*trials, untried=untried)

    assert (made.status, made.exit_code) == (ChaosStatus.INCOMPLETE, 1)
    assert str(made.cell("sink.prepared", "orders")) == cell
    assert made.summary().endswith("2 cells of 2 are not tried in full")


def test_occurrence_that_was_not_reached_does_not_spoil_those_that_were() -> None:
    made = report(ok(FIRST), Trial(SECOND, False, differences={"orders": Difference()}))

    assert (made.status, made.cell("sink.prepared", "orders").kills) == (ChaosStatus.OK, 1)


def test_report_without_a_kill_is_not_ok() -> None:
    assert report().status is ChaosStatus.INCOMPLETE


def test_nondeterminism_is_told_with_its_suspects() -> None:
    difference = Difference(lost=1, unexpected=1, columns=("token",), example={"id": "4", "token": None})
    made = report(found=[NonDeterminism("orders", 9, difference, ("map f at jobs/x.py:1",))])

    assert (made.status, made.exit_code) == (ChaosStatus.NONDETERMINISTIC, 1)
    assert str(made).splitlines() == [
        "orders: two undisturbed runs differ: 9 rows, differs (1 missing, 1 too many), in token, for example id=4,"
        " token=None",
        "  suspect: map f at jobs/x.py:1",
        "revenue: not deterministic (orders); nothing was killed",
    ]
    (found,) = json.loads(made.to_json())["nondeterministic"]
    assert (found["example"], found["columns"]) == ({"id": "4", "token": None}, ["token"])


def test_json_has_exactly_the_documented_keys() -> None:
    document = json.loads(report(wrong(FIRST, Difference(lost=1)), untried=[END]).to_json())

    assert list(document) == [
        *("job", "status", "rows_read", "sample_rows", "checkpoints", "kills", "untried", "sinks", "steps", "wrong"),
        *("nondeterministic", "duration_s"),
    ]
    assert document["steps"][1] == {
        "step": "run.ended",
        "kills": 0,
        "sinks": {
            uid: {"result": "not tried", "lost": 0, "duplicated": 0, "unexpected": 0} for uid in ("orders", "refunds")
        },
    }


@pytest.mark.parametrize(
    ("count", "occurrences", "expected"),
    [(1, 3, [1]), (2, 3, [1, 2]), (3, 3, [1, 2, 3]), (9, 3, [1, 2, 9]), (9, 1, [1]), (9, 2, [1, 9]), (3, 9, [1, 2, 3])],
)
def test_kills_are_at_the_first_occurrences_and_the_last(count: int, occurrences: int, expected: list[int]) -> None:
    kills = kills_at([Step("source.batch", "a", count)], occurrences)

    assert kills == [Kill("source.batch", "a", number) for number in expected]


def test_kills_at_a_step_of_several_sinks_stand_together() -> None:
    steps = [Step("sink.begun", "a", 1), Step("sink.prepared", "a", 1), Step("sink.begun", "b", 1)]

    kills = kills_at(steps, 3)

    assert [(kill.step, kill.uid) for kill in kills] == [
        ("sink.begun", "a"),
        ("sink.begun", "b"),
        ("sink.prepared", "a"),
    ]


def test_first_occurrences_of_all_steps_come_before_any_second_one() -> None:
    kills = kills_at([Step("source.batch", "a", 5), Step("sink.begun", "b", 2)], 3)

    ordered = first_ones_first(kills)

    assert [(kill.step, kill.occurrence) for kill in ordered] == [
        *(("source.batch", 1), ("sink.begun", 1)),
        *(("source.batch", 2), ("sink.begun", 2)),
        ("source.batch", 5),
    ]
