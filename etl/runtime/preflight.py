"""Everything that can be found wrong before any work starts is found here, all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from etl.clock import SystemClock
from etl.errors import ConfigurationError, Finding
from etl.graph import JobGraph, SinkNode
from etl.job import Job
from etl.lookup import LookupContext
from etl.sink import Connection, PreflightContext
from etl.source import SourceContext
from etl.store import migrations
from etl.store.database import Database


def check(job: Job, graph: JobGraph, store: Database, databases: Mapping[str, Database], *, follow: bool) -> None:
    """Check schema versions, sources and sinks, then create the targets that ask to be created.

    Raises:
        ConfigurationError: Lists every finding with its cure.
        DatabaseUnreachableError: A database does not answer.
    """
    _require_databases(graph, databases)
    for database in _databases_used(graph, store, databases):
        connection = database.connect(f"etl:preflight:{database.name}")
        try:
            migrations.require_current(connection, database.name)
        finally:
            connection.close()
    contexts = {node.uid: _context(job, node, store, databases) for node in graph.sinks}
    findings: list[Finding] = []
    for source in graph.sources:
        findings += source.source.preflight(SourceContext(source.uid, job.base_dir, follow))
    for one in graph.lookups:
        findings += one.lookup.preflight(_lookup_context(one.uid, _database(one.lookup.database, store, databases)))
    for node in graph.sinks:
        findings += node.sink.preflight(contexts[node.uid])
    if findings:
        raise ConfigurationError.from_findings(f'job "{job.name}" cannot start', findings)
    for node in graph.sinks:
        node.sink.prepare_target(contexts[node.uid])


def _require_databases(graph: JobGraph, databases: Mapping[str, Database]) -> None:
    named = [(f"sink {node.uid}", node.sink.database) for node in graph.sinks]
    named += [(f"lookup join {one.uid}", one.lookup.database) for one in graph.lookups]
    findings = [
        Finding(
            subject,
            f'database "{name}" is not configured',
            f"set ETL_DATABASE_URL_{name.upper()} or [databases.{name}] in etl.toml",
        )
        for subject, name in named
        if name is not None and name not in databases
    ]
    if findings:
        raise ConfigurationError.from_findings("databases", findings)


def _databases_used(graph: JobGraph, store: Database, databases: Mapping[str, Database]) -> Sequence[Database]:
    named = sorted({node.sink.database for node in graph.sinks if node.sink.database is not None})
    return [store, *(databases[name] for name in named)]


def _database(name: str | None, store: Database, databases: Mapping[str, Database]) -> Database:
    return store if name is None else databases[name]


def _lookup_context(uid: str, database: Database) -> LookupContext:
    def connect(role: str) -> Connection:
        return database.connect(f"etl:preflight:{role}")

    return LookupContext(uid, connect, SystemClock())


def _context(job: Job, node: SinkNode, store: Database, databases: Mapping[str, Database]) -> PreflightContext:
    database = _database(node.sink.database, store, databases)

    def connect(role: str) -> Connection:
        return database.connect(f"etl:preflight:{role}")

    return PreflightContext(
        uid=node.uid,
        schema=node.schema,
        connect=connect,
        target_is_store=database is store,
        base_dir=job.base_dir,
        unit_time_s=job.checkpoint.interval_s + job.checkpoint.timeout_s,
    )
