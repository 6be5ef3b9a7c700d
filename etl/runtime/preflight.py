"""Everything that can be found wrong before any work starts is found here, all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from etl.errors import ConfigurationError, Finding
from etl.graph import JobGraph, SinkNode
from etl.job import Job
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
    for node in graph.sinks:
        findings += node.sink.preflight(contexts[node.uid])
    if findings:
        raise ConfigurationError.from_findings(f'job "{job.name}" cannot start', findings)
    for node in graph.sinks:
        node.sink.prepare_target(contexts[node.uid])


def _require_databases(graph: JobGraph, databases: Mapping[str, Database]) -> None:
    findings = [
        Finding(
            f"sink {node.uid}",
            f'database "{node.sink.database}" is not configured',
            f"set ETL_DATABASE_URL_{node.sink.database.upper()} or [databases.{node.sink.database}] in etl.toml",
        )
        for node in graph.sinks
        if node.sink.database is not None and node.sink.database not in databases
    ]
    if findings:
        raise ConfigurationError.from_findings("databases", findings)


def _databases_used(graph: JobGraph, store: Database, databases: Mapping[str, Database]) -> Sequence[Database]:
    named = sorted({node.sink.database for node in graph.sinks if node.sink.database is not None})
    return [store, *(databases[name] for name in named)]


def _context(job: Job, node: SinkNode, store: Database, databases: Mapping[str, Database]) -> PreflightContext:
    database = store if node.sink.database is None else databases[node.sink.database]

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
