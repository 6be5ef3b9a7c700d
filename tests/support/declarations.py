"""Sources and sinks that are only declared, for tests that never run a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from etl.job import Job
from etl.schema import Schema
from etl.sink import Delivery, Sink, SinkContext
from etl.source import Source, SourceContext
from etl.stream import Stream

ORDERS = {"id": "int8", "status": "text", "amount": "numeric(12,2)", "token": "uuid"}


@dataclass(frozen=True)
class DeclaredSource(Source):
    columns: dict[str, str] = field(default_factory=lambda: dict(ORDERS))

    @property
    def schema(self) -> Schema:
        return Schema.declare(self.columns)

    def create_enumerator(self, context: SourceContext) -> NoReturn:
        raise AssertionError("a declaration is not run")

    def create_reader(self, context: SourceContext) -> NoReturn:
        raise AssertionError("a declaration is not run")


@dataclass(frozen=True)
class OneTimeSource(DeclaredSource):
    replayable = False


@dataclass(frozen=True)
class DeclaredSink(Sink):
    delivery = Delivery.TRANSACTIONAL
    target: str | None = None
    other_database: str | None = None

    @property
    def database(self) -> str | None:
        return self.other_database

    @property
    def exclusive_target(self) -> str | None:
        return self.target

    def create_writer(self, context: SinkContext) -> NoReturn:
        raise AssertionError("a declaration is not run")


class DirectSink(DeclaredSink):
    delivery = Delivery.DIRECT


class TwoPhaseSink(DeclaredSink):
    delivery = Delivery.TWO_PHASE


class IdempotentSink(DeclaredSink):
    delivery = Delivery.IDEMPOTENT


class VersionedSink(IdempotentSink):
    @property
    def monotone(self) -> bool:
        return True


def orders_job() -> tuple[Job, Stream]:
    """A job that reads orders."""
    job = Job("revenue")
    return job, job.read("orders", DeclaredSource())
