"""The examples of docs/testing.md, as they stand there."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest

from etl.job import Job
from etl.testing import assert_same_result, rows
from sinks import PostgresTable, TwoPhaseCommitSink
from tests.support.declarations import DeclaredSource
from tests.support.payments import COLUMNS, payment, payments_job

DOCUMENT = (Path(__file__).parents[3] / "docs" / "testing.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENT, flags=re.MULTILINE | re.DOTALL)
    return [block for its_language, block in found if its_language == language]


def test_tests_of_the_document_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("jobs.payments")
    monkeypatch.setattr(module, "job", payments_job(), raising=False)
    monkeypatch.setitem(sys.modules, "jobs.payments", module)
    [example] = blocks("python")
    names: dict[str, Any] = {}

    exec(compile(example, "docs/testing.md", "exec"), names)
    tests: list[Callable[[], None]] = [value for name, value in names.items() if name.startswith("test_")]
    for test in tests:
        test()

    assert len(tests) == 2


def test_report_of_the_document_is_what_is_reported() -> None:
    job = Job("payments")
    stream = (
        job.read("payments", DeclaredSource(COLUMNS)).key_by("card").aggregate("sums", total=pl.col("amount").sum())
    )
    stream.write("totals", TwoPhaseCommitSink(PostgresTable("totals")))

    with pytest.raises(AssertionError) as caught:
        assert_same_result(job, [rows("payments", payment("a", "1"), payment("a", "2"))])

    assert blocks("") == [f"{caught.value}\n"]
