"""Who reads which split: never two at a time, and never behind or beyond what a checkpoint knows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from threading import Event, Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import InternalError
from etl.event_time import FOREVER
from etl.runtime.split_assigner import FOLLOW_POLL_S, ReadUpTo, SplitAssigner
from etl.runtime.watermark import LEAST
from etl.source import Position, Split, SplitEnumerator


class Sizes(SplitEnumerator):
    """Splits that grow: how many rows there are of each."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        self.known: list[dict[str, Position]] = []

    def discover(self, known: Mapping[str, Position]) -> Sequence[Split]:
        self.known.append(dict(known))
        return [
            Split(name, known.get(name), rows - self._read(known, name))
            for name, rows in self.sizes.items()
            if rows > self._read(known, name)
        ]

    def _read(self, known: Mapping[str, Position], name: str) -> int:
        return int(known[name]["next"]) if name in known else 0


class Clock:
    """Every look at it is so much later that whoever waits has waited."""

    def __init__(self, step_s: float = FOLLOW_POLL_S) -> None:
        self._now_s, self._step_s = 0.0, step_s

    def monotonic_s(self) -> float:
        self._now_s += self._step_s
        return self._now_s

    def now(self) -> datetime:
        raise AssertionError

    def wait(self, event: Event, timeout_s: float) -> bool:
        raise AssertionError

    def jitter(self) -> float:
        raise AssertionError


def at(rows: int, latest: int | None = None) -> ReadUpTo:
    return ReadUpTo({"next": rows}, latest)


def names(splits: Sequence[Split]) -> list[str]:
    return [split.id for split in splits]


def test_single_subtask_is_given_everything_in_reading_order() -> None:
    assigner = SplitAssigner(Sizes(a=1, b=3, c=2), {})
    assert names(assigner.take(0, {})) == ["a", "b", "c"]
    assert assigner.waiting_bytes == 0
    assert assigner.take(0, {"a": at(1), "b": at(3), "c": at(2)}) == []


def test_several_are_given_one_at_a_time_the_largest_first() -> None:
    enumerator = Sizes(a=1, b=3, c=2, d=3)
    assigner = SplitAssigner(enumerator, {"a": {"next": 0}}, 2)
    assert assigner.take(0, {}) == [Split("b", None, 3)]
    assert names(assigner.take(1, {})) == ["d"]
    assert assigner.waiting_bytes == 3
    assert names(assigner.take(1, {"d": at(3)})) == ["c"]
    assert assigner.take(1, {"c": at(2)}) == [Split("a", {"next": 0}, 1)]
    assert assigner.take(0, {"b": at(3)}) == []
    assert assigner.take(1, {"a": at(1)}) == []
    assert len(enumerator.known) == 1


def test_split_is_listed_once_while_somebody_has_it() -> None:
    enumerator = Sizes(a=2, b=1)
    assigner = SplitAssigner(enumerator, {}, 3, follow=True, clock=Clock())
    assert names(assigner.take(0, {})) == ["a"]
    assert names(assigner.take(1, {})) == ["b"]
    enumerator.sizes["a"] = 5
    assert assigner.take(2, {}) == []
    assert names(assigner.take(0, {"a": at(2)})) == ["a"]
    assert enumerator.known == [{}, {}, {"a": {"next": 2}}]


def test_split_that_is_given_back_while_others_are_looked_for_is_not_listed_from_its_start() -> None:
    """What was found is as old as the question."""

    class Slow(Sizes):
        def __init__(self, **sizes: int) -> None:
            super().__init__(**sizes)
            self.asked, self.answer = Event(), Event()
            self.answer.set()

        def discover(self, known: Mapping[str, Position]) -> Sequence[Split]:
            found = super().discover(known)
            self.asked.set()
            assert self.answer.wait(10)
            return found

    enumerator = Slow(a=2)
    assigner = SplitAssigner(enumerator, {}, 3, follow=True, clock=Clock())
    assert names(assigner.take(0, {})) == ["a"]
    enumerator.asked.clear()
    enumerator.answer.clear()
    found: list[list[str]] = []
    looking = Thread(target=lambda: found.append(names(assigner.take(1, {}))))
    looking.start()
    assert enumerator.asked.wait(10)
    giving = Thread(target=lambda: found.append(names(assigner.take(0, {"a": at(2)}))))
    giving.start()
    # It has given back when nothing is left of what it had; then it waits for the other's answer.
    while assigner._readers[0].reads:
        giving.join(0.001)
    enumerator.answer.set()
    looking.join(10)
    giving.join(10)
    assert found == [[], []]


def test_split_goes_to_another_subtask_only_behind_the_barrier_that_covers_it() -> None:
    enumerator = Sizes(a=2)
    assigner = SplitAssigner(enumerator, {}, 2, follow=True, clock=Clock())
    assert names(assigner.take(0, {})) == ["a"]
    assert assigner.take(0, {"a": at(2)}) == []
    enumerator.sizes["a"] = 3
    assert assigner.take(1, {}) == []
    assigner.passed_barrier(0)
    assert assigner.take(1, {}) == []
    assigner.passed_barrier(1)
    assert assigner.take(1, {}) == [Split("a", {"next": 2}, 1)]


