"""What all attempts of a run share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from etl.clock import Clock
from etl.graph import JobGraph
from etl.job import Job
from etl.runtime.loader import JobLoader
from etl.runtime.monitor import RunMonitor
from etl.runtime.stop import StopSignal
from etl.runtime.telemetry import Telemetry
from etl.store.database import Database


@dataclass(frozen=True, slots=True)
class RunEnvironment:
    """What all attempts of a run share.

    Attributes:
        job: The declaration.
        graph: Its validated graph.
        store: The store database.
        databases: Named target databases.
        follow: Whether sources go on for new data.
        drain: Whether what is still open in event time is closed when everything is read.
        owner_timeout_s: How long the heartbeat may stand still before another run takes over.
        clock: Time.
        telemetry: Where steps are announced.
        monitor: Live figures.
        stop: The user's request to stop.
        warn: Tells the user something that does not stop the run.
        workers: How many processes there may be besides this one.
        loader: How they come by the job.
        files: SHA-256 of each file of the project that the job was made from, by path; of no use without workers.
    """

    job: Job
    graph: JobGraph
    store: Database
    databases: Mapping[str, Database]
    follow: bool
    drain: bool
    owner_timeout_s: float
    clock: Clock
    telemetry: Telemetry
    monitor: RunMonitor
    stop: StopSignal
    warn: Callable[[str], None]
    workers: int = 0
    loader: JobLoader | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    def database_of(self, name: str | None) -> Database:
        """The database a sink writes to."""
        return self.store if name is None else self.databases[name]

    @property
    def unit_time_s(self) -> float:
        """How long a unit of work may stay open."""
        return self.job.checkpoint.interval_s + self.job.checkpoint.timeout_s
