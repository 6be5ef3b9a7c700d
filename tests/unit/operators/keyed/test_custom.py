"""Accumulators of users against what they come to over all rows at once."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl import Accumulator, ExpressionAccumulator
from etl.codec import decode_rows, encode_rows
from etl.errors import ConfigurationError, EtlError, InternalError, RecordError, StateError
from etl.event_time import FOREVER
from etl.keyed import Aggregate, Emission
from etl.operators import operator_for
from etl.schema import Schema
from etl.state import Fragment, StatefulOperator
from etl.transformation import Location
from etl.window import Session, Sliding, Tumbling, Window
from etl.windowed import WindowAggregate

SCHEMA = Schema.declare({"k": "int4", "at": "timestamp", "n": "int8", "d": "numeric(12,2)", "t": "text"})
START = dt.datetime(2024, 1, 1)
MINUTE = dt.timedelta(minutes=1)


class Joined(Accumulator):
    """Texts in the order in which they came."""

    state_type = "text[]"
    result_type = "text"

    def zero(self) -> list[str]:
        return []

    def add(self, state: list[str], text: str | None, n: int | None) -> list[str]:
        state.append(f"{text}{n}")
        return state

    def merge(self, earlier: list[str], later: list[str]) -> list[str]:
        return earlier + later

    def result(self, state: list[str]) -> str:
        return ",".join(state)


class Product(Accumulator):
    state_type = "numeric(30,2)"

    def zero(self) -> Decimal:
        return Decimal(1)

    def add(self, state: Decimal, factor: Decimal | None) -> Decimal:
        return state if factor is None else state * factor

    def merge(self, earlier: Decimal, later: Decimal) -> Decimal:
        return earlier * later


DISTINCT = ExpressionAccumulator(
    partials={"seen": pl.col("n").unique()},
    merge={"seen": pl.col("seen").explode().unique().sort()},
    result=pl.col("seen").list.len(),
)
VARIANCE = ExpressionAccumulator(
    partials={"n": pl.col("n").count(), "x": pl.col("n").sum(), "xx": (pl.col("n") * pl.col("n")).sum()},
    merge={name: pl.col(name).sum() for name in ("n", "x", "xx")},
    result=pl.col("xx") * pl.col("n") - pl.col("x") * pl.col("x"),
)
ROWS = ExpressionAccumulator({"n": pl.len()}, {"n": pl.col("n").sum()}, pl.col("n"))
OWN: dict[str, Any] = {
    "distinct": DISTINCT,
    "variance": VARIANCE,
    "rows": ROWS,
    "joined": Joined(pl.col("t"), pl.col("n")),
    "product": Product(pl.col("d")),
    "total": pl.col("n").sum(),
}
Row = tuple[Any, ...]
INPUT = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 2)),
        st.integers(0, 40).map(lambda minute: START + minute * MINUTE),
        st.one_of(st.none(), st.integers(-9, 9)),
        st.one_of(st.none(), st.sampled_from([Decimal("3.00"), Decimal(2), Decimal(-1)])),
        st.one_of(st.none(), st.sampled_from("aüz")),
    ),
    max_size=25,
)


def aggregate(**expressions: Any) -> Aggregate:
    return Aggregate(Location("job.py", 1), "own", ("k",), tuple(expressions.items()))


def windowed(window: Window, **expressions: Any) -> WindowAggregate:
    aggregates = tuple(expressions.items())
    place = Location("job.py", 1)
    return WindowAggregate(place, "own", ("k",), aggregates, None, Emission.CLOSE, window=window, time="at")


def operator(transformation: Aggregate) -> StatefulOperator:
    made = operator_for(transformation, [SCHEMA], transformation.output_schema([SCHEMA]))
    assert isinstance(made, StatefulOperator)
    return made


def batch(rows: list[Row]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [()] * len(SCHEMA)
    arrow = SCHEMA.to_arrow()
    arrays = [pa.array(values, field.type) for values, field in zip(columns, arrow, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow)


def rows_of(emitted: Any) -> list[dict[str, Any]]:
    return [row for one in emitted if isinstance(one, pa.RecordBatch) for row in one.to_pylist()]


def restarted(transformation: Aggregate, running: StatefulOperator, chains: dict[int, list[Fragment]]) -> Any:
    for one in running.cut().fragments:
        if one.sequence == 0:
            chains[one.key_group] = []
        chains[one.key_group].append(Fragment(one.key_group, one.sequence, decode_rows(encode_rows(one.rows))))
    fresh = operator(transformation)
    for chain in chains.values():
        for fragment in chain:
            fresh.restore([fragment])
    return fresh


def expected(rows: list[Row]) -> dict[str, Any]:
    """Each aggregate over these rows, worked out in Python."""
    numbers = [n for _, _, n, _, _ in rows if n is not None]
    product = Decimal(1)
    for _, _, _, factor, _ in rows:
        product *= 1 if factor is None else factor
    return {
        "distinct": len({n for _, _, n, _, _ in rows}),
        "variance": sum(n * n for n in numbers) * len(numbers) - sum(numbers) ** 2,
        "rows": len(rows),
        "joined": ",".join(f"{t}{n}" for _, _, n, _, t in rows),
        "product": product,
        "total": sum(numbers),
    }


@settings(deadline=None, max_examples=30)
@given(rows=INPUT, data=st.data())
def test_own_aggregates_are_those_of_all_rows_at_once(rows: list[Row], data: st.DataObject) -> None:
    transformation = aggregate(**OWN)
    running = operator(transformation)
    chains: dict[int, list[Fragment]] = {}
    shown: dict[Any, dict[str, Any]] = {}
    at = 0
    while at < len(rows):
        until = data.draw(st.integers(at + 1, len(rows)))
        assert rows_of(running.process(batch(rows[at:until]))) == []
        at = until
        if data.draw(st.booleans()):
            shown |= {row.pop("k"): row for row in rows_of(running.flush())}
            running = restarted(transformation, running, chains)
    shown |= {row.pop("k"): row for row in rows_of(running.flush())}
    assert shown == {key: expected([row for row in rows if row[0] == key]) for key in {row[0] for row in rows}}


@settings(deadline=None, max_examples=30)
@given(
    rows=INPUT.map(lambda rows: sorted(rows, key=lambda row: row[1])),
    window=st.sampled_from(
        [Tumbling(10 * MINUTE), Sliding(10 * MINUTE, 5 * MINUTE), Session(3 * MINUTE), Session(8 * MINUTE)]
    ),
    size=st.integers(1, 9),
)
def test_own_aggregates_in_windows(rows: list[Row], window: Window, size: int) -> None:
    transformation = windowed(window, **OWN)
    running = operator(transformation)
    chains: dict[int, list[Fragment]] = {}
    for first in range(0, len(rows), size):
        assert rows_of(running.process(batch(rows[first : first + size]))) == []
        running = restarted(transformation, running, chains)
    found = rows_of(running.advance(FOREVER))
    for result in found:
        key, start, end = result.pop("k"), result.pop("window_start"), result.pop("window_end")
        inside = [row for row in rows if row[0] == key and start <= row[1] < end]
        assert result == expected(inside)
        assert inside
    counted = sum(result["rows"] for result in found)
    assert counted == len(rows) * (2 if isinstance(window, Sliding) else 1)


def problem_of(**expressions: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        aggregate(**expressions).output_schema([SCHEMA])
    return "\n".join(f"{finding.problem}; {finding.cure}" for finding in caught.value.findings)


class WithoutType(Product):
    state_type = "number"


N = {"n": pl.len()}
SUM = {"n": pl.col("n").sum()}


@pytest.mark.parametrize(
    "accumulator, problem",
    [
        (Product(), 'column "x": Product is given (), not expressions; say what it takes of each row'),
        (Product("d"), "column \"x\": Product is given ('d',), not expressions"),  # type: ignore[arg-type]
        (Product(pl.col("d").sum()), "does not look at one row at a time"),
        (Product(pl.col("missing")), "missing"),
        (WithoutType(pl.col("d")), 'column "x": WithoutType: column type "number" is not supported'),
        (Product, "is no aggregate that can be carried on from batch to batch"),
        (ExpressionAccumulator({}, {}, pl.col("n")), 'column "x": partials and merge do not name the same parts'),
        (ExpressionAccumulator(N, {"m": pl.col("n").sum()}, pl.col("n")), "do not name the same parts"),
        (ExpressionAccumulator(N, {"n": 5}, pl.col("n")), 'column "x": 5 is not an expression'),  # type: ignore[dict-item]
        (ExpressionAccumulator({"n": pl.all().sum()}, SUM, pl.col("n")), "names several columns; name each one"),
        (ExpressionAccumulator({"n": pl.col("m").sum()}, SUM, pl.col("n")), 'unable to find column "m"'),
        (ExpressionAccumulator(N, {"n": pl.col("m").sum()}, pl.col("n")), 'unable to find column "m"'),
        (ExpressionAccumulator(N, {"n": pl.col("n").mean()}, pl.col("n")), 'part "n" is int8, and merged it is float8'),
        (ExpressionAccumulator(N, SUM, pl.col("n").sum()), "does not look at one row at a time"),
        (ExpressionAccumulator({"": pl.len()}, {"": pl.col("").sum()}, pl.col("")), "the name has 0 bytes"),
    ],
)
def test_mistakes_in_accumulators_are_told(accumulator: Any, problem: str) -> None:
    assert problem in problem_of(x=accumulator)


def test_declared_type_must_be_that_of_the_accumulator() -> None:
    given = Aggregate(Location("job.py", 1), "own", ("k",), (("x", Product(pl.col("d"))),), {"x": "int8"})
    with pytest.raises(ConfigurationError, match=r'column "x" is numeric\(30,2\), not int8 as declared'):
        given.output_schema([SCHEMA])


def test_description_names_accumulators() -> None:
    assert aggregate(product=Product(pl.col("d")), rows=ROWS).describe() == (
        'aggregate by k: product=Product(col("d")), rows=col("n") of n=len() merged by col("n").sum()'
    )


class Broken(Product):
    def __init__(self, error: Exception) -> None:
        super().__init__(pl.col("d"))
        self.error = error

    def add(self, state: Decimal, factor: Decimal | None) -> Decimal:
        raise self.error


class Wrong(Product):
    def add(self, state: Decimal, factor: Decimal | None) -> Any:
        return 1.5


@pytest.mark.parametrize(
    "accumulator, error, message",
    [
        (Broken(ValueError("no")), InternalError, r"add .*raised ValueError: no for the row"),
        (Broken(RecordError("bad row")), RecordError, "bad row"),
        (Wrong(pl.col("d")), RecordError, r'state "x": 1.5 is float, numeric\(30,2\) takes Decimal'),
    ],
)
def test_what_methods_raise_or_return_wrongly_is_told(accumulator: Any, error: type[EtlError], message: str) -> None:
    running = operator(aggregate(x=accumulator))
    with pytest.raises(error, match=message):
        list(running.process(batch([(1, START, 1, Decimal(1), "a")])))


def test_moment_that_python_cannot_hold_is_refused() -> None:
    class Latest(Accumulator):
        state_type = "timestamp"

        def zero(self) -> None:
            return None

        def add(self, state: Any, at: Any) -> Any:
            return at

        def merge(self, earlier: Any, later: Any) -> Any:
            return later

    running = operator(aggregate(x=Latest(pl.col("at"))))
    moments = pa.array([2**62], pa.int64()).cast(pa.timestamp("us"))
    rows = batch([(1, START, 1, None, None)]).set_column(1, SCHEMA.to_arrow().field("at"), moments)
    with pytest.raises(RecordError, match="outside of the years 1 to 9999"):
        list(running.process(rows))


def test_state_of_an_own_aggregate_is_not_taken_for_another_s() -> None:
    former = operator(aggregate(x=ROWS))
    list(former.process(batch([(1, START, 1, None, "a")])))
    (fragment,) = former.cut().fragments
    for other in (pl.len(), Product(pl.col("d")), DISTINCT):
        with pytest.raises(StateError, match=r'state of operator "own" has columns k \(int32\), x\.state_n'):
            operator(aggregate(x=other)).restore([fragment])