def test_own_split_may_be_read_on_at_once() -> None:
    enumerator = Sizes(a=2)
    assigner = SplitAssigner(enumerator, {}, 2, follow=True, clock=Clock())
    assert names(assigner.take(0, {})) == ["a"]
    enumerator.sizes["a"] = 3
    assert assigner.take(0, {"a": at(2)}) == [Split("a", {"next": 2}, 1)]


def test_several_look_for_something_new_no_more_often_than_one() -> None:
    enumerator = Sizes()
    assigner = SplitAssigner(enumerator, {}, 2, follow=True, clock=Clock(step_s=FOLLOW_POLL_S / 4))
    for _ in range(8):
        assigner.take(0, {})
        assigner.take(1, {})
    assert 2 <= len(enumerator.known) <= 6


def test_split_that_waits_tells_how_far_it_is() -> None:
    stored = {"event_time": {"latest": "1970-01-01T00:00:07.000000", "watermark": None}}
    enumerator = Sizes(a=9, b=5, c=4)
    assigner = SplitAssigner(enumerator, {"b": {"next": 1, **stored}}, 2, follow=True, clock=Clock())
    assert assigner.floor() == FOREVER
    assert names(assigner.take(0, {})) == ["a"]
    assert assigner.floor() == LEAST
    assert names(assigner.take(1, {})) == ["b"]
    assert names(assigner.take(1, {"b": at(5, 8_000_000)})) == ["c"]
    assert (assigner.floor(), assigner.newest, assigner.latest_of("b")) == (FOREVER, 8_000_000, 8_000_000)
    enumerator.sizes["b"] = 6
    assert assigner.take(0, {"a": at(9, None)}) == []
    assert assigner.floor() == 8_000_000


def test_who_became_dry_last_speaks_for_the_source() -> None:
    enumerator = Sizes(a=2)
    assigner = SplitAssigner(enumerator, {}, 2, follow=True, clock=Clock())
    assigner.take(0, {})
    assert assigner.take(1, {}) == []
    assert assigner.others_read(1)
    assert assigner.take(0, {"a": at(2)}) == []
    assert (assigner.others_read(0), assigner.others_read(1)) == (False, True)
    assert assigner.take(1, {}) == []
    assert (assigner.others_read(0), assigner.others_read(1)) == (False, True)
    enumerator.sizes["b"] = 1
    assert names(assigner.take(1, {})) == ["b"]
    assert assigner.others_read(0)


def test_split_that_is_listed_twice_is_refused() -> None:
    class Twice(SplitEnumerator):
        def discover(self, known: Mapping[str, Position]) -> Sequence[Split]:
            return [Split("a"), Split("a")]

    with pytest.raises(InternalError, match=r"^Twice listed a split twice$"):
        SplitAssigner(Twice(), {}).take(0, {})


@settings(deadline=None, max_examples=150)
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_every_checkpoint_has_of_each_split_exactly_the_rows_before_its_position(
    chance: random.Random, subtasks: int
) -> None:
    """Subtasks that read, come to barriers and ask for more in any order, while splits grow."""
    enumerator = Sizes(**{name: chance.randrange(1, 5) for name in "abc"})
    assigner = SplitAssigner(enumerator, {}, subtasks, follow=True, clock=Clock())
    had: list[dict[str, int]] = [{} for _ in range(subtasks)]
    moved: list[dict[str, int]] = [{} for _ in range(subtasks)]
    passed = [0] * subtasks
    positions: dict[int, dict[str, int]] = {}
    rows: dict[int, set[tuple[str, int]]] = {}

    def barrier(number: int) -> None:
        passed[number] += 1
        reported = positions.setdefault(passed[number], {})
        assert not reported.keys() & moved[number].keys()
        reported.update(moved[number])
        moved[number] = {}
        assigner.passed_barrier(number)

    for _ in range(80):
        number = chance.randrange(subtasks)
        reading = next((name for name, at_row in had[number].items() if at_row < enumerator.sizes[name]), None)
        what = chance.random()
        if what < 0.15:
            enumerator.sizes[chance.choice("abc")] += chance.randrange(1, 4)
        elif what < 0.3 and passed[number] == min(passed):
            barrier(number)
        elif reading is not None:
            row = had[number][reading]
            rows.setdefault(passed[number] + 1, set()).add((reading, row))
            had[number][reading] = moved[number][reading] = row + 1
        else:
            read = {name: at(row) for name, row in had[number].items()}
            taken = assigner.take(number, read)
            had[number] = {split.id: int((split.position or {"next": 0})["next"]) for split in taken}
            others = [name for other in range(subtasks) if other != number for name in had[other]]
            assert not set(had[number]) & set(others)
    for number in range(subtasks):
        while passed[number] < max(passed):
            barrier(number)

    at_rows: dict[str, int] = {}
    seen: set[tuple[str, int]] = set()
    for checkpoint in range(1, max(passed) + 1):
        at_rows.update(positions.get(checkpoint, {}))
        of_checkpoint = rows.get(checkpoint, set())
        assert not seen & of_checkpoint
        seen |= of_checkpoint
        assert seen == {(name, row) for name, end in at_rows.items() for row in range(end)}


def test_moments_are_compared_across_subtasks() -> None:
    assigner = SplitAssigner(Sizes(a=1), {}, 2)
    assert assigner.newest is None
    moment = int(timedelta(hours=1) / timedelta(microseconds=1))
    assigner.take(0, {"a": at(1, moment)})
    assert assigner.newest == moment
