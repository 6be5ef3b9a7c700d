"""Chunks that were written once and for all: every later version reads them and goes on from them.

A file here is never written again. When the format changes, its successors get a directory of their own, and these
stay. ``python -m tests.unit.operators.keyed.test_golden`` writes those that are missing.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from etl.codec import FORMAT, decode_all, decode_rows, digest, encode_rows
from etl.errors import StateError
from etl.event_time import FOREVER, microseconds_since_1970
from etl.key_group import groups_of_hashes, hash_keys
from etl.keyed import Aggregate, Deduplicate, Emission, Stateful
from etl.keyed_process import ListState, MapState, Process, Timer, ValueState
from etl.operator import Output
from etl.operators import operator_for
from etl.operators.keyed.deduplicate_within import DeduplicateWithinOperator
from etl.operators.keyed.timed_process import TimedProcessOperator
from etl.operators.keyed.windowed import WindowedOperator
from etl.schema import Schema
from etl.state import Fragment, StatefulOperator
from etl.transformation import Location
from etl.window import Session, Sliding, Window
from etl.windowed import WindowAggregate

GOLDEN = Path(__file__).parent / "golden" / "format-1"
PLACE = Location("job.py", 1)

SCHEMA = Schema.declare(
    {"k": "text", "n": "int8", "d": "numeric(12,2)", "f": "float8", "b": "bool", "at": "timestamptz", "raw": "bytea"}
)


WATERMARK = microseconds_since_1970(dt.datetime(2024, 2, 29, 12, 0, 5, tzinfo=dt.UTC))
"""Of the rows some are before it, some are not."""


def row(key: str | None, number: int | None) -> tuple[Any, ...]:
    if number is None:
        return (key, *[None] * 6)
    at = dt.datetime(2024, 2, 29, 12, 0, number, tzinfo=dt.UTC)
    return (key, number, Decimal(number) / 4, number * 0.5, number % 2 == 0, at, bytes([number]))


def neighbours() -> list[str]:
    """Some keys of the same key groups as those that change later: there the change is a chunk of its own."""
    names = [f"x{number}" for number in range(1500)]
    groups = groups_of_hashes(hash_keys([pa.array(names)])).tolist()
    wanted = groups_of_hashes(hash_keys([pa.array(["a", "c", "ü"])])).tolist()
    return [
        name for group in wanted for name in [one for one, of in zip(names, groups, strict=True) if of == group][:4]
    ]


FIRST = [row("a", 1), row(None, 2), row("ü", 3), row("a", 4), row("b", None), *(row(one, 8) for one in neighbours())]
SECOND = [row("a", 9), row("c", 5), row("ü", 7)]
THIRD = [row("a", 2), row("c", 6), row(None, 1), row("d", 8), row("b", None)]


def remember(given: dict[str, Any], state: Any) -> Any:
    number = given["n"]
    if number == 7:
        state.total.clear()
        state.seen.clear()
        state.times.clear()
        return
    if number is not None:
        state.total.value = (state.total.value or Decimal(0)) + given["d"]
        state.seen.append(given["at"])
        state.times[given["b"]] = number
    yield {
        "k": given["k"],
        "total": state.total.value,
        "seen": len(state.seen),
        "times": str(sorted(state.times.items())),
    }


def remember_in_time(given: dict[str, Any], state: Any) -> Any:
    state.total.value = (state.total.value or Decimal(0)) + given["d"]
    state.timers.set(given["at"] + timedelta(minutes=1))
    state.timers.set(given["at"] + timedelta(minutes=2))
    state.clock_timers.set(given["at"] + timedelta(days=1))
    yield {"k": given["k"], "total": state.total.value}


def tell(timer: Timer, state: Any) -> Any:
    yield {"k": timer.key["k"], "total": state.total.value}


AGGREGATES: dict[str, Any] = {
    "rows": pl.len(),
    "count": pl.col("n").count(),
    "total": pl.col("d").sum(),
    "floats": pl.col("f").sum(),
    "low": pl.col("at").min(),
    "high": pl.col("d").max(),
    "mean": pl.col("n").mean(),
    "first": pl.col("raw").first(),
    "latest": pl.col("b").sort_by("at").last(),
}


def windows(window: Window, *names: str) -> WindowAggregate:
    aggregates = tuple((name, AGGREGATES[name]) for name in names)
    return WindowAggregate(PLACE, "golden", ("k",), aggregates, None, Emission.CLOSE, window=window, time="at")


OPERATORS: dict[str, Stateful] = {
    "aggregate": Aggregate(PLACE, "golden", ("k",), tuple(AGGREGATES.items())),
    "deduplicate": Deduplicate(PLACE, "golden", ("k", "b", "at")),
    "process": Process(
        PLACE,
        "golden",
        ("k",),
        remember,
        {"total": ValueState("numeric(12,2)"), "seen": ListState("timestamptz"), "times": MapState("bool", "int8")},
        {"k": "text", "total": "numeric(12,2)", "seen": "int8", "times": "text"},
    ),
    "windows": windows(Sliding(timedelta(seconds=6), every=timedelta(seconds=3)), "rows", "total", "first"),
    "sessions": windows(Session(timedelta(seconds=3)), "rows", "mean", "latest"),
    "within": Deduplicate(PLACE, "golden", ("k", "b"), timedelta(seconds=3), "at"),
    "timed": Process(
        PLACE,
        "golden",
        ("k",),
        remember_in_time,
        {"total": ValueState("numeric(12,2)")},
        {"k": "text", "total": "numeric(12,2)"},
        time="at",
        in_order=True,
        on_timer=tell,
        on_clock_timer=tell,
        ttl=timedelta(hours=1),
    ),
}


def operator(name: str) -> StatefulOperator:
    transformation = OPERATORS[name]
    made = operator_for(transformation, [SCHEMA], transformation.output_schema([SCHEMA]))
    assert isinstance(made, StatefulOperator)
    return made


def feed(running: StatefulOperator, rows: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    arrow = SCHEMA.to_arrow()
    if isinstance(running, WindowedOperator | TimedProcessOperator | DeduplicateWithinOperator):
        rows = [one for one in rows if one[5] is not None]
    columns = [pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), arrow, strict=True)]
    emitted = [*running.process(pa.RecordBatch.from_arrays(columns, schema=arrow))]
    if isinstance(running, TimedProcessOperator):
        emitted += running.advance(WATERMARK)
    return rows_of([*emitted, *running.flush()])


def rows_of(emitted: Iterable[Output]) -> list[dict[str, Any]]:
    return [one for batch in emitted if isinstance(batch, pa.RecordBatch) for one in batch.to_pylist()]


def chunks(name: str) -> list[tuple[str, Fragment]]:
    """What the operator stores after each of two batches."""
    running, found = operator(name), []
    for number, rows in enumerate((FIRST, SECOND), start=1):
        feed(running, rows)
        found += [(f"{name}-{number}-{one.key_group}-{one.sequence}.etls", one) for one in running.cut().fragments]
    return found


@pytest.mark.parametrize("name", OPERATORS)
def test_stored_chunks_are_read_and_gone_on_from(name: str) -> None:
    undisturbed, restored = operator(name), operator(name)
    for rows in (FIRST, SECOND):
        feed(undisturbed, rows)
    chains: dict[int, list[Fragment]] = {}
    for file in sorted(GOLDEN.glob(f"{name}-*.etls")):
        group, sequence = map(int, file.stem.split("-")[2:])
        chain = chains.setdefault(group, [])
        if sequence == 0:
            chain.clear()
        chain.append(Fragment(group, sequence, decode_rows(file.read_bytes())))
    assert {len(chain) for chain in chains.values()} == ({1} if name == "deduplicate" else {1, 2})
    for chain in chains.values():
        for fragment in chain:
            restored.restore([fragment])
    if name == "timed":
        restored.resume(WATERMARK)
    assert sorted(feed(restored, THIRD), key=str) == sorted(feed(undisturbed, THIRD), key=str)
    if isinstance(undisturbed, WindowedOperator | TimedProcessOperator):
        closed = rows_of(undisturbed.advance(FOREVER))
        assert len(closed) > len(THIRD)
        assert sorted(rows_of(restored.advance(FOREVER)), key=str) == sorted(closed, key=str)


@pytest.mark.parametrize("name", OPERATORS)
def test_stored_chunks_hold_what_is_stored_today(name: str) -> None:
    """Names, types, order of rows and key groups have not moved."""
    made = dict(chunks(name))
    assert sorted(made) == sorted(file.name for file in GOLDEN.glob(f"{name}-*.etls"))
    for file_name, fragment in made.items():
        stored = decode_rows((GOLDEN / file_name).read_bytes())
        assert stored.equals(fragment.rows)
        keys = [stored.column(f"key:{key}") for key in OPERATORS[name].keys]
        assert set(groups_of_hashes(hash_keys(keys)).tolist()) <= {fragment.key_group}


def test_the_same_rows_are_the_same_bytes() -> None:
    for name in OPERATORS:
        assert [encode_rows(one.rows) for _, one in chunks(name)] == [encode_rows(one.rows) for _, one in chunks(name)]


def test_bytes_that_are_no_chunk_are_refused() -> None:
    content = encode_rows(pa.record_batch({"x": [1, 2]}))
    with pytest.raises(StateError, match="it does not begin like a chunk of state"):
        decode_rows(b"")
    with pytest.raises(StateError, match=f"its format is {FORMAT + 1}, this version of etl reads up to {FORMAT}"):
        decode_rows(content[:4] + bytes([FORMAT + 1]) + content[5:])
    for cut in range(4, len(content), 7):
        with pytest.raises(StateError, match="it cannot be decoded" if cut >= 13 else "it ends within its header"):
            decode_rows(content[:cut])
    for size in (b"\xff" * 8, bytes(8), b"\x01" + bytes(7)):
        with pytest.raises(StateError, match="it cannot be decoded"):
            decode_rows(content[:5] + size + content[13:])


def test_chunks_are_decoded_together_as_they_are_one_by_one() -> None:
    contents = [encode_rows(pa.record_batch({"x": list(range(rows))})) for rows in (3, 1, 500, 2)]
    assert decode_all(contents) == [decode_rows(content) for content in contents]
    assert decode_all([]) == []
    with pytest.raises(StateError, match="it cannot be decoded"):
        decode_all([*contents, contents[2][:-1]])


def test_digest_tells_borders_of_parts() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert digest(1, b"x").hex() == DIGEST


DIGEST = "1a7219a8e769c74be88f56a5e9d525c1fd5be77c2b45031a867511b814d5f1c7"


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for each in OPERATORS:
        for missing, made_fragment in chunks(each):
            if not (GOLDEN / missing).exists():
                (GOLDEN / missing).write_bytes(encode_rows(made_fragment.rows))
