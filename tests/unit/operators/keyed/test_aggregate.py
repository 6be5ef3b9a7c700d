"""Aggregations against polars over the whole input, whatever the batches and the restarts."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from etl.codec import decode_rows, encode_rows
from etl.errors import ConfigurationError, RecordError, StateError
from etl.keyed import Aggregate, Emission
from etl.operators.keyed.aggregate import AggregateOperator
from etl.operators.keyed.state import CHAIN_CHUNKS_MAX
from etl.schema import Schema
from etl.state import Fragment
from etl.transformation import Location

SCHEMA = Schema.declare(
    {
        "k": "int4",
        "t": "text",
        "n": "int8",
        "small": "int2",
        "d": "numeric(12,2)",
        "f": "float8",
        "b": "bool",
        "at": "timestamp",
    }
)
INTEGRAL_FLOATS = st.integers(-1000, 1000).map(float)
"""Their sums are exact in any order."""
ROWS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 5)),
        st.one_of(st.none(), st.sampled_from(["a", "b", "ü", ""])),
        st.one_of(st.none(), st.integers(-(2**40), 2**40)),
        st.one_of(st.none(), st.integers(-(2**15), 2**15 - 1)),
        st.one_of(st.none(), st.decimals(-9999, 9999, places=2)),
        st.one_of(st.none(), INTEGRAL_FLOATS, st.just(float("nan"))),
        st.one_of(st.none(), st.booleans()),
        st.one_of(st.none(), st.integers(0, 20).map(lambda minute: dt.datetime(2024, 1, 1, 0, minute))),
    ),
    max_size=60,
)
EXPRESSIONS: dict[str, Any] = {
    "rows": pl.len(),
    "texts": pl.col("t").count(),
    "n_sum": pl.col("n").sum(),
    "small_sum": pl.col("small").sum(),
    "d_sum": pl.col("d").sum(),
    "d_times_two": (pl.col("d") * 2).sum(),
    "yes": pl.col("b").sum(),
    "t_min": pl.col("t").min(),
    "t_max": pl.col("t").max(),
    "d_min": pl.col("d").min(),
    "d_max": pl.col("d").max(),
    "n_min": pl.col("n").min(),
    "f_min": pl.col("f").min(),
    "f_max": pl.col("f").max(),
    "at_max": pl.col("at").max(),
    "b_max": pl.col("b").max(),
    "n_mean": pl.col("n").mean(),
    "first": pl.col("t").first(),
    "last": pl.col("t").last(),
    "earliest": pl.col("t").sort_by("at").first(),
    "latest": pl.col("d").sort_by("at").last(),
    "stable": pl.col("d").sort_by("at", maintain_order=True).last(),
}


def aggregate(keys: Sequence[Any] = ("k",), emission: Any = Emission.CHECKPOINT, **named: Any) -> Aggregate:
    schema = named.pop("schema", None)
    return Aggregate(Location("job.py", 1), "totals", tuple(keys), tuple(named.items()), schema, emission)


def named(name: str) -> Aggregate:
    return Aggregate(Location("job.py", 1), "totals", ("k",), ((name, pl.len()),))


def operator(transformation: Aggregate, schema: Schema = SCHEMA) -> AggregateOperator:
    return AggregateOperator(transformation, schema, transformation.output_schema([schema]))


def batch(rows: Sequence[tuple[Any, ...]], schema: Schema = SCHEMA) -> pa.RecordBatch:
    values = zip(*rows, strict=True) if rows else [[] for _ in schema]
    arrow = schema.to_arrow()
    return pa.RecordBatch.from_arrays(
        [pa.array(one, field.type) for one, field in zip(values, arrow, strict=True)], schema=arrow
    )


def frame(batches: Iterable[pa.RecordBatch], schema: Schema) -> pl.DataFrame:
    found = pl.from_arrow(pa.Table.from_batches(list(batches), schema=schema.to_arrow()))
    assert isinstance(found, pl.DataFrame)
    return found


def oracle(rows: Sequence[tuple[Any, ...]], keys: Sequence[str], expressions: dict[str, pl.Expr]) -> pl.DataFrame:
    """polars, over everything at once, with a stable sort and integers that cannot wrap around."""
    stable = expressions | {
        "earliest": pl.col("t").sort_by("at", maintain_order=True).first(),
        "latest": pl.col("d").sort_by("at", maintain_order=True).last(),
    }
    wanted = {name: expression for name, expression in stable.items() if name in expressions}
    return frame([batch(rows)], SCHEMA).group_by(keys, maintain_order=True).agg(**wanted)


@settings(deadline=None)
@given(rows=ROWS, data=st.data(), keys=st.sampled_from([("k",), ("t",), ("k", "t"), ("f",), ("at", "d")]))
def test_results_are_those_of_polars_over_everything(
    rows: list[tuple[Any, ...]], data: st.DataObject, keys: tuple[str, ...]
) -> None:
    transformation = aggregate(keys, **{name: one for name, one in EXPRESSIONS.items() if name not in keys})
    output = transformation.output_schema([SCHEMA])
    running = operator(transformation)
    chains: dict[int, list[Fragment]] = {}
    shown: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    at = 0
    while at < len(rows):
        until = data.draw(st.integers(at + 1, len(rows)))
        assert list(running.process(batch(rows[at:until]))) == []
        at = until
        if data.draw(st.booleans()):
            shown |= _by_key(frame(running.flush(), output), keys)
            _store(running, chains)
            if data.draw(st.booleans()):
                running = _restored(transformation, chains)
    shown |= _by_key(frame(running.flush(), output), keys)

    expected = oracle(rows, keys, EXPRESSIONS).select(output.names)
    assert_frame_equal(_of_keys(shown, output), expected.cast(_of_keys(shown, output).schema), check_row_order=False)


def _by_key(found: pl.DataFrame, keys: Sequence[str]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    # NaN is no dict key that would be found again
    return {tuple(repr(row[found.columns.index(key)]) for key in keys): row for row in found.rows()}


def _of_keys(shown: dict[tuple[Any, ...], tuple[Any, ...]], output: Schema) -> pl.DataFrame:
    return frame([batch(list(shown.values()), output)], output)


def _store(running: AggregateOperator, chains: dict[int, list[Fragment]]) -> None:
    cut = running.cut()
    for fragment in cut.fragments:
        stored = Fragment(fragment.key_group, fragment.sequence, decode_rows(encode_rows(fragment.rows)))
        if fragment.sequence == 0:
            chains[fragment.key_group] = []
        chains[fragment.key_group].append(stored)
        assert fragment.sequence == len(chains[fragment.key_group]) - 1
    assert cut.summary.chunks == sum(map(len, chains.values()))


def _restored(transformation: Aggregate, chains: dict[int, list[Fragment]]) -> AggregateOperator:
    fresh = operator(transformation)
    for chain in chains.values():
        for fragment in chain:
            fresh.restore([fragment])
    return fresh


def test_each_update_is_emitted_where_it_is_wanted() -> None:
    running = operator(aggregate(emission=Emission.UPDATE, rows=pl.len()))
    row = (1, None, None, None, None, None, None, None)
    first = [one.to_pylist() for one in running.process(batch([row, row]))]
    second = [one.to_pylist() for one in running.process(batch([row]))]
    assert (first, second) == ([[{"k": 1, "rows": 2}]], [[{"k": 1, "rows": 3}]])
    assert list(running.flush()) == []


def test_a_barrier_emits_only_what_has_changed() -> None:
    running = operator(aggregate(rows=pl.len()))
    rows = [(number, *[None] * 7) for number in range(3)]
    list(running.process(batch(rows)))
    assert sum(one.num_rows for one in running.flush()) == 3
    list(running.process(batch(rows[1:2])))
    assert [one.to_pylist() for one in running.flush()] == [[{"k": 1, "rows": 2}]]
    assert list(running.flush()) == []


def test_a_cut_holds_only_what_has_changed() -> None:
    running = operator(aggregate(rows=pl.len()))
    many = [(number, *[None] * 7) for number in range(20_000)]
    list(running.process(batch(many)))
    assert sum(one.rows.num_rows for one in running.cut().fragments) == 20_000
    list(running.process(batch(many[:200])))
    fragments = running.cut().fragments
    assert sum(one.rows.num_rows for one in fragments) == 200
    assert {one.sequence for one in fragments} == {1}
    assert running.cut().fragments == ()


def test_chains_end_before_a_restore_would_be_slow() -> None:
    running = operator(aggregate(rows=pl.len()))
    list(running.process(batch([(number, *[None] * 7) for number in range(20_000)])))
    running.cut()
    longest, full = 0, 0
    for _ in range(400):
        list(running.process(batch([(7, *[None] * 7)])))
        cut = running.cut()
        longest = max(longest, *(one.sequence for one in cut.fragments))
        full += sum(one.sequence == 0 for one in cut.fragments)
    assert longest < CHAIN_CHUNKS_MAX
    assert full >= 2


def test_a_sum_that_does_not_fit_its_column_is_refused() -> None:
    running = operator(aggregate(n_sum=pl.col("n").sum()))
    row = (1, None, 2**62, None, None, None, None, None)
    list(running.process(batch([row, row])))
    with pytest.raises(RecordError, match=r'column "n_sum": a sum does not fit into int8'):
        list(running.flush())


def test_a_sum_has_room_where_that_is_declared() -> None:
    running = operator(aggregate(n_sum=pl.col("n").sum(), schema={"n_sum": "numeric(38,0)"}))
    row = (1, None, 2**62, None, None, None, None, None)
    list(running.process(batch([row, row])))
    assert [one.to_pylist() for one in running.flush()] == [[{"k": 1, "n_sum": Decimal(2**63)}]]


def test_a_sum_of_too_many_digits_is_refused() -> None:
    schema = Schema.declare({"k": "int4", "d": "numeric(38,0)"})
    running = operator(aggregate(total=pl.col("d").sum()), schema)
    rows = [(1, Decimal(10**38 - 1))]
    list(running.process(batch(rows, schema)))
    with pytest.raises(RecordError, match=r'column "total": a sum has more than 38 digits'):
        list(running.process(batch(rows, schema)))


def test_state_of_another_aggregation_is_refused_by_name() -> None:
    before = operator(aggregate(rows=pl.len()))
    list(before.process(batch([(1, *[None] * 7)])))
    after = operator(aggregate(rows=pl.len(), total=pl.col("d").sum()))
    with pytest.raises(
        StateError, match=r'state of operator "totals" has columns k \(int32\), rows.len \(int64\), and'
    ):
        after.restore([before.cut().fragments[0]])


@pytest.mark.parametrize(
    "expression, problem",
    [
        (pl.col("n"), "no aggregate that can be carried on"),
        (pl.col("n").sum() / pl.len(), "no aggregate that can be carried on"),
        (pl.col("n").median(), "no aggregate that can be carried on"),
        (pl.col("t").sort_by("at", descending=True).last(), "does not look at one row at a time"),
        (pl.col("n").shift().sum(), "does not look at one row at a time"),
        (pl.col("t").sum(), "there is no sum of text"),
        (pl.col("t").mean(), "there is no mean of text"),
        (pl.col("missing").sum(), "missing"),
        (5, "no aggregate that can be carried on"),
        (pl.col("n").cast(pl.UInt64).sum(), "yields unsigned 64-bit integers"),
    ],
)
def test_what_cannot_be_carried_on_is_refused(expression: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        aggregate(x=expression).output_schema([SCHEMA])


@pytest.mark.parametrize(
    "transformation, problem",
    [
        (aggregate(), "no columns are given"),
        (aggregate((), rows=pl.len()), "it has no key"),
        (aggregate(("k", "k"), rows=pl.len()), "key column 'k' is given twice"),
        (aggregate(("x",), rows=pl.len()), "key column 'x' is not there"),
        (aggregate(k=pl.len()), 'column "k" is a column of the key'),
        (aggregate(rows=pl.len(), schema={"total": "int8"}), 'schema declares "total", which is not computed'),
        (aggregate(rows=pl.len(), schema={"rows": "int4"}), 'column "rows" is int8, not int4 as declared'),
        (aggregate(rows=pl.len(), emission="never"), "emit='never' is unknown"),
        (aggregate(rows=pl.len(), emission=pl.len()), "is unknown"),
        (aggregate((pl.col("k"),), rows=pl.len()), "is no name of a column"),
        (aggregate((["k"],), rows=pl.len()), "['k'] is no name of a column"),
        (named("x" * 64), "the name has 64 bytes"),
        (named(""), "the name has 0 bytes"),
        (aggregate(rows=pl.len(), schema=5), "schema=5 is no mapping"),
    ],
)
def test_mistakes_in_the_declaration_are_told(transformation: Aggregate, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        transformation.output_schema([SCHEMA])
    assert problem in str(caught.value)


@pytest.mark.parametrize("type_", ["json", "jsonb", "int8[]"])
def test_values_without_equality_are_no_keys(type_: str) -> None:
    schema = Schema.declare({"k": type_})
    with pytest.raises(ConfigurationError, match="whose values have no equality here"):
        aggregate(rows=pl.len()).output_schema([schema])


DECIMALS = Schema.declare({"k": "int4", "d": "numeric(38,0)"})


@pytest.mark.parametrize("count", [3, 4])
def test_decimals_do_not_wrap_around_within_a_batch(count: int) -> None:
    for expression in (pl.col("d").sum(), pl.col("d").mean()):
        running = operator(aggregate(x=expression), DECIMALS)
        with pytest.raises(RecordError, match=r'column "x": a sum has more than 38 digits'):
            list(running.process(batch([(1, Decimal(10**38 - 1))] * count, DECIMALS)))


@settings(deadline=None)
@given(st.lists(st.integers(-(10**38) + 1, 10**38 - 1), min_size=1, max_size=6))
def test_sums_of_the_largest_decimals_are_exact_or_refused(numbers: list[int]) -> None:
    running = operator(aggregate(x=pl.col("d").sum()), DECIMALS)
    try:
        list(running.process(batch([(1, Decimal(number)) for number in numbers], DECIMALS)))
    except RecordError:
        assert abs(sum(numbers)) >= 10**38
    else:
        assert [one.to_pylist() for one in running.flush()] == [[{"k": 1, "x": Decimal(sum(numbers))}]]


@settings(deadline=None)
@given(st.lists(st.decimals(-(10**9), 10**9, places=2), min_size=1, max_size=9))
def test_mean_is_the_float_nearest_to_the_exact_one(numbers: list[Decimal]) -> None:
    running = operator(aggregate(x=pl.col("d").mean()))
    for number in numbers:
        list(running.process(batch([(1, None, None, None, number, None, None, None)])))
    (found,) = (row for one in running.flush() for row in one.to_pylist())
    assert found["x"] == float(Fraction(sum(numbers)) / len(numbers))


@pytest.mark.parametrize("rows_of_a_batch", [1, 3, 10])
def test_constants_count_for_every_row(rows_of_a_batch: int) -> None:
    expressions: dict[str, Any] = {
        "sum": pl.lit(1).sum(),
        "count": pl.lit(1).count(),
        "when": pl.when(pl.lit(True)).then(2).sum(),
        "first": pl.lit("x").first(),
    }
    running = operator(aggregate(**expressions))
    rows = [(number % 2, *[None] * 7) for number in range(10)]
    for first in range(0, 10, rows_of_a_batch):
        list(running.process(batch(rows[first : first + rows_of_a_batch])))
    assert [row for one in running.flush() for row in one.to_pylist()] == [
        {"k": key, "sum": 5, "count": 5, "when": 10, "first": "x"} for key in (0, 1)
    ]


@pytest.mark.parametrize(
    "name", ["*", "^k.*$", "key_0", "input_0_value", "partial_0_sum", "__etl_row", 'a"b.c:d', "removed"]
)
def test_any_name_of_a_column_is_a_key(name: str) -> None:
    schema = Schema.declare({name: "int4", "n": "int8"})
    running = operator(aggregate((name,), total=pl.col("n").sum()), schema)
    list(running.process(batch([(1, 1), (1, 2), (2, 3)], schema)))
    assert [row for one in running.flush() for row in one.to_pylist()] == [{name: 1, "total": 3}, {name: 2, "total": 3}]
    (fragments,) = ([one.rows for one in running.cut().fragments],)
    assert sum(rows.num_rows for rows in fragments) == 2


@pytest.mark.parametrize("rows_of_a_batch", [1, 2])
def test_zeros_are_the_same_in_any_order(rows_of_a_batch: int) -> None:
    for floats in ([0.0, -0.0], [-0.0, 0.0]):
        running = operator(aggregate(low=pl.col("f").min(), high=pl.col("f").max()))
        rows = [(1, None, None, None, None, one, None, None) for one in floats]
        for first in range(0, 2, rows_of_a_batch):
            list(running.process(batch(rows[first : first + rows_of_a_batch])))
        assert repr([one.to_pylist() for one in running.flush()]) == "[[{'k': 1, 'low': 0.0, 'high': 0.0}]]"


@pytest.mark.parametrize(
    "before, after",
    [
        (pl.col("n").min(), pl.col("n").max()),
        (pl.col("n").first(), pl.col("n").last()),
        (pl.col("n").max(), pl.col("n").last()),
        (pl.col("n").sort_by("at").first(), pl.col("n").sort_by("at").last()),
        (pl.len(), pl.col("n").count()),
        (pl.col("n").sum(), pl.col("n").mean()),
    ],
)
def test_state_of_one_aggregate_is_not_taken_for_another_s(before: pl.Expr, after: pl.Expr) -> None:
    former, running = operator(aggregate(x=before)), operator(aggregate(x=after))
    list(former.process(batch([(1, *[None] * 7)])))
    with pytest.raises(StateError, match=r'state of operator "totals" has columns k \(int32\), x\.'):
        running.restore([former.cut().fragments[0]])


def test_element_that_python_cannot_hold_is_refused() -> None:
    schema = Schema.declare({"k": "int4", "days": "date[]"})
    running = operator(aggregate(days=pl.col("days").first()), schema)
    days = pa.array([[10_000_000]], pa.list_(pa.int32())).cast(pa.list_(pa.date32()))
    with pytest.raises(RecordError, match="an array has an element that Python's types cannot hold"):
        list(running.process(pa.RecordBatch.from_arrays([pa.array([1], pa.int32()), days], schema=schema.to_arrow())))
