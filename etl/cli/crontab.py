"""``etl crontab``: lines for ``crontab -e``, with absolute paths, because cron knows no other, and no secrets."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from etl.cli.connecting import load_settings_for
from etl.cli.loading import LoadedJob, load_jobs, load_module_jobs, project_modules, shared_names
from etl.cli.output import write_line, write_out
from etl.errors import ConfigurationError, Finding
from etl.schedule import schedule_problem

_HEADER = """\
# Jobs of {project}. Paste into "crontab -e"; printed by: etl crontab
# Cron starts with an almost empty environment. Unless etl.toml names the database or the embedded server is used, set
# ETL_DATABASE_URL in a file that only you can read and load it in front of the command. No password belongs in here.
# Output appears only when a run fails; cron mails it to MAILTO."""


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...")
@click.option(
    "--if-running",
    type=click.Choice(["skip", "wait", "fail"]),
    default="skip",
    show_default=True,
    help="What a run does when the one before is still at work.",
)
def crontab(jobs: tuple[str, ...], if_running: str) -> None:
    """Print crontab lines for the jobs that have a schedule; by default all jobs of the project.

    Nothing is printed unless every job could be loaded, so that no line is ever missing unseen.
    """
    settings = load_settings_for(jobs)
    loaded = _load(jobs, settings.project_dir)
    scheduled = [job for job in loaded if job.job.schedule]
    for job in loaded:
        if not job.job.schedule and jobs:
            raise ConfigurationError(
                f'job {job.job.name} has no schedule; declare one: Job("{job.job.name}", schedule="*/5 * * * *")'
            )
    if not scheduled:
        write_line('no job has a schedule; declare one: Job("name", schedule="*/5 * * * *")')
        return
    lines = [
        crontab_line(str(job.job.schedule), job.reference, settings.project_dir, etl_command(), if_running)
        for job in scheduled
    ]
    write_out("\n".join([_HEADER.format(project=_single_line(str(settings.project_dir))), *lines]))


def crontab_line(schedule: str, reference: str, project_dir: Path, command: Sequence[str], if_running: str) -> str:
    """One line of a crontab.

    Args:
        schedule: Five fields.
        reference: What ``etl run`` is given.
        project_dir: Where the command runs.
        command: The words that start ``etl``.
        if_running: Overlap policy.

    Raises:
        ConfigurationError: The schedule is none, or a path cannot stand in a crontab.
    """
    problem = schedule_problem(schedule)
    if problem is not None:
        raise ConfigurationError(f"{reference}: {problem}")
    words = [*command, "run", "--quiet", "--if-running", if_running, reference]
    shell = f"cd {shlex.quote(str(project_dir))} && {shlex.join(words)}"
    # Cron turns an unescaped % into the end of the command, also inside quotes.
    return f"{' '.join(schedule.split())} {_single_line(shell)}".replace("%", "\\%")


def etl_command() -> list[str]:
    """The words that start this very installation from anywhere."""
    script = Path(sys.executable).parent / "etl"
    return [str(script)] if script.is_file() else [sys.executable, "-m", "etl.cli"]


def _load(references: Sequence[str], project_dir: Path) -> list[LoadedJob]:
    findings: list[Finding] = []
    loaded: list[LoadedJob] = []
    for text in references or [str(path) for path in project_modules(project_dir)]:
        try:
            if references:
                loaded += load_jobs(text, project_dir, Path.cwd())
            else:
                loaded += load_module_jobs(Path(text), project_dir)
        except ConfigurationError as error:
            findings.append(Finding(text, str(error), "repair the job first"))
    findings += [Finding(reference, problem, "then print again") for reference, problem in shared_names(loaded).items()]
    if findings:
        raise ConfigurationError.from_findings("no crontab was printed", findings)
    return loaded


def _single_line(text: str) -> str:
    if "\n" in text or "\r" in text:
        raise ConfigurationError(f"a line break cannot stand in a crontab: {text!r}")
    return text
