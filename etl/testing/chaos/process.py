"""A run in a process of its own: what it is told, what it does, what it says."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etl.errors import EtlError, InternalError
from etl.runtime.loader import JobLoader
from etl.runtime.run import IfRunning, RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.telemetry import Event, Telemetry
from etl.sink import Scratch
from etl.store.database import Database
from etl.testing.chaos.rehearsal import Rehearsal
from etl.testing.chaos.sample import Sample


@dataclass(frozen=True, slots=True)
class Kill:
    """Where a run is killed.

    Attributes:
        step: Name of the event.
        uid: The source or sink whose event it is, None for those of the engine.
        occurrence: At which of these events, from 1.
    """

    step: str
    uid: str | None
    occurrence: int

    def __str__(self) -> str:
        whose = f" of {self.uid}" if self.uid is not None else ""
        return f"{self.step}{whose}, occurrence {self.occurrence}"


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run of a job at a scratch place.

    Attributes:
        loader: Where the job comes from.
        job_name: Its name in the store.
        schema: The place's schema.
        directory: The place's directory.
        store_url: The store.
        database_urls: The databases that sinks name.
        sample: How much of each source it reads, None for all.
        checkpoint_rows: Rows of a source after which to take a checkpoint, None as the job says.
        kill: Where it is killed, None to let it run.
    """

    loader: JobLoader
    job_name: str
    schema: str
    directory: str
    store_url: str
    database_urls: Mapping[str, str]
    sample: Sample | None = None
    checkpoint_rows: int | None = None
    kill: Kill | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """An event and how often it came."""

    name: str
    uid: str | None
    count: int


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What came of a run.

    Attributes:
        killed: It came to its step; then nothing else is known.
        exit_code: As the command line would exit.
        error_class: Name of the error's class, empty when it ended well.
        error: Its message.
        rows_read: From the summary.
        rows_written: From the summary.
        checkpoint: From the summary.
        steps: What it emitted, in the order of the first occurrences.
    """

    killed: bool = False
    exit_code: int = 0
    error_class: str = ""
    error: str = ""
    rows_read: int = 0
    rows_written: Mapping[str, int] = field(default_factory=dict)
    checkpoint: int = 0
    steps: tuple[Step, ...] = ()


class Recorder:
    """Listens to every step, and kills the process at one of them.

    Args:
        kill: At which, None for none.
        last_words: Called right before.
    """

    def __init__(self, kill: Kill | None, last_words: Callable[[], None]) -> None:
        self._kill = kill
        self._last_words = last_words
        self._lock = threading.Lock()
        self._seen: Counter[tuple[str, str | None]] = Counter()

    def __call__(self, event: Event) -> None:
        """Note the step; it may be the last one."""
        uid = event.fields.get("uid")
        with self._lock:
            self._seen[event.name, uid] += 1
            if self._kill == Kill(event.name, uid, self._seen[event.name, uid]):
                self._last_words()
                os.kill(os.getpid(), signal.SIGKILL)

    @property
    def steps(self) -> tuple[Step, ...]:
        """What was seen."""
        return tuple(Step(name, uid, count) for (name, uid), count in self._seen.items())


def run(request: RunRequest, last_words: Callable[[], None]) -> RunOutcome:
    """Run the job as the command line would, at its scratch place."""
    recorder = Recorder(request.kill, last_words)
    telemetry = Telemetry()
    telemetry.subscribe(recorder)
    # The server may take a moment to notice that the process before was killed.
    options = RunOptions(if_running=IfRunning.WAIT)
    store = Database(request.store_url, "store")
    databases = {name: Database(url, name) for name, url in request.database_urls.items()}
    try:
        scratch = Scratch(request.schema, Path(request.directory))
        job = Rehearsal(request.loader.load(), request.job_name, scratch, request.sample, request.checkpoint_rows)
        summary = run_job(job, store, databases, options, telemetry, StopSignal())
    except Exception as error:  # noqa: BLE001 - becomes the outcome
        return _failed(error)
    if summary.cause is not None:
        return _failed(summary.cause)
    return RunOutcome(
        exit_code=summary.exit_code,
        rows_read=summary.rows_read,
        rows_written=summary.rows_written,
        checkpoint=summary.checkpoint,
        steps=recorder.steps,
    )


def _failed(error: Exception) -> RunOutcome:
    known = error if isinstance(error, EtlError) else InternalError(f"{type(error).__name__}: {error}")
    return RunOutcome(exit_code=known.exit_code, error_class=type(known).__name__, error=str(known))
