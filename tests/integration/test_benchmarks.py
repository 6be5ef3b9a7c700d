"""The benchmarks at tiny sizes: what they print, and that a missed bound and a wrong result are noticed."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

from benchmarks import __main__ as command
from benchmarks.contenders import PAIRS, Load, Pair, Task
from benchmarks.load import LoadOptions, WrongResultError, run_load
from benchmarks.process import ChildFailedError, Measured, measure
from benchmarks.report import Check, Report
from benchmarks.server import NoPsqlError, Server, embedded_bindir

ROWS = 2000
LOOSE = 1e9
STATE_SIZES = [
    *("--rows", "3000", "--function-rows", "500", "--bytewax-rows", "400", "--change-rows", "1000"),
    *("--few-keys", "200", "--many-keys", "200", "--rounds", "1"),
]
# Stands in for Bytewax, whose environment takes a minute to make: the same arguments, the same table.
STAND_IN = """
import csv, os, sys
from collections import defaultdict
from decimal import Decimal
import psycopg

with open(sys.argv[2], newline="") as file, psycopg.connect(os.environ["ETL_DATABASE_URL"]) as connection:
    totals = defaultdict(lambda: [Decimal(0), 0])
    for row in csv.DictReader(file):
        totals[row["key"]][0] += Decimal(row["amount"])
        totals[row["key"]][1] += 1
    assert len(sys.argv) == 3 or os.path.isdir(sys.argv[3])
    rows = [(key, *total) for key, total in totals.items()]
    connection.cursor().executemany("INSERT INTO totals VALUES (%s, %s, %s)", rows)
