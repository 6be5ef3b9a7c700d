"""What other programs write is read back exactly, whatever the block borders, and from any position."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.source import Position, SourceContext
from etl.sources import CsvFiles

Table = tuple[dict[str, str], list[tuple[Any, ...]]]

texts = st.text(st.sampled_from('ab ,"\r\n;é日\ufeff\\N\t0x'), max_size=8) | st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), max_size=8
)
COLUMNS: dict[str, st.SearchStrategy[Any]] = {
    "int8": st.integers(-(2**63), 2**63 - 1),
    "numeric(12,2)": st.decimals(-9_999_999_999, 9_999_999_999, places=2).map(lambda value: value + Decimal(0)),
    "bool": st.booleans(),
    "text": texts,
    "date": st.dates(date(1, 1, 1), date(9999, 12, 31)),
    "timestamp": st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31)),
    "float8": st.floats(allow_nan=False),
}


@st.composite
def tables(draw: st.DrawFn) -> Table:
    types = draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=4))
    row = st.tuples(*[st.none() | COLUMNS[type_] for type_ in types])
    return {f"c{number}": type_ for number, type_ in enumerate(types)}, draw(st.lists(row, max_size=12))


limits = st.fixed_dictionaries(
    {"batch_rows": st.sampled_from([1, 2, 3, 5, 65_536]), "block_bytes": st.sampled_from([1, 7, 40, 200, 1 << 20])}
)


def read(
    directory: Path, source: CsvFiles, known: Mapping[str, Position], batches_max: int
) -> tuple[list[Any], dict[str, Position]]:
    context = SourceContext("orders", directory)
    reader = source.create_reader(context)
    rows: list[Any] = []
    positions = dict(known)
    try:
        reader.assign(source.create_enumerator(context).discover(known))
        for _ in range(batches_max):
            batch = reader.read_batch()
            if batch is None:
                break
            rows += [tuple(row.values()) for row in batch.to_pylist()]
        positions.update(reader.snapshot_positions())
    finally:
        reader.close()
    stored: dict[str, Position] = json.loads(json.dumps(positions))
    return rows, stored


def read_in_two_runs(data: bytes, source: CsvFiles, stop_after: int) -> list[Any]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "orders.csv").write_bytes(data)
        first, known = read(directory, source, {}, stop_after)
        second, known = read(directory, source, known, 10_000)
        third, _ = read(directory, source, known, 10_000)
    assert third == []
    return first + second


def written_by_csv(
    schema: Mapping[str, str], rows: Sequence[tuple[Any, ...]], line_end: str, unterminated: bool
) -> bytes:
    output = io.StringIO()
    writer = csv.writer(output, lineterminator=line_end)
    writer.writerow(schema)
    writer.writerows([["\\N" if value is None else value for value in row] for row in rows])
    text = output.getvalue()
    return (text.removesuffix(line_end) if unterminated and rows else text).encode()


@settings(max_examples=200, deadline=None)
@given(tables(), limits, st.integers(0, 8), st.booleans())
def test_table_written_by_csv_module_is_read_back(
    table: Table, limits: dict[str, Any], stop_after: int, unterminated: bool
) -> None:
    schema, rows = table
    rows = [tuple(None if value == "\\N" else value for value in row) for row in rows]
    data = written_by_csv(schema, rows, "\r\n", unterminated)
    source = CsvFiles("*.csv", schema, null="\\N", **limits)
    assert read_in_two_runs(data, source, stop_after) == rows


@settings(max_examples=200, deadline=None)
@given(tables(), limits, st.integers(0, 8), st.sampled_from(["necessary", "non_numeric"]))
def test_table_written_by_polars_is_read_back(
    table: Table, limits: dict[str, Any], stop_after: int, quoting: Any
) -> None:
    schema, rows = table
    kinds: dict[str, Any] = {
        "int8": pl.Int64,
        "numeric(12,2)": pl.Decimal(12, 2),
        "bool": pl.Boolean,
        "text": pl.String,
        "date": pl.Date,
        "timestamp": pl.Datetime("us"),
        "float8": pl.Float64,
    }
    frame = pl.DataFrame(rows, schema={name: kinds[type_] for name, type_ in schema.items()}, orient="row")
    data = frame.write_csv(quote_style=quoting, datetime_format="%Y-%m-%d %H:%M:%S%.6f").encode()
    source = CsvFiles("*.csv", schema, **limits)
    assert read_in_two_runs(data, source, stop_after) == rows
