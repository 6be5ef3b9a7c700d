"""``etl list``: the jobs of the project. A module that cannot be imported hides none of the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import click

from etl.cli.connecting import load_settings
from etl.cli.loading import JOBS_DIR, LoadedJob, load_jobs, project_modules
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
    entries = [entry for module in _modules(settings, path) for entry in entries_of(module, settings.project_dir)]
    if as_json:
        write_json([asdict(entry) for entry in entries], indent=2)
    else:
        _print(entries, settings)
    if any(entry.error for entry in entries):
        context.exit(ConfigurationError.exit_code)


def entries_of(module: Path, project_dir: Path) -> list[JobEntry]:
    """The jobs of one file, or the one entry that says why there are none. A helper module has no entries."""
    try:
        return [_entry(loaded) for loaded in load_jobs(str(module), project_dir, project_dir, jobless=True)]
    except ConfigurationError as error:
        name = ".".join(module.relative_to(project_dir).with_suffix("").parts)
        return [JobEntry(None, name, error="; ".join(line.strip() for line in error_lines(error)))]


def _entry(loaded: LoadedJob) -> JobEntry:
    job = loaded.job
    schedule = str(job.schedule) if job.schedule else None
    try:
        graph = job.graph()
    except ConfigurationError as error:
        return JobEntry(
            job.name, loaded.reference, schedule, error="; ".join(line.strip() for line in error_lines(error))
        )
    sources = tuple(node.uid for node in graph.sources)
    return JobEntry(job.name, loaded.reference, schedule, sources, tuple(node.uid for node in graph.sinks))


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
