"""Chunks of joins that were written once and for all, see :mod:`tests.unit.operators.keyed.test_golden`.

``python -m tests.unit.operators.keyed.test_golden_joins`` writes those that are missing.
"""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

import pyarrow as pa
import pytest

from etl.codec import decode_rows, encode_rows
from etl.event_time import FOREVER
from etl.joins import AsOfJoin, IntervalJoin, Join, JoinKind
from etl.key_group import groups_of_hashes, hash_keys
from etl.schema import Schema
from etl.state import Fragment
from tests.support.joins import START_US, JoinStage, Row, moment
from tests.unit.operators.keyed.test_golden import GOLDEN, PLACE

LEFT = Schema.declare({"k": "text", "at": "timestamptz", "d": "numeric(12,2)", "tags": "text[]"})
RIGHT = Schema.declare({"k": "text", "at": "timestamptz", "f": "float8", "raw": "bytea"})
TIMES, SPAN = ("at", "at"), timedelta(microseconds=5)

JOINS: dict[str, Join] = {
    "interval_join": IntervalJoin(PLACE, "golden", ("k",), ("k",), TIMES, -SPAN, SPAN, how=JoinKind.FULL),
    "as_of_join": AsOfJoin(PLACE, "golden", ("k",), ("k",), TIMES, how=JoinKind.LEFT),
}


def left(key: str, at: int) -> Row:
    return (key, moment(at), Decimal(at).scaleb(-2), None if at % 2 else [key, None])


def right(key: str, at: int) -> Row:
    return (key, moment(at), at / 2, None if at % 2 else bytes([at]))


def made(name: str) -> JoinStage:
    return JoinStage(JOINS[name], (LEFT, RIGHT), ("at",))


def first(stage: JoinStage) -> None:
    stage.give(0, *(left(key, at) for key in ("a", "ü") for at in (2, 5, 30)))
    stage.give(1, *(right(key, at) for key in ("a", "ü") for at in (1, 8, 31, 33, 34, 35)))
    stage.advance(1)


def second(stage: JoinStage) -> None:
    """Rows are removed, added, and have partners."""
    stage.advance(12)
    stage.give(0, left("a", 36))


def third(stage: JoinStage) -> list[Row]:
    begin = len(stage.rows)
    stage.give(1, right("ü", 28), right("b", 12))
    stage.give(0, left("ü", 32), left("b", 40))
    stage.advance(FOREVER)
    return sorted(stage.rows[begin:], key=str)


def chunks(name: str) -> list[tuple[str, Fragment]]:
    """What the operator stores after each of two rounds."""
    stage, found = made(name), []
    for number, step in enumerate((first, second), start=1):
        step(stage)
        (operator,) = stage.operators
        found += [(f"{name}-{number}-{one.key_group}-{one.sequence}.etls", one) for one in operator.cut().fragments]
    return found


@pytest.mark.parametrize("name", JOINS)
def test_stored_chunks_are_read_and_gone_on_from(name: str) -> None:
    undisturbed, restored = made(name), made(name)
    first(undisturbed)
    second(undisturbed)
    (operator,) = restored.operators
    sequences = []
    for file in sorted(GOLDEN.glob(f"{name}-*.etls")):
        group, sequence = map(int, file.stem.split("-")[2:])
        sequences.append(sequence)
        operator.restore([Fragment(group, sequence, decode_rows(file.read_bytes()))])
    assert sequences == [0, 0, 1, 1]
    operator.resume(START_US + 12)
    assert restored.waiting == undisturbed.waiting
    assert third(restored) == third(undisturbed)


@pytest.mark.parametrize("name", JOINS)
def test_stored_chunks_hold_what_is_stored_today(name: str) -> None:
    written = dict(chunks(name))
    assert sorted(written) == sorted(file.name for file in GOLDEN.glob(f"{name}-*.etls"))
    for file_name, fragment in written.items():
        stored = decode_rows((GOLDEN / file_name).read_bytes())
        assert stored.equals(fragment.rows)
        assert set(groups_of_hashes(hash_keys([stored.column("key:k")])).tolist()) == {fragment.key_group}
        assert stored.schema.field("key:left.sequence").type == pa.int64()


if __name__ == "__main__":
    for each in JOINS:
        for missing, made_fragment in chunks(each):
            if not (GOLDEN / missing).exists():
                (GOLDEN / missing).write_bytes(encode_rows(made_fragment.rows))
