"""``etl explain``: what a job does and what it promises, found without opening a file or a database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from etl.cli.connecting import STORE, load_settings_for
from etl.cli.loading import LoadedJob, load_jobs
from etl.cli.output import format_duration, format_table, printable, write_json, write_out
from etl.graph import JobGraph, Node, SinkNode, SourceNode, inputs_of
from etl.guarantee import classic_table, guarantees_of
from etl.job import Job
from etl.runtime.plan import chains_of
from etl.schema import Schema
from etl.settings import Settings

_TABLE_HEADERS = ("SOURCE", "SINK", "GUARANTEE", "BECAUSE")


@click.command()
@click.argument("job", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: one object, a list when JOB names several jobs.")
def explain(job: str, as_json: bool) -> None:
    """Show the graph of JOB with its columns, and what it guarantees at each sink and why. Needs no database."""
    settings = load_settings_for([job])
    loaded = load_jobs(job, settings.project_dir, Path.cwd())
    graphs = [(each, each.job.graph()) for each in loaded]
    if as_json:
        documents = [document(each, graph, settings) for each, graph in graphs]
        write_json(documents[0] if len(documents) == 1 else documents, indent=2)
        return
    for each, graph in graphs:
        write_out("\n".join(printable(line) for line in lines(each, graph, settings)) + "\n")
    write_out("What sources and sinks allow in general:\n")
    write_out(
        format_table(_TABLE_HEADERS, [(row.source, row.sink, row.guarantee, row.reason) for row in classic_table()])
    )


def lines(loaded: LoadedJob, graph: JobGraph, settings: Settings) -> Iterator[str]:
    """The explanation for people, line by line."""
    job = loaded.job
    yield f"Job {job.name} ({loaded.reference})"
    yield f"  {_policy(job)}"
    yield ""
    yield "Graph"
    yield from _tree(graph)
    yield from _states(graph, job)
    yield ""
    yield "Guarantees, from end to end"
    for sink, promise in zip(graph.sinks, guarantees_of(graph, job.mode), strict=True):
        yield f"  {sink.uid}: {promise.guarantee}; writes to {database_of(sink, settings)}"
        for reason in promise.reasons:
            yield f"    - {reason}"


def _states(graph: JobGraph, job: Job) -> Iterator[str]:
    if graph.operators:
        yield ""
        yield "State, stored with each checkpoint"
    for node in graph.operators:
        subtasks = node.transformation.parallelism or job.parallelism
        by = ", ".join(node.transformation.keys)
        yield f"  {node.uid}: by {by}, in {subtasks} subtask(s)"


def document(loaded: LoadedJob, graph: JobGraph, settings: Settings) -> dict[str, Any]:
    """The explanation for programs."""
    job = loaded.job
    databases = {sink.uid: database_of(sink, settings) for sink in graph.sinks}
    return {
        "job": job.name,
        "module": loaded.reference,
        "mode": str(job.mode),
        "schedule": job.schedule,
        "checkpoint": asdict(job.checkpoint),
        "nodes": [_node_document(node, _parallelism(graph, job)) for node in graph.nodes],
        "guarantees": [
            {
                "sink": promise.uid,
                "database": databases[promise.uid],
                "guarantee": str(promise.guarantee),
                "reasons": list(promise.reasons),
            }
            for promise in guarantees_of(graph, job.mode)
        ],
        "table": [{**asdict(row), "guarantee": str(row.guarantee)} for row in classic_table()],
    }


def database_of(sink: SinkNode, settings: Settings) -> str:
    """Which database a sink writes to: its name, and where that is, without any secret."""
    name = sink.sink.database
    if name is None:
        where = "embedded server" if settings.store_url is None else _safe_url(settings.store_url)
        return f"the {STORE} ({where})"
    url = settings.databases.get(name)
    return f"database {name} ({_safe_url(url) if url else 'not configured'})"


def _safe_url(url: str) -> str:
    # Imported here: a job on the embedded server is explained without the driver.
    from etl.store.database import Database

    return Database(url, STORE).safe_url


def _policy(job: Job) -> str:
    rows = f" or {job.checkpoint.rows:,} rows" if job.checkpoint.rows else ""
    schedule = f"; schedule {job.schedule}" if job.schedule else ""
    return f"mode {job.mode}; a checkpoint every {format_duration(job.checkpoint.interval_s)}{rows}{schedule}"


def _parallelism(graph: JobGraph, job: Job) -> dict[str, int]:
    """How many subtasks run each node that may have several."""
    chains = {node.id: chain.parallelism for chain in chains_of(graph, job.parallelism) for node in chain.nodes}
    return {**chains, **{source.id: source.parallelism for source in graph.sources}}


def _node_document(node: Node, parallelism: Mapping[str, int]) -> dict[str, Any]:
    return {
        "id": node.id,
        "kind": _kind(node),
        "description": _description(node),
        "inputs": list(inputs_of(node)),
        "schema": {field.name: str(field.type) for field in node.schema},
        "declared_at": str(node.location),
        "parallelism": parallelism.get(node.id, 1),
    }


def _tree(graph: JobGraph) -> Iterator[str]:
    """Every source with what its rows go through; a node with several inputs is drawn below the last of them."""
    drawn_below = {node.id: inputs_of(node)[-1] for node in graph.nodes if inputs_of(node)}
    for source in graph.sources:
        yield from _branch(graph, source, drawn_below, first="  ", rest="  ", before=None)


def _branch(
    graph: JobGraph, node: Node, drawn_below: dict[str, str], *, first: str, rest: str, before: Schema | None
) -> Iterator[str]:
    consumers = graph.consumers(node.id)
    yield f"{first}{_title(node)}"
    if not isinstance(node, SinkNode):
        yield f"{rest}{'│ ' if consumers else '  '}    {_columns(node.schema, before)}"
    for consumer in consumers:
        is_last = consumer == consumers[-1]
        corner, line = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        if drawn_below[consumer] == node.id:
            child = graph.node(consumer)
            yield from _branch(graph, child, drawn_below, first=rest + corner, rest=rest + line, before=node.schema)
        else:
            yield f"{rest}{corner}to {consumer}, see below"


def _title(node: Node) -> str:
    kind = _kind(node)
    if isinstance(node, SourceNode | SinkNode):
        subtasks = f", in {node.parallelism} subtasks" if isinstance(node, SourceNode) and node.parallelism > 1 else ""
        return f"{kind} {node.uid}: {_description(node)}{subtasks}"
    return f"{node.id}: {_description(node)}"


def _kind(node: Node) -> str:
    if isinstance(node, SourceNode):
        return "source"
    return "sink" if isinstance(node, SinkNode) else node.transformation.kind


def _description(node: Node) -> str:
    if isinstance(node, SourceNode):
        return node.source.describe()
    return node.sink.describe() if isinstance(node, SinkNode) else node.transformation.describe()


def _columns(schema: Schema, before: Schema | None) -> str:
    if schema == before:
        return "the same columns"
    return ", ".join(f"{field.name} {field.type}" for field in schema)
