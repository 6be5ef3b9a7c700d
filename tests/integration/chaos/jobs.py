"""Jobs that crash tests load in processes of their own."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from etl.job import Job
from etl.policy import CheckpointPolicy
from sinks import PostgresTable, TwoPhaseCommitSink
from tests.support.scripted import Numbers


def numbers() -> Job:
    """Six numbers in three checkpoints."""
    return _job(Numbers(6))


def endless() -> Job:
    """Never comes to an end."""
    return _job(Numbers(6, before=lambda _id: _wait_for_ever()))


def waiting(flag: str) -> Job:
    """Never comes to an end as long as a file is there."""
    return _job(Numbers(6, before=lambda _id: _wait_for_ever() if Path(flag).exists() else None))


def failing() -> Job:
    """Ends its process, as a crash in native code would."""
    return _job(Numbers(6, before=lambda _id: _die()))


def _job(source: Numbers) -> Job:
    job = Job("numbers", checkpoint=CheckpointPolicy(rows=2))
    job.read("source", source).write("numbers", TwoPhaseCommitSink(PostgresTable("numbers", create=True)))
    return job


def _wait_for_ever() -> None:
    threading.Event().wait()


def _die() -> None:
    os._exit(3)