"""


@pytest.fixture
def server(database_url: str) -> Server:
    server = Server(database_url, embedded_bindir())
    try:
        server.psql(database_url)
    except NoPsqlError as error:
        pytest.skip(str(error))
    return server


@pytest.fixture
def options(tmp_path: Path) -> LoadOptions:
    return LoadOptions(ROWS, ROWS, 1, (), ROWS, tmp_path / "cache", tmp_path, [replace(PAIRS[0], bound=LOOSE)])


def _invoke(server: Server, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    monkeypatch.setenv("ETL_DATABASE_URL", server.url)
    return CliRunner().invoke(command.main, arguments)


def _only_object(output: str) -> dict[str, Any]:
    lines = [line for line in output.splitlines() if line.startswith("{")]
    assert len(lines) == 1
    content = json.loads(lines[0])
    assert isinstance(content, dict)
    return content


def test_load_exits_1_and_says_which_bound_was_missed(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # At this size the product's start alone takes longer than psql for everything.
    size = ["--rows", str(ROWS), "--rounds", "1", "--only", "two-phase", "--growth", "none"]
    result = _invoke(server, monkeypatch, "load", *size, "--cache-dir", str(tmp_path), "--json")
    assert result.exit_code == 1, result.output
    content = _only_object(result.stdout)
    assert content["ok"] is False
    assert [(check["name"], check["ok"]) for check in content["checks"]] == [
        ("two-phase / psql \\copy", False),
        ("two-phase, peak memory", True),
    ]
    assert set(content["setting"]) == {
        *(
            "rows",
            "upsert_rows",
            "growth_rows",
            "rounds",
            "cores",
            "system",
            "machine",
            "python",
            "postgresql",
            "load_average",
        )
    }
    assert set(content["figures"]) == {"psql \\copy (beside two-phase), s", "two-phase, s"}


def test_startup_prints_medians_against_bounds(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = _invoke(server, monkeypatch, "startup", "--rounds", "1", "--cache-dir", str(tmp_path), "--json")
    content = _only_object(result.stdout)
    assert [(check["name"], check["bound"], check["unit"]) for check in content["checks"]] == [
        ("etl --help", 0.2, "s"),
        ("etl run, nothing new", 1.0, "s"),
    ]
    assert result.exit_code == (0 if content["ok"] else 1)


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {tmp_path}/stand_in.py "$@"\n')
    python.chmod(0o755)
    return python


def test_state_prints_ratios_against_bounds(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stand_in: Path
) -> None:
    options = ["--bytewax-python", str(stand_in), "--cache-dir", str(tmp_path / "cache"), "--json"]
    result = _invoke(server, monkeypatch, "state", *STATE_SIZES, *options)
    assert result.exit_code == 1, result.output  # the stand-in has no framework to load
    content = _only_object(result.stdout)
    assert [(check["name"], check["bound"], check["unit"]) for check in content["checks"]] == [
        ("expressions / Bytewax, time a row, 200 keys", 0.1, "×"),
        ("function / Bytewax, time a row, 200 keys", 0.5, "×"),
        ("checkpoint every second / at the end, time", 1.05, "×"),
        ("bytes of changed keys / of all keys", 0.05, "×"),
        ("restore of 200 keys", 2.0, "s"),
    ]
    assert content["figures"]["checkpoints whose bytes were counted"][0] >= 1
    assert content["figures"]["chunks of a restore"][0] > 100
    assert content["figures"]["Bytewax without snapshots, 200 keys, s"][0] > 0
    assert content["setting"]["change_rows"] == 1000


def test_totals_that_are_others_are_no_result(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.state.polars_totals", lambda _task: Measured(1.0, 1, "200 0.00 3000\n"))
    options = ["--without-bytewax", "--cache-dir", str(tmp_path / "cache")]
    result = _invoke(server, monkeypatch, "state", *STATE_SIZES, *options)
    assert result.exit_code == 2
    assert "printed was 200 0.00 3000, the file holds 200 " in result.stderr


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: str(pair.name))
def test_every_sink_loads_exactly_what_its_baseline_loads(server: Server, options: LoadOptions, pair: Pair) -> None:
    report = run_load(server, replace(options, pairs=[replace(pair, bound=LOOSE)], growth=(pair.name,)))
    ratio, peak, grown, growth = report.checks
    assert (ratio.ok, peak.ok, grown.ok) == (True, True, True), report.text()
    assert len(ratio.samples) == 1
    assert growth.bound == 1.1


def _forgetful(load: Load) -> Load:
    def load_and_lose(task: Task) -> Measured:
        measured = load(task)
        with psycopg.connect(task.url, autocommit=True) as connection:
            connection.execute("UPDATE events SET note = 'other' WHERE id = 7")
        return measured

    return load_and_lose


def test_wrong_result_is_no_result(server: Server, options: LoadOptions) -> None:
    pair = replace(PAIRS[0], product=_forgetful(PAIRS[0].product))
    with pytest.raises(WrongResultError, match="the table holds Digest"):
        run_load(server, replace(options, pairs=[pair]))


def test_half_made_file_is_never_used(server: Server, options: LoadOptions) -> None:
    run_load(server, options)
    (file,) = options.cache_dir.iterdir()
    assert file.name == f"events-1-{ROWS}.csv"
    assert len(file.read_bytes().splitlines()) == ROWS + 1


def test_failed_child_is_told_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError, match=r"^sh exited 3: alas$"):
        measure(["sh", "-c", "echo alas >&2; exit 3"], tmp_path)


def test_command_that_does_not_exist_is_a_failed_child(tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError, match=r"^no-such-program could not be started: "):
        measure(["no-such-program"], tmp_path)


def test_memory_of_the_measuring_process_is_not_counted(tmp_path: Path) -> None:
    ballast = bytearray(os.urandom(1 << 20)) * 256
    measured = measure(["true"], tmp_path)
    assert len(ballast) == 256 << 20
    assert 0 < measured.peak_bytes < 64 << 20


def test_median_counts_and_bound_is_inclusive() -> None:
    check = Check.of_samples("x", [3.0, 1.0, 1.25], 1.25, "×")
    assert (check.value, check.ok) == (1.25, True)
    missed = replace(check, bound=1.2)
    report = Report("x", (check, missed))
    assert (report.ok, report.exit_code, Report("x", (check,)).exit_code) == (False, 1, 0)
    assert report.text().splitlines()[-1].startswith("MISSED  x")
