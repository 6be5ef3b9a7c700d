"""Reading ahead: everything arrives in order, errors at their place, and never more is read than is allowed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from etl.store.read_ahead import read_ahead


def test_items_arrive_in_order() -> None:
    with read_ahead(range(1000), 3) as items:
        assert list(items) == list(range(1000))


def test_error_is_raised_where_it_occurred() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("lost")

    taken: list[int] = []
    with read_ahead(failing(), 3) as items, pytest.raises(ValueError, match="lost"):
        taken.extend(items)
    with read_ahead(failing(), 3) as items:
        assert next(items) == 1
        with pytest.raises(ValueError, match="lost"):
            next(items)


def test_no_more_is_read_than_allowed_and_nothing_after_the_block() -> None:
    asked: list[int] = []
    reached = threading.Event()

    def endless() -> Iterator[int]:
        number = 0
        while True:
            asked.append(number)
            if number == 4:
                reached.set()
            yield number
            number += 1

    with read_ahead(endless(), 3) as items:
        assert next(items) == 0
        # One is taken, three wait, and one more was read before its reader found the room full.
        assert reached.wait(10)
    after = len(asked)
    assert after <= 6
    assert "read-ahead" not in {thread.name for thread in threading.enumerate()}


def test_block_that_raises_ends_the_reading() -> None:
    with pytest.raises(KeyError), read_ahead(iter(range(10)), 2) as items:
        assert next(items) == 0
        raise KeyError
    assert "read-ahead" not in {thread.name for thread in threading.enumerate()}
