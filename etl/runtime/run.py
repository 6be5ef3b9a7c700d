"""A run, from preflight to summary: what the command line calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version

import psycopg

from etl.clock import Clock, SystemClock
from etl.errors import AlreadyRunningError, EtlError, FencedError, StopTimeoutError, storable
from etl.job import Job
from etl.runtime import preflight
from etl.runtime.classification import classify
from etl.runtime.environment import RunEnvironment
from etl.runtime.loader import JobLoader
from etl.runtime.monitor import RunMonitor
from etl.runtime.plan import plan_of
from etl.runtime.rewinding import StartFrom, find_start
from etl.runtime.stop import StopSignal
from etl.runtime.summary import RunSummary
from etl.runtime.supervisor import Supervisor
from etl.runtime.telemetry import Telemetry
from etl.runtime.workers.outline import digests_of
from etl.store import lease as leases
from etl.store import runs
from etl.store.database import Database, StoreConnection
from etl.store.lease import Lease
from etl.store.runs import RunTotals
from etl.store.savepoints import Cut
from etl.store.tables import RunStatus
from etl.store.watchdog import Watchdog

SETTLE_PATIENCE_S = 10.0
"""How long a run that ended well waits for a database that has gone meanwhile, to record its end there."""

_EXIT_BY_SIGNAL = {2: 130}
"""SIGINT is somebody's wish to interrupt; SIGTERM after a final checkpoint is a run that ended well."""


