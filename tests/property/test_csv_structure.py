"""Any bytes at all: read as the grammar says, or refused at the same place, whatever the block borders."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import RecordError
from etl.source import SourceContext
from etl.sources import CsvFiles
from etl.sources.csv_blocks import complete_bytes, is_well_formed, record_ends
from etl.sources.csv_records import StructureError, iter_records

soup = st.lists(
    st.sampled_from([b"a", b",", b'"', b"\n", b"\r\n", b"\r", b'""', b"\0", b"\xc3\xa9", b"\xff", b"x,y\n"]),
    max_size=24,
).map(b"".join)


@settings(max_examples=1000, deadline=None)
@given(soup)
def test_block_cut_agrees_with_the_grammar(data: bytes) -> None:
    size = complete_bytes(data)
    block = data[:size]
    try:
        ends = [(record.end, record.is_blank) for record in iter_records(block, 1, final=True)]
    except StructureError:
        assert not is_well_formed(block)
        return
    assert is_well_formed(block) == (b"\0" not in block)
    assert record_ends(block, blank_is_record=True).to_pylist() == [end for end, _ in ends]
    assert record_ends(block, blank_is_record=False).to_pylist() == [end for end, blank in ends if not blank]


def outcome(directory: Path, source: CsvFiles) -> tuple[list[dict[str, str | None]], str | None]:
    context = SourceContext("orders", directory)
    reader = source.create_reader(context)
    rows: list[dict[str, str | None]] = []
    try:
        reader.assign(source.create_enumerator(context).discover({}))
        while (batch := reader.read_batch()) is not None:
            rows += batch.to_pylist()
    except RecordError as error:
        return rows, str(error)
    finally:
        reader.close()
    return rows, None


@settings(max_examples=400, deadline=None)
@given(soup, st.sampled_from([1, 5, 20]), st.sampled_from([1, 2, 65_536]))
def test_outcome_does_not_depend_on_block_borders(body: bytes, block_bytes: int, batch_rows: int) -> None:
    schema = {"a": "text", "b": "text"}
    with tempfile.TemporaryDirectory() as name:
        Path(name, "orders.csv").write_bytes(b"a,b\n" + body)
        whole_rows, whole_error = outcome(Path(name), CsvFiles("*.csv", schema))
        rows, error = outcome(Path(name), CsvFiles("*.csv", schema, block_bytes=block_bytes, batch_rows=batch_rows))
    assert error == whole_error
    assert rows == whole_rows or (error is not None and rows[: len(whole_rows)] == whole_rows)
