"""``etl init``: a small project that runs at once, on the embedded server, without any configuration."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

import click

from etl.cli.output import write_out
from etl.errors import ConfigurationError, Finding

_RENAMED = {"gitignore": ".gitignore"}
"""A file named .gitignore among the templates would itself be obeyed by git and by the build."""


@click.command()
@click.argument("directory", default=".", type=click.Path(path_type=Path, file_okay=False))
def init(directory: Path) -> None:
    """Create a project in DIRECTORY (by default here): a job, its tests, data and configuration.

    Existing files are never overwritten.
    """
    target = directory.resolve()
    contents = dict(template_files())
    _refuse_existing(target, contents)
    for name, content in contents.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # "x": a file that appeared since the check is not overwritten either.
        with path.open("xb") as file:
            file.write(content)
    write_out(f"created {len(contents)} files in {target}")
    change = "" if target == Path.cwd().resolve() else f"cd {shlex.quote(str(directory))} && "
    write_out(f"next: {change}etl run jobs/first_job.py")


def template_files() -> Iterator[tuple[str, bytes]]:
    """Path in the new project and content of every file."""
    yield from _walk(files("etl.cli") / "templates", PurePosixPath())


def _walk(directory: Traversable, prefix: PurePosixPath) -> Iterator[tuple[str, bytes]]:
    for entry in sorted(directory.iterdir(), key=lambda each: each.name):
        path = prefix / _RENAMED.get(entry.name, entry.name)
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _walk(entry, path)
        elif entry.is_file():
            yield str(path), entry.read_bytes()


def _refuse_existing(target: Path, names: Iterable[str]) -> None:
    present = [name for name in names if (target / name).exists()]
    if present:
        findings = [
            Finding(str(target / name), "exists already", "nothing was written; choose an empty directory")
            for name in present
        ]
        raise ConfigurationError.from_findings("init", findings)
