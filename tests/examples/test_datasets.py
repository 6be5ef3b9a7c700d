"""The files that example jobs read come out of packages whole or not at all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from etl.source import SourceContext
from jobs.datasets import AIRPORTS, PackagedCsv


def airports(member: str = "airports.csv", package: str = "airportsdata") -> PackagedCsv:
    return PackagedCsv("data/airports.csv", AIRPORTS, package=package, member=member)


def test_packaged_csv_copies_the_file_without_importing_the_package(tmp_path: Path) -> None:
    findings = airports().preflight(SourceContext("airports_csv", tmp_path))

    assert findings == []
    (copied,) = (tmp_path / "data").iterdir()
    assert (copied.name, copied.stat().st_mode & 0o777) == ("airports.csv", 0o644)
    assert "airportsdata" not in sys.modules


def test_packaged_csv_keeps_a_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "airports.csv").write_text(",".join(AIRPORTS) + "\n")

    assert airports().preflight(SourceContext("airports_csv", tmp_path)) == []
    assert (tmp_path / "data" / "airports.csv").read_text() == ",".join(AIRPORTS) + "\n"


def test_packaged_csv_names_the_extra_when_the_package_is_missing(tmp_path: Path) -> None:
    (finding,) = airports(package="no_such_package").preflight(SourceContext("airports_csv", tmp_path))

    assert finding.cure == "pip install 'exactly-once-etl[examples]'"


def test_packaged_csv_leaves_nothing_behind_when_copying_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        airports("no_such_member.csv").preflight(SourceContext("airports_csv", tmp_path))

    assert list((tmp_path / "data").iterdir()) == []
