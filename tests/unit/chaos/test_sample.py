"""A sample: the same first rows, whatever the batches and however often it is interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from etl.errors import InternalError
from etl.source import Position, SourceContext, SourceReader
from etl.sources import CsvFiles
from etl.testing.chaos.sample import Sample, SampledSource
from tests.support.scripted import Numbers, _Reader

SIZES = (5, 0, 3, 9)
CONTEXT_UID = "numbers"


@pytest.fixture
def context(tmp_path: Path) -> SourceContext:
    """Four files of numbers that go on from one to the next; the second has a header only."""
    number = 0
    for index, size in enumerate(SIZES):
        lines = ["n", *(str(number + offset) for offset in range(size))]
        number += size
        (tmp_path / f"{index}.csv").write_text("".join(f"{line}\n" for line in lines))
    return SourceContext(CONTEXT_UID, tmp_path)


def csv(batch_rows: int) -> CsvFiles:
    return CsvFiles("*.csv", {"n": "int8"}, batch_rows=batch_rows)


def read(source: SampledSource, context: SourceContext, positions: dict[str, Position], batches: int) -> list[int]:
    """Read some batches from the stored positions on, as a run would that is killed after its checkpoint."""
    splits = source.create_enumerator(context).discover(positions)
    reader = source.create_reader(context)
    found: list[int] = []
    if splits:
        reader.assign(splits)
        positions.update(reader.snapshot_positions())
        for _ in range(batches):
            batch = reader.read_batch()
            if batch is None:
                break
            found += batch["n"].to_pylist()
        positions.update(reader.snapshot_positions())
    reader.close()
    return found


@pytest.mark.parametrize("rows_max", [1, 4, 5, 8, 10, 16, 17, 100])
@pytest.mark.parametrize("batches", [1, 2, 100])
def test_rows_are_the_first_ones_however_reading_is_cut(context: SourceContext, rows_max: int, batches: int) -> None:
    positions: dict[str, Position] = {}
    found: list[int] = []
    for attempt in range(40):
        # Where batches of the source end changes from one run to the next.
        found += read(SampledSource(csv(1 + attempt % 4), Sample.of(rows_max)), context, positions, batches)

    assert found == list(range(min(rows_max, sum(SIZES))))


def test_sample_comes_in_about_eight_batches(context: SourceContext) -> None:
    source = SampledSource(csv(1000), Sample.of(16))
    reader = source.create_reader(context)
    reader.assign(source.create_enumerator(context).discover({}))
    sizes = []
    while (batch := reader.read_batch()) is not None:
        sizes.append(batch.num_rows)
    reader.close()

    assert sizes == [2, 2, 1, 2, 1, 2, 2, 2, 2]


def test_batches_say_of_which_split_they_are(context: SourceContext) -> None:
    """Watermarks are found split by split."""
    source = SampledSource(csv(2), Sample(20, 2))
    reader = source.create_reader(context)
    reader.assign(source.create_enumerator(context).discover({}))
    found = []
    while reader.read_batch() is not None:
        found.append(reader.split_id)
    reader.close()

    assert found == ["0.csv"] * 3 + ["2.csv"] * 2 + ["3.csv"] * 5


@pytest.mark.parametrize(("rows_max", "rows", "size"), [(1000, 1000, 125), (1000, 80, 10), (1000, 3, 1), (5, 5, 1)])
def test_batches_become_smaller_when_there_are_fewer_rows(rows_max: int, rows: int, size: int) -> None:
    assert Sample.of(rows_max).of_rows(rows) == Sample(rows_max, size)


def test_nothing_is_listed_when_the_sample_was_read(context: SourceContext) -> None:
    source = SampledSource(csv(2), Sample.of(6))
    positions: dict[str, Position] = {}
    assert read(source, context, positions, 100) == list(range(6))

    assert list(source.create_enumerator(context).discover(positions)) == []


def test_sample_says_what_it_is_and_has_the_columns_of_its_source(context: SourceContext) -> None:
    source = SampledSource(csv(2), Sample.of(6))

    assert source.describe() == "the first 6 rows of CsvFiles('*.csv')"
    assert source.schema == csv(2).schema
    assert list(source.preflight(context)) == []


class _Forgetful(_Reader):
    def snapshot_positions(self) -> Mapping[str, Position]:
        return {}


class _ForgetfulNumbers(Numbers):
    def create_reader(self, context: SourceContext) -> SourceReader:
        return _Forgetful(self)


def test_source_whose_position_does_not_move_is_refused(context: SourceContext) -> None:
    source = SampledSource(_ForgetfulNumbers(5), Sample.of(3))
    reader = source.create_reader(context)
    reader.assign(source.create_enumerator(context).discover({}))

    with pytest.raises(InternalError, match="no position moved"):
        reader.read_batch()
