"""``etl chaos``: kill a job at every step of the protocol, on copies of its targets, and compare."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click

from etl.cli.connecting import load_settings_for, open_store
from etl.cli.loading import load_jobs
from etl.cli.output import printable, write_line, write_out
from etl.errors import ConfigurationError
from etl.job import Job
from etl.settings import Settings, redact
from etl.testing.chaos import (
    MINUTES,
    OCCURRENCES,
    ChaosOptions,
    ChaosPlan,
    ChaosStoppedError,
    JobLoader,
    StopRequest,
    crash_test,
)


@click.command()
@click.argument("job", metavar="JOB")
@click.option("--rows", type=click.IntRange(min=1), metavar="N", help="Read the first N rows of each source at most.")
@click.option(
    "--occurrences",
    type=click.IntRange(min=1),
    default=OCCURRENCES,
    show_default=True,
    metavar="N",
    help="Kill at N occurrences of each step at most: the first ones and the last one.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=MINUTES,
    show_default=True,
    metavar="M",
    help="End after M minutes; what there was no time for counts as not ok.",
)
@click.option("--step", "steps", multiple=True, metavar="STEP", help="Kill at this step only; may be repeated.")
@click.option("--show-data", is_flag=True, help="Show an example row with each difference.")
@click.option("--json", "as_json", is_flag=True, help="Print one object on stdout.")
@click.option("--quiet", is_flag=True, help="Say nothing about how far it is.")
@click.pass_context
def chaos(
    context: click.Context,
    job: str,
    rows: int | None,
    occurrences: int,
    minutes: float,
    steps: tuple[str, ...],
    show_data: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Kill JOB at every step of the protocol, run it again, and compare its targets with undisturbed runs.

    The job runs on the same servers under other names, into copies of its targets that are removed
    afterwards; its own targets and positions are not touched. Its functions run many times: what they do
    beside returning rows (mails, calls) is done each time.

    Exit code 0: every target is exact after every kill; 1: it is not, or not everything could be tried.
    """
    options = ChaosOptions(rows, occurrences, minutes, show_data, steps)
    with open_plan(load_settings_for([job]), job, Path.cwd()) as plan, _listening() as stop:
        gc.enable()  # unlike most commands, this one takes minutes
        name = plan.job.name
        try:
            report = crash_test(plan, options, _silent if quiet else lambda line: write_line(f"{name}: {line}"), stop)
        except ChaosStoppedError:
            context.exit(128 + stop.signum)
    write_out(redact(report.to_json()) if as_json else "\n".join(printable(redact(line)) for line in report.lines()))
    context.exit(report.exit_code)


@contextmanager
def open_plan(settings: Settings, reference: str, cwd: Path) -> Iterator[ChaosPlan]:
    """What to test when a reference is given: the job that it names, and the databases of its project.

    Args:
        settings: Where the databases are.
        reference: As on the command line.
        cwd: Against which a relative path is resolved.

    Raises:
        ConfigurationError: The job cannot be loaded, or a database is not fit.
        DatabaseUnreachableError: The store does not answer.
    """
    arguments = (reference, str(settings.project_dir), str(cwd))
    job = load_one_job(*arguments)
    names = dict.fromkeys(node.sink.database for node in job.graph().sinks if node.sink.database is not None)
    urls = {name: settings.database_url(name) for name in names}
    with open_store(settings) as store:
        yield ChaosPlan(job, JobLoader(__name__, load_one_job.__name__, arguments), store.url, urls)


def load_one_job(reference: str, project_dir: str, cwd: str) -> Job:
    """The one job that a reference names; also called in the processes of the runs.

    Raises:
        ConfigurationError: There is none, or more than one.
    """
    found = load_jobs(reference, Path(project_dir), Path(cwd))
    if len(found) > 1:
        names = ", ".join(each.reference for each in found)
        raise ConfigurationError(f"{reference} declares {len(found)} jobs; name one of {names}")
    return found[0].job


def _silent(_line: str) -> None:
    """Say nothing."""


class _Stop(StopRequest):
    """Set by the first signal.

    Attributes:
        signum: Which one that was.
    """

    signum: int = 0

    def handle(self, signum: int, _frame: FrameType | None) -> None:
        """Nothing is raised here: it could come up anywhere, even where Python throws exceptions away."""
        if self.is_set():
            os._exit(128 + signum)  # the next crash test removes what is left
        self.signum = signum
        self.set()
        name = signal.Signals(signum).name
        # Not through a buffered stream: the signal may have come in the middle of a write to it.
        os.write(2, f"{name}: removing what the crash test has made; once more ends at once\n".encode())


@contextmanager
def _listening() -> Iterator[_Stop]:
    """SIGINT and SIGTERM stop the crash test in the block; a second one ends the process at once."""
    stop = _Stop()
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    caught = [signum for signum, handler in before.items() if handler is not signal.SIG_IGN]
    for signum in caught:
        signal.signal(signum, stop.handle)
    try:
        yield stop
    finally:
        for signum in caught:
            signal.signal(signum, before[signum])
