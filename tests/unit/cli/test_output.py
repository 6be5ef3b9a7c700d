"""Error lines, exit codes and plain tables."""

from __future__ import annotations

from pathlib import Path

import click
import psycopg
import pytest

from etl.cli.output import (
    OutputClosedError,
    error_lines,
    exit_code_of,
    format_bytes,
    format_duration,
    format_table,
    is_defect,
    printable,
    report,
)
from etl.errors import (
    AlreadyRunningError,
    ConfigurationError,
    DatabaseUnreachableError,
    FencedError,
    Finding,
    InternalError,
    RecordError,
    StateError,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("x"), 2),
        (click.UsageError("x"), 2),
        (RecordError("x"), 65),
        (DatabaseUnreachableError("x"), 69),
        (psycopg.OperationalError("connection refused"), 69),
        (StateError("x"), 70),
        (InternalError("x"), 70),
        (ValueError("x"), 70),
        (AlreadyRunningError("x"), 75),
        (FencedError("x"), 78),
        (OutputClosedError("x"), 141),
    ],
)
def test_exit_code_is_the_documented_one(error: Exception, code: int) -> None:
    assert exit_code_of(error) == code


def test_error_lines_list_findings_that_the_message_already_holds_once() -> None:
    error = ConfigurationError.from_findings(
        "job", [Finding("a", "is wrong", "mend it"), Finding("b", "too", "as well")]
    )

    assert error_lines(error) == ["job: 2 problem(s)", "  - a: is wrong; mend it", "  - b: too; as well"]


def test_error_lines_add_findings_that_the_message_does_not_hold() -> None:
    error = ConfigurationError("preflight", [Finding("a", "is wrong", "mend it")])

    assert error_lines(error) == ["preflight", "  - a: is wrong; mend it"]


def test_error_lines_join_a_message_of_several_lines() -> None:
    assert error_lines(StateError("lost:\n  rows 1-5\n")) == ["lost: rows 1-5"]


def test_error_lines_name_the_class_of_an_error_without_message() -> None:
    assert error_lines(FencedError()) == ["FencedError"]
    assert error_lines(KeyError("id")) == ["internal error: KeyError: 'id'"]


def test_printable_escapes_what_could_forge_a_line_or_drive_a_terminal() -> None:
    assert printable("a\nb\x1b[2J\u2028ü 李\u00a0") == "a\\nb\\x1b[2J\\u2028ü 李\u00a0"


def test_format_table_aligns_columns_and_shows_what_is_missing() -> None:
    table = format_table(["JOB", "ROWS"], [("orders", 12), ("x", None)], numeric=["ROWS"])

    assert table.splitlines() == ["JOB     ROWS", "orders    12", "x          -"]


def test_format_table_hides_passwords_and_keeps_one_line_a_row() -> None:
    table = format_table(["ERROR"], [("postgresql://u:secret@h/d\nnext",)])

    assert table.splitlines() == ["ERROR", "postgresql://u:***@h/d\\nnext"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.04, "0.0s"), (9.94, "9.9s"), (59.9, "59s"), (200, "3m 20s"), (7_500, "2h 5m"), (273_600, "3d 4h")],
)
def test_format_duration_shows_two_units_at_most(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown


@pytest.mark.parametrize(
    ("size_bytes", "shown"), [(0, "0 B"), (999, "999 B"), (153_305_831, "153.3 MB"), (2.5e12, "2.5 TB")]
)
def test_format_bytes_uses_decimal_units(size_bytes: float, shown: str) -> None:
    assert format_bytes(size_bytes) == shown


def test_report_keeps_the_traceback_of_a_defect_in_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    code = report(_raised(ValueError("password=secret")), debug=False)

    kept = list((tmp_path / "etl" / "tracebacks").iterdir())
    first, second = capsys.readouterr().err.splitlines()
    assert code == 70
    assert first == "etl: error: internal error: ValueError: password=***"
    assert second == f"  the traceback is in {kept[0]}; --debug shows it here"
    assert kept[0].stat().st_mode & 0o777 == 0o600
    assert "secret" not in kept[0].read_text()
    assert "in _raised" in kept[0].read_text()


def test_report_shows_the_traceback_when_debugging(capsys: pytest.CaptureFixture[str]) -> None:
    report(_raised(ConfigurationError("wrong")), debug=True)

    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["etl: error: wrong", "Traceback (most recent call last):"]


def test_report_prints_one_line_for_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(_raised(RecordError("a.csv:3: no number")), debug=False, subject="orders") == 65
    assert capsys.readouterr().err == "etl: error: orders: a.csv:3: no number\n"


def test_is_defect_tells_defects_from_mistakes() -> None:
    assert is_defect(InternalError("x"))
    assert is_defect(ZeroDivisionError("x"))
    assert not is_defect(ConfigurationError("x"))
    assert not is_defect(psycopg.OperationalError("x"))


def _raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught
