"""What users need to prove what is theirs: plays of jobs without a database, contract suites, a crash test for jobs.

The names below are loaded on first use: a crash test does not wait for polars.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etl.testing.harness.marks import advance, checkpoint, crash, drain, rescale, rows, wait
    from etl.testing.harness.player import play
    from etl.testing.harness.result import Result
    from etl.testing.harness.sameness import assert_same_result

__all__ = ["Result", "advance", "assert_same_result", "checkpoint", "crash", "drain", "play", "rescale", "rows", "wait"]

_HOMES = {"Result": "result", "assert_same_result": "sameness", "play": "player"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"etl.testing.harness.{_HOMES.get(name, 'marks')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
