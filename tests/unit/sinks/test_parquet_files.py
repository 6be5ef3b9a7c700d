from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from etl.errors import ConfigurationError
from etl.sink import PreflightContext, SinkContext
from etl.testing.sink_contract import CONTRACT_SCHEMA, NoDatabase, batch_of, plain_context
from sinks import ParquetFiles


def _context(directory: Path, epoch: int = 1) -> SinkContext:
    return plain_context(directory, epoch, 0, 0)


def _preflight(directory: Path) -> PreflightContext:
    return PreflightContext("files", CONTRACT_SCHEMA, NoDatabase(), False, directory, 60.0)


def test_file_of_a_unit_has_the_stream_s_columns_and_a_name_that_sorts_by_checkpoint(tmp_path: Path) -> None:
    sink, context = ParquetFiles("."), _context(tmp_path)
    writer, committer = sink.create_writer(context), sink.create_committer(context)
    writer.write(batch_of(1))
    writer.write(batch_of(2, 3))
    unit = writer.prepare_commit(1)
    assert unit is not None
    committer.commit(unit)
    writer.close()
    committer.close()
    (path,) = tmp_path.iterdir()
    assert path.name == "000000000001-1-1-0-c0ffee0000000000.parquet"
    assert pq.read_table(path).schema.equals(CONTRACT_SCHEMA.to_arrow())
    assert pq.read_table(path)["id"].to_pylist() == [1, 2, 3]


def test_recovery_removes_the_half_written_file_of_a_killed_run(tmp_path: Path) -> None:
    sink = ParquetFiles(".")
    killed = sink.create_writer(_context(tmp_path))
    killed.write(batch_of(1))
    (tmp_path / ".foreign.parquet.open").touch()
    committer = sink.create_committer(_context(tmp_path, epoch=2))
    assert committer.recover([]) == 0
    committer.close()
    assert [path.name for path in tmp_path.iterdir()] == [".foreign.parquet.open"]
    killed.close()


def test_preflight_finds_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    (finding,) = ParquetFiles("out/deeper").preflight(_preflight(tmp_path))
    assert finding.problem.endswith("out is a file")


def test_directory_is_made(tmp_path: Path) -> None:
    sink = ParquetFiles("new/out")
    assert list(sink.preflight(_preflight(tmp_path))) == []
    for _ in range(2):
        sink.prepare_target(_preflight(tmp_path))
    assert (tmp_path / "new/out").is_dir()


def test_directory_must_be_named() -> None:
    with pytest.raises(ConfigurationError):
        ParquetFiles("")
