"""``etl run``: loads jobs, opens databases, listens to signals, runs, and tells what came of it."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

import click

from etl.cli.connecting import Store, load_settings_for, open_store, target_databases
from etl.cli.loading import LoadedJob, load_jobs, load_named_job
from etl.cli.main import Invocation
from etl.cli.output import OutputClosedError, OutputFailedError, exit_code_of, report, write_line, write_out
from etl.cli.progress import Reporter, choose_reporter, summary_line
from etl.errors import AlreadyRunningError, ConfigurationError, EtlError, InternalError
from etl.job import Job
from etl.runtime.loader import JobLoader
from etl.runtime.monitor import RunMonitor
from etl.runtime.rewinding import StartFrom
from etl.runtime.run import IfRunning, RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.telemetry import Event, Telemetry
from etl.settings import Settings
from etl.store.database import Database

STOP_LIMIT_S = 9.5
"""A process that was asked to stop ends within this time, whatever hangs."""

WORKERS_MAX = 128
"""There are as many key groups, and no subtask has less than one."""

LISTEN_INTERVAL_S = 0.2
"""A signal is noticed within this time, even one that another library has taken."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one job.

    Attributes:
        job: Its name, or what was typed when it could not be loaded.
        exit_code: As documented; 0 when everything read is visible.
        status: As in the summary; of a run that never began ``failed``, ``already-running`` or ``skipped``.
        summary: The summary object as a line of JSON, None when the run never began.
    """

    job: str
    exit_code: int
    status: str = "failed"
    summary: str | None = None

    def to_json(self) -> str:
        """The summary object, with exactly the documented keys, on one line."""
        if self.summary is not None:
            return self.summary
        counts = {
            "rows_read": 0,
            "rows_written": {},
            "rows_rejected": 0,
            "checkpoint": 0,
            "restarts": 0,
            "duration_s": 0.0,
        }
        return json.dumps({"job": self.job, "status": self.status, **counts}, ensure_ascii=False)


class Outcomes:
    """Collects outcomes in the order of the command line, and prints each as soon as it is known."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._lock = threading.Lock()
        self._by_index: dict[int, Outcome] = {}
        self._unprinted: Exception | None = None

    def add(self, index: int, outcome: Outcome) -> None:
        """Note an outcome, in the thread of its run; a summary that cannot be printed does not stop the others."""
        with self._lock:
            self._by_index[index] = outcome
            if self._as_json and self._unprinted is None:
                try:
                    write_out(outcome.to_json())
                except (OutputClosedError, OutputFailedError) as error:
                    self._unprinted = error

    def add_missing(self, index: int, outcome: Outcome) -> None:
        """Note an outcome unless there is one."""
        with self._lock:
            known = index in self._by_index
        if not known:
            self.add(index, outcome)

    def exit_code(self, asked: int, received: int | None) -> int:
        """The process's exit code: the first failure's in the order of the command line, else what a signal calls for.

        Args:
            asked: How many jobs were to be run.
            received: The signal that came.
        """
        ordered = [self._by_index[index] for index in sorted(self._by_index)]
        failed = next((outcome.exit_code for outcome in ordered if outcome.exit_code != 0), 0)
        if failed:
            return failed
        if self._unprinted is not None:
            write_line(f"etl: error: the summary could not be printed, the jobs are done: {self._unprinted}")
            return exit_code_of(self._unprinted)
        if received is None:
            # A job without an outcome ended in a way nobody foresaw: that is never success.
            return 0 if len(ordered) == asked else InternalError.exit_code
        all_ran = len(ordered) == asked
        return 128 + received if received == signal.SIGINT or not all_ran else 0


