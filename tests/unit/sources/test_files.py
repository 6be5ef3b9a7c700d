from __future__ import annotations

import os
from pathlib import Path

import pytest

from etl.sources.files import list_files, natural_key


def splits(directory: Path, *patterns: str) -> list[str]:
    warnings: list[str] = []
    names = [file.split for file in list_files(patterns, directory, warnings.append)]
    assert warnings == []
    return names


def make(directory: Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a\n1\n")


def test_natural_order_counts_digits() -> None:
    names = ["b2", "a10", "a2", "a1", "a", "A", "a01", "10/1", "9/1", "a-b", "a/b"]
    assert sorted(names, key=natural_key) == ["9/1", "10/1", "A", "a", "a/b", "a01", "a1", "a2", "a10", "a-b", "b2"]


def test_glob_lists_files_in_natural_order(tmp_path: Path) -> None:
    make(tmp_path, "1.csv", "10.csv", "2.csv", "x.txt", ".hidden.csv")
    assert splits(tmp_path, "*.csv") == ["1.csv", "2.csv", "10.csv"]


def test_double_star_matches_any_depth(tmp_path: Path) -> None:
    make(tmp_path, "a.csv", "d/b.csv", "d/e/c.csv", ".git/d.csv")
    assert splits(tmp_path, "**/*.csv") == ["a.csv", "d/b.csv", "d/e/c.csv"]
    assert splits(tmp_path, "d/**/c.csv") == ["d/e/c.csv"]


def test_several_patterns_list_a_file_once(tmp_path: Path) -> None:
    make(tmp_path, "a1.csv", "a2.csv", "b.csv")
    assert splits(tmp_path, "a*.csv", "*1.csv", "b.csv") == ["a1.csv", "a2.csv", "b.csv"]


def test_file_outside_the_base_directory_is_named_absolutely(tmp_path: Path) -> None:
    make(tmp_path, "base/a.csv", "other/b.csv")
    assert splits(tmp_path / "base", "../other/*.csv", str(tmp_path / "base/*.csv")) == [
        f"{tmp_path}/other/b.csv",
        "a.csv",
    ]


def test_directory_named_like_a_file_is_passed_over(tmp_path: Path) -> None:
    make(tmp_path, "x.csv/inner.txt", "y.csv")
    assert splits(tmp_path, "*.csv") == ["y.csv"]


def test_dangling_link_is_told(tmp_path: Path) -> None:
    (tmp_path / "gone.csv").symlink_to(tmp_path / "nowhere.csv")
    warnings: list[str] = []
    assert list_files(["*.csv"], tmp_path, warnings.append) == []
    assert len(warnings) == 1
    assert "gone.csv: is a link whose target cannot be reached" in warnings[0]


def test_fifo_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    warnings: list[str] = []
    assert list_files(["*.csv"], tmp_path, warnings.append) == []
    assert warnings == [f"{tmp_path}/pipe.csv: is no regular file; it is not read"]


def test_loop_of_links_ends(tmp_path: Path) -> None:
    make(tmp_path, "d/a.csv")
    (tmp_path / "d/loop").symlink_to(tmp_path)
    (tmp_path / "d/loop2").symlink_to(tmp_path / "d")
    assert splits(tmp_path, "**/*.csv") == ["d/a.csv"]


def test_link_to_a_listed_file_is_read_once(tmp_path: Path) -> None:
    make(tmp_path, "10.csv")
    (tmp_path / "1-latest.csv").symlink_to("10.csv")
    assert splits(tmp_path, "*.csv") == ["10.csv"]
    assert splits(tmp_path, "*latest.csv") == ["1-latest.csv"]


@pytest.mark.parametrize("pattern", ["nowhere/*.csv", "a.csv/*", "b.csv", "**/q.csv"])
def test_pattern_without_match_lists_nothing(tmp_path: Path, pattern: str) -> None:
    make(tmp_path, "a.csv")
    assert splits(tmp_path, pattern) == []
