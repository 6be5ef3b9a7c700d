"""Pytest plugin: the crash test of a job as a fixture.

::

    def test_revenue_survives_crashes(etl_chaos):
        etl_chaos("jobs.revenue").assert_exact()

It finds jobs and databases as the command line does. Nothing of the framework is imported until a test asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from etl.testing.chaos import ChaosReport


class CrashTest(Protocol):
    """What the fixture is."""

    def __call__(
        self,
        job: str,
        *,
        rows: int | None = None,
        occurrences: int = 3,
        minutes: float = 10.0,
        steps: Sequence[str] = (),
        show_data: bool = False,
    ) -> ChaosReport:
        """Crash-test a job.

        Args:
            job: ``jobs.revenue`` or ``jobs/revenue.py``, with ``:variable`` where there are several.
            rows: Read so many rows of each source at most.
            occurrences: Kill at so many occurrences of each step at most: the first ones and the last one.
            minutes: End after this time; what there was no time for counts as not ok.
            steps: Kill at these steps only; by default at all.
            show_data: Show an example row with each difference.

        Returns:
            What came of it; see its ``assert_exact``.

        Raises:
            ConfigurationError: The job cannot be loaded or tested; nothing was run.
        """


@pytest.fixture
def etl_chaos(request: pytest.FixtureRequest) -> CrashTest:
    """``etl_chaos("jobs.revenue").assert_exact()``: kill a job at every step, on scratch copies, and compare."""
    from etl.cli.chaos import open_plan
    from etl.cli.connecting import load_settings
    from etl.settings import FILE_NAME
    from etl.testing import chaos

    # The project that the test belongs to; without an etl.toml above it, what pytest takes for the root.
    settings = load_settings(request.path.parent)
    if not (settings.project_dir / FILE_NAME).is_file():
        settings = load_settings(request.config.rootpath)

    def crash_test(
        job: str,
        *,
        rows: int | None = None,
        occurrences: int = chaos.OCCURRENCES,
        minutes: float = chaos.MINUTES,
        steps: Sequence[str] = (),
        show_data: bool = False,
    ) -> ChaosReport:
        options = chaos.ChaosOptions(rows, occurrences, minutes, show_data, tuple(steps))
        with open_plan(settings, job, settings.project_dir) as plan:
            return chaos.crash_test(plan, options, print)

    return crash_test
