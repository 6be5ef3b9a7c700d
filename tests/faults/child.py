"""The body of a run's process: one run of one job, with faults attached to the engine's telemetry."""

from __future__ import annotations

import os
import signal
import socket
import threading
import traceback
from collections import Counter
from dataclasses import replace
from typing import NoReturn

import msgspec
import psycopg

from etl.clock import SystemClock
from etl.errors import EtlError
from etl.runtime.loader import JobLoader
from etl.runtime.rewinding import StartFrom
from etl.runtime.run import RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.telemetry import Event, Telemetry
from etl.store.database import Database
from tests.faults import mutations
from tests.faults.fault import Action, Fault, RunRequest, RunResult, Step
from tests.faults.jobs import declare, declare_anew

GO_ON = b"go on"


class InjectedError(Exception):
    """Stands for any defect of user code."""


class Recorder:
    """Listens to every step, and does what was asked for at some of them.

    Args:
        request: What was asked for.
        channel: To the test, for faults that the test carries out.
    """

    def __init__(self, request: RunRequest, channel: socket.socket) -> None:
        self.steps: list[Step] = []
        self._request = request
        self._channel = channel
        self._lock = threading.Lock()
        self._seen: Counter[tuple[str, str | None]] = Counter()
        self._workers: dict[int, int] = {}

    def __call__(self, event: Event) -> None:
        """Note the step, then do to the run what is due."""
        if event.name == "worker.started":
            self._workers[event.fields["worker"]] = event.fields["pid"]
        for fault in self._note(Step(event.name, event.fields.get("uid"), threading.current_thread().name)):
            self._carry_out(fault)

    def _note(self, step: Step) -> list[Fault]:
        with self._lock:
            self.steps.append(step)
            for uid in {None, step.uid}:
                self._seen[step.name, uid] += 1
            return [fault for fault in self._request.faults if self._is_due(fault, step)]

    def _is_due(self, fault: Fault, step: Step) -> bool:
        same = fault.step == step.name and fault.uid in (None, step.uid)
        return same and self._seen[step.name, fault.uid] == fault.occurrence

    def _carry_out(self, fault: Fault) -> None:
        match fault.action:
            case Action.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.KILL_WORKER:
                os.kill(self._victim(fault), signal.SIGKILL)
            case Action.STOP_WORKER:
                os.kill(self._victim(fault), signal.SIGSTOP)
            case Action.STOP:
                # To this very thread, so that it does not take another step before the process stands still.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case Action.RAISE:
                raise InjectedError(str(fault))
            case Action.EXHAUST:
                raise MemoryError(str(fault))
            case Action.TERM:
                os.kill(os.getpid(), signal.SIGTERM)
            case Action.CUT:
                self._cut_sessions()
            case Action.ASK:
                self._channel.send(fault.step.encode())
                assert self._channel.recv(64) == GO_ON

    def _victim(self, fault: Fault) -> int:
        """Another worker for each occurrence, so that each of them is hit."""
        return self._workers[1 + fault.occurrence % len(self._workers)]

    def _cut_sessions(self) -> None:
        with psycopg.connect(self._request.store_url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE starts_with(application_name, 'etl:') AND datname = ANY(%s)",
                [[_database_of(self._request.store_url), _database_of(self._request.other_url)]],
            )


class HeartlessClock(SystemClock):
    """Time as it is, but for the thread that moves the heartbeat: it waits until it is stopped."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait for an event."""
        return event.wait(None if threading.current_thread().name == "lease" else timeout_s)


def _database_of(url: str) -> str:
    return str(psycopg.conninfo.conninfo_to_dict(url)["dbname"])


def run(request: RunRequest, channel: socket.socket) -> RunResult:
    """Run the job as the command line would."""
    if request.mutant is not None:
        mutations.apply(request.mutant)
    warnings: list[str] = []
    recorder = Recorder(request, channel)
    telemetry = Telemetry()
    telemetry.subscribe(recorder)
    options = RunOptions(
        warn=warnings.append,
        clock=SystemClock() if request.heartbeat else HeartlessClock(),
        start=None if request.start is None else StartFrom(request.start, keep_written=True),
        workers=request.workers,
        loader=JobLoader(declare_anew.__module__, declare_anew.__name__, (msgspec.json.encode(request).decode(),)),
    )
    store = Database(request.store_url, "store")
    other = Database(request.other_url, "other")
    try:
        summary = run_job(declare(request), store, {"other": other}, options, telemetry, _stop_signal(request))
    except EtlError as error:
        result = RunResult(error.exit_code, *_told(error))
    else:
        result = RunResult(
            summary.exit_code,
            *_told(summary.cause),
            summary.rows_read,
            summary.rows_written,
            summary.checkpoint,
            summary.restarts,
        )
    return replace(result, steps=tuple(recorder.steps), warnings=tuple(warnings))


def _stop_signal(request: RunRequest) -> StopSignal:
    """Told of SIGTERM by a thread of its own: a handler would interrupt the thread that runs the job, locks and all."""
    stop = StopSignal()
    if any(fault.action is Action.TERM for fault in request.faults):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=lambda: stop.request(signal.sigwait({signal.SIGTERM})), daemon=True).start()
    return stop


def _told(error: EtlError | None) -> tuple[str, str]:
    if error is None:
        return "", ""
    return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))


def live(request: RunRequest, channel: socket.socket) -> NoReturn:
    """The whole life of a forked process: run, tell the result, exit with its code."""
    exit_code = 99
    try:
        result = run(request, channel)
        channel.send(msgspec.json.encode(result))
        exit_code = result.exit_code
    except BaseException:  # noqa: BLE001 - told on stderr; the test sees that nothing was said
        traceback.print_exc()
    finally:
        # Never back into the zygote's loop, and no clean-up of what was inherited from it.
        os._exit(exit_code)
