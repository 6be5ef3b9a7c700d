"""The example jobs can be run one after the other in one database."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path

import jobs
from etl.job import find_jobs


def test_no_two_examples_write_to_the_same_table() -> None:
    names = sorted(path.stem for path in Path(next(iter(jobs.__path__))).glob("*.py") if path.stem != "__init__")
    targets = Counter(
        node.sink.target_name
        for name in names
        for job in find_jobs(import_module(f"jobs.{name}"))
        for node in job.graph().sinks
    )
    assert targets.total() > 10
    assert [target for target, count in targets.items() if count > 1] == []