class IfRunning(StrEnum):
    """What to do when another run owns the job."""

    FAIL = "fail"
    SKIP = "skip"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run.

    Attributes:
        follow: Go on for new data instead of ending when everything is read.
        drain: Close what is still open in event time when everything is read.
        owner_timeout_s: Overrides the job's.
        if_running: What to do when another run owns the job.
        start: An earlier checkpoint to start from; None for the last one.
        monitor: Where live figures are kept.
        clock: Time; tests turn it.
        warn: Tells the user something that does not stop the run; one line.
        workers: How many processes run the Python functions of the job; 0 for threads of this one.
        loader: How they come by the job; needed where there are any.
    """

    follow: bool = False
    drain: bool = False
    owner_timeout_s: float | None = None
    if_running: IfRunning = IfRunning.FAIL
    start: StartFrom | None = None
    monitor: RunMonitor = field(default_factory=RunMonitor)
    clock: Clock = field(default_factory=SystemClock)
    warn: Callable[[str], None] = field(default=lambda _message: None)
    workers: int = 0
    loader: JobLoader | None = None


def run_job(
    job: Job,
    store: Database,
    databases: Mapping[str, Database],
    options: RunOptions,
    telemetry: Telemetry,
    stop: StopSignal,
) -> RunSummary:
    """Run a job to its end and say truthfully what came of it.

    Args:
        job: The declaration.
        store: The store database; its schema must be current.
        databases: Named target databases.
        options: How to run.
        telemetry: Gets every step.
        stop: The user's request to stop.

    Returns:
        The summary of a run that had begun, whatever its end: look at ``exit_code``.

    Raises:
        ConfigurationError: The job did not start; nothing was touched.
        AlreadyRunningError: Another run owns the job.
        FencedError: Another run has taken the job over before this one had begun.
        DatabaseUnreachableError: The database did not answer at the start.
    """
    started_s = options.clock.monotonic_s()
    try:
        graph = job.graph()
        owner_timeout_s = options.owner_timeout_s or job.owner_timeout_s
        unit_time_s = job.checkpoint.interval_s + job.checkpoint.timeout_s
        if options.workers and not plan_of(graph, job.parallelism, options.workers).workers:
            options.warn("it calls no Python functions and keeps no state: there is nothing for workers to do")
        # Others give up on a run that is silent for so long, and the run itself on a server that is.
        with Watchdog(owner_timeout_s) as watchdog:
            environment = RunEnvironment(
                job=job,
                graph=graph,
                store=store.for_run(unit_time_s, watchdog),
                databases={name: database.for_run(unit_time_s, watchdog) for name, database in databases.items()},
                follow=options.follow,
                drain=options.drain,
                owner_timeout_s=owner_timeout_s,
                clock=options.clock,
                telemetry=telemetry,
                monitor=options.monitor,
                stop=stop,
                warn=options.warn,
                workers=options.workers,
                loader=options.loader,
                files=digests_of(job) if options.workers else {},
            )
            return _run(environment, options, started_s)
    except psycopg.Error as error:
        raise classify(error) from error


def _run(environment: RunEnvironment, options: RunOptions, started_s: float) -> RunSummary:
    preflight.check(
        environment.job, environment.graph, environment.store, environment.databases, follow=environment.follow
    )
    session, lease = _claim(environment, options.if_running)
    start = _find_start(environment, session, lease, options.start)
    supervisor = Supervisor(environment, session, lease, _version(), start)
    error: EtlError | None = None
    try:
        supervisor.run()
    except EtlError as raised:
        error = raised
    if not isinstance(error, FencedError | StopTimeoutError):
        supervisor.settle(SETTLE_PATIENCE_S if error is None else 0.0)
    options.monitor.state_changed("ended", restarts=supervisor.restarts)
    summary = _summarise(environment, supervisor, error, started_s)
    _close_run(supervisor, summary, environment.telemetry)
    return summary


def _claim(environment: RunEnvironment, if_running: IfRunning) -> tuple[StoreConnection, Lease]:
    emit = environment.telemetry.emit
    told = False
    while True:
        session = environment.store.open("etl:register")
        try:
            job_id = leases.register_job(session, environment.job.name)
            session.rename(f"etl:{job_id}:claim")
            leases.require_session(session, environment.store)
            emit("lease.claiming")
            lease = leases.claim(
                session,
                job_id,
                environment.job.name,
                environment.owner_timeout_s,
                environment.clock,
                environment.stop.event,
            )
            session.rename(leases.application_name(job_id, lease.epoch, "owner"))
        except AlreadyRunningError as error:
            session.close()
            if if_running is IfRunning.WAIT and not told:
                environment.warn(f"waiting for its turn: {error}")
                told = True
            if if_running is not IfRunning.WAIT or environment.clock.wait(environment.stop.event, 1.0):
                raise
        except BaseException:
            session.close()
            raise
        else:
            emit("lease.claimed", epoch=lease.epoch)
            return session, lease


def _find_start(
    environment: RunEnvironment, session: StoreConnection, lease: Lease, start: StartFrom | None
) -> Cut | None:
    if start is None:
        return None
    try:
        return find_start(session, lease, environment, start)
    except BaseException:
        with suppress(psycopg.OperationalError):
            leases.release(session.driver, lease)
        session.close()
        raise


def _summarise(
    environment: RunEnvironment, supervisor: Supervisor, error: EtlError | None, started_s: float
) -> RunSummary:
    return RunSummary(
        job=environment.job.name,
        status=_status(environment.stop, error),
        rows_read=supervisor.totals.rows_read,
        rows_written={node.uid: supervisor.totals.rows_written.get(node.uid, 0) for node in environment.graph.sinks},
        checkpoint=max(
            supervisor.lease.checkpoint_id, supervisor.checkpoint_id, environment.monitor.snapshot().checkpoint
        ),
        restarts=supervisor.restarts,
        duration_s=environment.clock.monotonic_s() - started_s,
        exit_code=_exit_code(environment.stop, error),
        error=None if error is None else storable(str(error)),
        cause=error,
    )


def _status(stop: StopSignal, error: EtlError | None) -> RunStatus:
    if isinstance(error, FencedError):
        return RunStatus.FENCED
    if error is not None:
        return RunStatus.FAILED
    return RunStatus.STOPPED if stop.requested or stop.with_savepoint else RunStatus.SUCCEEDED


def _exit_code(stop: StopSignal, error: EtlError | None) -> int:
    if isinstance(error, StopTimeoutError):
        return 128 + (stop.signum or 15)
    if error is not None:
        return error.exit_code
    return _EXIT_BY_SIGNAL.get(stop.signum or 0, 0)


def _close_run(supervisor: Supervisor, summary: RunSummary, telemetry: Telemetry) -> None:
    """Record the end. A database that is gone cannot be told; the next run will find this one dead."""
    session, run_id = supervisor.session, supervisor.run_id
    if session is None or run_id is None or summary.status is RunStatus.FENCED:
        supervisor.drop_session()
        return
    telemetry.emit("run.ending", status=str(summary.status))
    with suppress(psycopg.OperationalError):
        runs.finish(
            session,
            run_id,
            summary.status,
            exit_code=summary.exit_code,
            error=summary.error,
            totals=RunTotals(summary.rows_read, dict(summary.rows_written)),
            checkpoint_id=summary.checkpoint,
            restarts=summary.restarts,
        )
        leases.release(session.driver, supervisor.lease)
    supervisor.drop_session()
    telemetry.emit("run.ended", status=str(summary.status))


def _version() -> str:
    try:
        return version("exactly-once-etl")
    except PackageNotFoundError:
        return "unknown"