class Signals:
    """SIGINT and SIGTERM: the first asks every run for a final checkpoint, the second ends the process at once.

    Attributes:
        received: The first signal that came.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._stops: list[StopSignal] = []

    def stop_of_run(self) -> StopSignal:
        """The request to stop of one run, already made when a signal has come before."""
        stop = StopSignal()
        self._stops.append(stop)
        # Looked at after the registration: a signal between the two is then told twice, never lost.
        if self.received is not None:
            stop.request(self.received)
        return stop

    def handle(self, signum: int, _frame: FrameType | None) -> None:
        """Runs in the main thread, between two instructions of whatever it does."""
        if self.received is not None:
            # Nothing is lost by it: the next run settles what this one left, as after a kill -9.
            os._exit(128 + signum)
        self.received = signum
        name = signal.Signals(signum).name
        # Not through a buffered stream: the signal may have come in the middle of a write to it.
        os.write(2, f"{name}: stopping after a final checkpoint; once more stops at once\n".encode())
        signal.setitimer(signal.ITIMER_REAL, STOP_LIMIT_S)
        for stop in self._stops:
            stop.request(signum)

    def give_up(self, _signum: int, _frame: FrameType | None) -> None:
        """Something hangs, a lock in the database perhaps: end as the second signal would."""
        os.write(2, f"not stopped within {STOP_LIMIT_S:g} s: ending at once; the next run settles the rest\n".encode())
        os._exit(128 + (self.received or signal.SIGTERM))


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs jobs against one store and reports each as it ends.

    Attributes:
        settings: Where the databases are.
        options: As asked for on the command line.
        signals: Who asks for the end.
        reporter: Who tells people.
        outcomes: Where results are collected.
        debug: Whether errors come with their traceback.
    """

    settings: Settings
    options: RunOptions
    signals: Signals
    reporter: Reporter
    outcomes: Outcomes
    debug: bool

    def run_all(self, jobs: Mapping[int, LoadedJob]) -> None:
        """Run all jobs, each given with its place on the command line."""
        try:
            with open_store(self.settings) as store:
                if self.options.follow:
                    self._in_threads([partial(self._run_one, store, index, loaded) for index, loaded in jobs.items()])
                else:
                    self._in_threads([partial(self._run_in_turn, store, jobs)])
        except EtlError as error:
            # Opening the store failed, and with it every job; or giving it back did, when all had their outcomes.
            code = report(error, debug=self.debug)
            for index, loaded in jobs.items():
                self.outcomes.add_missing(index, Outcome(loaded.job.name, code))

    def _in_threads(self, functions: Sequence[Callable[[], None]]) -> None:
        """Runs never run in the main thread: a signal handler must not meet a lock that its own thread holds."""
        threads = [threading.Thread(target=function, name=f"etl-run-{n}") for n, function in enumerate(functions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                # A run may be the first to import polars: its handler makes the wait for a thread sleep on after a
                # signal, so the wait is short, and our handlers are put back.
                thread.join(LISTEN_INTERVAL_S)
                listen_again(self.signals)

    def _run_in_turn(self, store: Store, jobs: Mapping[int, LoadedJob]) -> None:
        """One after the other; all are tried, whatever becomes of the others, until a signal comes."""
        for index, loaded in jobs.items():
            if self.signals.received is None:
                self._run_one(store, index, loaded)
            else:
                write_line(f"{loaded.job.name}: not started")

    def _run_one(self, store: Store, index: int, loaded: LoadedJob) -> None:
        """Run one job; what goes wrong becomes its outcome."""
        try:
            outcome = self._attempt(store, loaded)
        except Exception as error:  # noqa: BLE001 - becomes the outcome of this job; the others go on
            outcome = self._outcome_of(loaded.job, error)
        self.outcomes.add(index, outcome)

    def _attempt(self, store: Store, loaded: LoadedJob) -> Outcome:
        job, monitor = loaded.job, RunMonitor()
        telemetry = Telemetry()
        telemetry.subscribe(lambda event: self._repair(store, event))
        arguments = (loaded.reference, str(self.settings.project_dir), job.name)
        options = replace(
            self.options,
            monitor=monitor,
            warn=lambda text: self.reporter.say(f"{job.name}: {text}"),
            loader=JobLoader(load_named_job.__module__, load_named_job.__name__, arguments),
        )
        databases = self._targets_of(job)
        self.reporter.started(job.name, monitor)
        try:
            summary = run_job(job, store.database, databases, options, telemetry, self.signals.stop_of_run())
        finally:
            self.reporter.ended(job.name)
        self.reporter.say(summary_line(summary))
        if summary.cause is not None:
            report(summary.cause, debug=self.debug, subject=job.name)
        return Outcome(job.name, summary.exit_code, str(summary.status), summary.to_json())

    def _repair(self, store: Store, event: Event) -> None:
        """Before an attempt is repeated, have the embedded server running: its death may be the reason."""
        if event.name != "attempt.restarting":
            return
        try:
            store.repair()
        except EtlError as error:
            # The attempt will find out for itself, and be repeated or given up as the job's policy says.
            self.reporter.say(f"embedded server: {error}")

    def _targets_of(self, job: Job) -> Mapping[str, Database]:
        names = [node.sink.database for node in job.graph().sinks if node.sink.database is not None]
        return target_databases(self.settings, names)

    def _outcome_of(self, job: Job, error: Exception) -> Outcome:
        if isinstance(error, AlreadyRunningError) and self.options.if_running is IfRunning.SKIP:
            self.reporter.say(f"{job.name}: skipped: {error}")
            return Outcome(job.name, 0, "skipped")
        status = "already-running" if isinstance(error, AlreadyRunningError) else "failed"
        return Outcome(job.name, report(error, debug=self.debug, subject=job.name), status)


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@click.option("--follow", is_flag=True, help="Go on for new data until stopped.")
@click.option("--drain", is_flag=True, help="Close what is still open in event time when everything is read.")
@click.option(
    "--from",
    "start",
    metavar="NAME",
    help="Go back to a savepoint, or to the number of a kept checkpoint, of the one job that is given.",
)
@click.option("--keep-written", is_flag=True, help="With --from: rows written since then stay, and are written again.")
@click.option("--json", "as_json", is_flag=True, help="Print one summary object a job on stdout, one a line.")
@click.option("--quiet", is_flag=True, help="Say nothing unless something fails.")
@click.option(
    "--if-running",
    type=click.Choice(["skip", "wait", "fail"]),
    default="fail",
    show_default=True,
    help="When another run owns the job: exit 0 at once, wait for its end, or exit 75.",
)
@click.option(
    "--owner-timeout",
    "owner_timeout_s",
    type=click.FloatRange(min=0.1, max=86_400),
    metavar="SECONDS",
    help="Replace a run whose heartbeat stands still for so long; by default what the job says.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=0, max=WORKERS_MAX),
    default=0,
    show_default=True,
    metavar="N",
    help="Run Python functions and keyed state in N processes of their own; 0 for threads of one process.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def run(
    context: click.Context,
    jobs: tuple[str, ...],
    follow: bool,
    drain: bool,
    start: str | None,
    keep_written: bool,
    as_json: bool,
    quiet: bool,
    if_running: str,
    owner_timeout_s: float | None,
    workers: int,
    debug: bool,
) -> None:
    """Run jobs: read what is there, make it visible, exit.

    JOB is a module (jobs.revenue) or a file (jobs/revenue.py); with :variable one of several jobs in it.
    Several jobs run one after the other, with --follow all at once; each is tried, and the exit code
    is that of the first failure.
    """
    if drain and follow:
        raise click.UsageError("--drain closes what is open when everything is read, and --follow never is done")
    if keep_written and start is None:
        raise click.UsageError("--keep-written says what --from NAME does with rows written since then")
    invocation = context.find_object(Invocation) or Invocation()
    invocation.debug = invocation.debug or debug
    outcomes = Outcomes(as_json=as_json)
    signals = Signals()
    with listening(signals):
        settings = load_settings_for(jobs)
        loaded, asked = _load(jobs, settings, outcomes, debug=invocation.debug)
        if start is not None and asked != 1:
            raise click.UsageError("--from goes back with one job; name it, with :variable where a module has several")
        _collect_garbage()
        listen_again(signals)
        if loaded:
            with choose_reporter(quiet=quiet, follow=follow) as reporter:
                options = RunOptions(
                    follow=follow,
                    drain=drain,
                    owner_timeout_s=owner_timeout_s,
                    if_running=IfRunning(if_running),
                    workers=workers,
                    start=None if start is None else StartFrom(start, keep_written=keep_written),
                )
                Runner(settings, options, signals, reporter, outcomes, invocation.debug).run_all(loaded)
    context.exit(outcomes.exit_code(asked, signals.received))


@contextmanager
def listening(signals: Signals) -> Iterator[None]:
    """SIGINT and SIGTERM go to ``signals`` in the block; a signal that the parent had ignored (nohup) stays ignored."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    caught = [signum for signum, handler in before.items() if handler is not signal.SIG_IGN]
    for signum in caught:
        signal.signal(signum, signals.handle)
    alarm_before = signal.signal(signal.SIGALRM, signals.give_up)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm_before)
        for signum in caught:
            signal.signal(signum, before[signum])


def listen_again(signals: Signals) -> None:
    """Put the handlers back in front, after the imports of jobs.

    Polars puts one of its own before whatever handles SIGINT when it is imported, and keeps signals to itself while it
    computes: a request to stop would be lost.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) == signals.handle:
            signal.signal(signum, signals.handle)


def _collect_garbage() -> None:
    """From here on, after the imports of commands and jobs; what they made is not looked at again."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _load(
    references: Sequence[str], settings: Settings, outcomes: Outcomes, *, debug: bool
) -> tuple[dict[int, LoadedJob], int]:
    """Jobs by their place on the command line, and how many there are with those that could not be loaded."""
    jobs: dict[int, LoadedJob] = {}
    index = 0
    for reference in references:
        try:
            for loaded in load_jobs(reference, settings.project_dir, Path.cwd()):
                _refuse_shared_name(loaded, jobs)
                jobs[index] = loaded
                index += 1
        except ConfigurationError as error:
            outcomes.add(index, Outcome(reference, report(error, debug=debug)))
            index += 1
    return jobs, index


def _refuse_shared_name(loaded: LoadedJob, jobs: Mapping[int, LoadedJob]) -> None:
    if any(other.job.name == loaded.job.name for other in jobs.values()):
        raise ConfigurationError(
            f'{loaded.reference}: a job named "{loaded.job.name}" was given before; each job once, under its own name'
        )
