"""``etl list``: the jobs of the project. A module that cannot be imported hides none of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from etl.cli.connecting import load_settings
from etl.cli.loading import JOBS_DIR, LoadedJob, load_module_jobs, project_modules, shared_names
from etl.cli.output import error_lines, format_table, write_json, write_line, write_out
from etl.errors import ConfigurationError
from etl.settings import Settings


@dataclass(frozen=True, slots=True)
class JobEntry:
    """One job as ``etl list`` shows it.

    Attributes:
        job: Name.
        module: What ``etl run`` is given.
        schedule: As declared, None when the job has none.
        sources: Uids.
        sinks: Uids.
        error: Why the job or its module cannot be used, None when it can.
    """

    job: str | None
    module: str
    schedule: str | None = None
    sources: tuple[str, ...] = ()
    sinks: tuple[str, ...] = ()
    error: str | None = None


@click.command("list")
@click.argument("path", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.pass_context
def list_jobs(context: click.Context, path: Path | None, as_json: bool) -> None:
    """List the jobs in the project's directory jobs; PATH is a project, a directory in it or one file.

    The exit code is 2 when a module could not be imported.
    """
    settings = load_settings(_start(path))
    entries = entries_of(_modules(settings, path), settings.project_dir)
    if as_json:
        write_json([asdict(entry) for entry in entries], indent=2)
    else:
        _print(entries, settings)
    if any(entry.error for entry in entries):
        context.exit(ConfigurationError.exit_code)


def entries_of(modules: Sequence[Path], project_dir: Path) -> list[JobEntry]:
    """The jobs of some files, and an entry for each file that cannot be imported."""
    loaded: list[LoadedJob] = []
    failed: list[JobEntry] = []
    for module in modules:
        try:
            loaded += load_module_jobs(module, project_dir)
        except ConfigurationError as error:
            name = ".".join(module.relative_to(project_dir).with_suffix("").parts)
            failed.append(JobEntry(None, name, error=_joined(error)))
    problems = shared_names(loaded)
    return [*(_entry(each, problems.get(each.reference)) for each in loaded), *failed]


def _joined(error: ConfigurationError) -> str:
    return "; ".join(line.strip() for line in error_lines(error))


def _entry(loaded: LoadedJob, problem: str | None) -> JobEntry:
    job = loaded.job
    schedule = str(job.schedule) if job.schedule else None
    try:
        graph = job.graph()
    except ConfigurationError as error:
        return JobEntry(job.name, loaded.reference, schedule, error=_joined(error))
    sources = tuple(node.uid for node in graph.sources)
    return JobEntry(job.name, loaded.reference, schedule, sources, tuple(node.uid for node in graph.sinks), problem)


def _start(path: Path | None) -> Path:
    if path is None:
        return Path.cwd()
    return path.resolve() if path.is_dir() else path.resolve().parent


def _modules(settings: Settings, path: Path | None) -> list[Path]:
    """Files of the project's jobs directory that lie under ``path``."""
    modules = project_modules(settings.project_dir)
    if path is None or settings.project_dir.is_relative_to(path.resolve()):
        return modules
    return [module for module in modules if module.is_relative_to(path.resolve())]


def _print(entries: list[JobEntry], settings: Settings) -> None:
    if not entries:
        write_line(f"no jobs in {settings.project_dir / JOBS_DIR}; start with: etl init")
        return
    rows = [
        (entry.job, entry.module, entry.schedule, ", ".join(entry.sources) or None, ", ".join(entry.sinks) or None)
        for entry in entries
        if entry.error is None
    ]
    if rows:
        write_out(format_table(["JOB", "MODULE", "SCHEDULE", "SOURCES", "SINKS"], rows))
    for entry in entries:
        if entry.error is not None:
            write_line(f"etl: error: {entry.module}: {entry.error}")
