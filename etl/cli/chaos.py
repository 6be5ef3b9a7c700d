"""``etl chaos``: kill a job at every step of the protocol, on copies of its targets, and compare."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
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
from etl.testing.chaos import MINUTES, OCCURRENCES, ChaosOptions, ChaosPlan, ChaosReport, JobLoader, crash_test


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
    gc.enable()  # unlike most commands, this one takes minutes
    options = ChaosOptions(rows, occurrences, minutes, show_data)
    tell = _silent if quiet else write_line
    with _interruptible() as listen_again:
        report = crash_test_job(load_settings_for([job]), job, options, tell, Path.cwd(), loaded=listen_again)
    write_out(redact(report.to_json()) if as_json else "\n".join(printable(redact(line)) for line in report.lines()))
    context.exit(report.exit_code)


def crash_test_job(
    settings: Settings,
    reference: str,
    options: ChaosOptions,
    tell: Callable[[str], None],
    cwd: Path,
    *,
    loaded: Callable[[], None] = lambda: None,
) -> ChaosReport:
    """Crash-test the job that a reference names, with the databases of a project.

    Args:
        settings: Where the databases are.
        reference: As on the command line.
        options: How to test.
        tell: Gets a line now and then.
        cwd: Against which a relative path is resolved.
        loaded: Called when the user's module was imported.

    Raises:
        ConfigurationError: The job cannot be loaded or tested; nothing was run.
        EtlError: An undisturbed run did not end well.
    """
    job = load_one_job(reference, str(settings.project_dir), str(cwd))
    graph = job.graph()
    loaded()
    names = dict.fromkeys(node.sink.database for node in graph.sinks if node.sink.database is not None)
    urls = {name: settings.database_url(name) for name in names}
    loader = JobLoader(__name__, load_one_job.__name__, (reference, str(settings.project_dir), str(cwd)))
    with open_store(settings) as store:
        return crash_test(ChaosPlan(job, loader, store.url, urls), options, lambda line: tell(f"{job.name}: {line}"))


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


@contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """SIGINT and SIGTERM raise in the block, so that what was made is removed; a second one ends the process at once.

    Yields:
        A function that puts the handlers back in front: polars puts one of its own there when it is imported.
    """
    received: list[int] = []

    def handle(signum: int, _frame: FrameType | None) -> None:
        if received:
            os._exit(128 + signum)  # the next crash test removes what is left
        received.append(signum)
        name = signal.Signals(signum).name
        # Not through a buffered stream: the signal may have come in the middle of a write to it.
        os.write(2, f"{name}: removing what the crash test has made; once more ends at once\n".encode())
        raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)

    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    caught = [signum for signum, handler in before.items() if handler is not signal.SIG_IGN]

    def listen() -> None:
        for signum in caught:
            signal.signal(signum, handle)

    listen()
    try:
        yield listen
    finally:
        for signum in caught:
            signal.signal(signum, before[signum])
