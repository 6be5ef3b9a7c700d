"""From what a user types (``jobs.revenue``, ``jobs/revenue.py``, ``jobs.revenue:job``) to the jobs it means.

Job modules are the user's own code and run when they are imported; they are refused when anybody on the machine could
have written them, and whatever goes wrong in them is told as one line with the place in *their* code.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import stat
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from etl.errors import ConfigurationError
from etl.job import Job, find_jobs

JOBS_DIR = "jobs"


@dataclass(frozen=True, slots=True)
class JobReference:
    """What the user typed, taken apart.

    Attributes:
        text: As typed.
        file: The module's file, when a path was given.
        module: Dotted name, when a module was given.
        variable: Name of the variable that holds the job, None for all jobs of the module.
    """

    text: str
    file: Path | None
    module: str | None
    variable: str | None

    @classmethod
    def parse(cls, text: str, cwd: Path) -> JobReference:
        """Take ``module``, ``module:variable``, ``path.py`` or ``path.py:variable`` apart.

        Raises:
            ConfigurationError: It is neither a file nor a module name; says what was meant, if that can be guessed.
        """
        target, variable = _split_variable(text)
        if target.endswith(".py") or os.sep in target or "/" in target:
            return cls(text, _existing_file(target, cwd), None, variable)
        if not all(part.isidentifier() for part in target.split(".")):
            raise ConfigurationError(f'"{text}" is neither a module (jobs.revenue) nor a file (jobs/revenue.py)')
        return cls(text, None, target, variable)


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """A job and where it was declared.

    Attributes:
        job: The declaration.
        reference: What leads to it on a command line: ``jobs.revenue`` or a path, with ``:variable`` where needed.
    """

    job: Job
    reference: str


def load_jobs(text: str, project_dir: Path, cwd: Path, *, jobless: bool = False) -> list[LoadedJob]:
    """Import what the user named and return its jobs, in the order of their declaration.

    Args:
        text: ``jobs.revenue``, ``jobs/revenue.py``, either with ``:variable``.
        project_dir: Importable during the import; becomes the jobs' ``base_dir``.
        cwd: Against which a relative path is resolved.
        jobless: A module without a job is no error: it holds what other modules share.

    Raises:
        ConfigurationError: Nothing of that name, no job in it, or the module fails; names file and line.
    """
    reference = JobReference.parse(text, cwd)
    module, name = _import(reference, project_dir)
    jobs = _select(module, reference)
    if not jobs and not jobless:
        raise ConfigurationError(f'"{text}" declares no job; assign one: job = Job("name")')
    for job in jobs:
        job.base_dir = project_dir
    return [LoadedJob(job, _reference_to(module, name, job, len(jobs))) for job in jobs]


def load_named_job(reference: str, project_dir: str, name: str) -> Job:
    """The job of this name; also called in the worker processes of its run.

    Args:
        reference: See :class:`LoadedJob`.
        project_dir: See :func:`load_jobs`.
        name: Of the job.

    Raises:
        ConfigurationError: There is none; else as :func:`load_jobs`.
    """
    for loaded in load_jobs(reference, Path(project_dir), Path(project_dir)):
        if loaded.job.name == name:
            return loaded.job
    raise ConfigurationError(f'"{reference}" declares no job named "{name}" any more')


def load_module_jobs(module: Path, project_dir: Path) -> list[LoadedJob]:
    """The jobs that a file of the project declares itself; none when it only holds what others share.

    Raises:
        ConfigurationError: The module fails; names file and line.
    """
    others = {path.resolve() for path in project_modules(project_dir)} - {module.resolve()}
    loaded = load_jobs(str(module), project_dir, project_dir, jobless=True)
    return [each for each in loaded if each.job.module_file.resolve() not in others]


def shared_names(loaded: Sequence[LoadedJob]) -> dict[str, str]:
    """What is wrong with jobs whose name an earlier one has already, by their reference."""
    first: dict[str, str] = {}
    problems: dict[str, str] = {}
    for each in loaded:
        owner = first.setdefault(each.job.name, each.reference)
        if owner != each.reference:
            problems[each.reference] = (
                f'the name "{each.job.name}" is taken by {owner}; both would share positions, rename one'
            )
    return problems


def project_modules(project_dir: Path) -> list[Path]:
    """The Python files of the project's ``jobs`` directory, ordered by path; private ones are left out."""
    directory = project_dir / JOBS_DIR
    return sorted(
        path
        for path in directory.rglob("*.py")
        if not any(part.startswith(("_", ".")) for part in path.relative_to(directory).parts)
    )


def _split_variable(text: str) -> tuple[str, str | None]:
    head, colon, tail = text.rpartition(":")
    # A colon that is part of a path (C:\jobs\revenue.py) is not followed by a name.
    return (head, tail) if colon and tail.isidentifier() else (text, None)


def _existing_file(target: str, cwd: Path) -> Path:
    path = (cwd / target).resolve()
    if path.is_file() and path.suffix == ".py":
        return path
    if path.is_dir():
        raise ConfigurationError(f'"{target}" is a directory; name a job file in it, or see: etl list')
    meant = path.with_suffix(".py")
    hint = f'; did you mean "{Path(target).with_suffix(".py")}"?' if meant.is_file() else ""
    if path.is_file():
        raise ConfigurationError(f'"{target}" is not a Python file')
    raise ConfigurationError(f'no such file: "{target}"{hint}')


def _import(reference: JobReference, project_dir: Path) -> tuple[ModuleType, str]:
    """The module, and the name under which a command line finds it again."""
    if reference.file is None:
        assert reference.module is not None
        return _import_module(reference.module, project_dir), reference.module
    name = _module_name(reference.file, project_dir)
    if name is not None:
        return _import_module(name, project_dir), name
    return _import_file(reference.file, project_dir), str(reference.file)


def _module_name(file: Path, project_dir: Path) -> str | None:
    """The dotted name of a file inside the project: a job is one module, however it was named."""
    try:
        parts = file.relative_to(project_dir.resolve()).with_suffix("").parts
    except ValueError:
        return None
    return ".".join(parts) if all(part.isidentifier() for part in parts) else None


def _import_module(name: str, project_dir: Path) -> ModuleType:
    for file in _files_of(name, project_dir):
        _refuse_if_world_writable(file)
    _declare_packages(name, project_dir)
    with _importable(project_dir), _user_code(project_dir, name):
        module = importlib.import_module(name)
    _refuse_foreign(module, name, project_dir)
    return module


def _import_file(file: Path, project_dir: Path) -> ModuleType:
    """Import a file that belongs to no package; nothing else becomes importable by it."""
    _refuse_if_world_writable(file)
    name = f"etl_job_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _user_code(project_dir, name, file):
            spec.loader.exec_module(module)
    except ConfigurationError:
        del sys.modules[name]
        raise
    return module


def _declare_packages(name: str, project_dir: Path) -> None:
    """Make the project's directories without ``__init__.py`` packages of this process.

    Left to the import system they would be namespace packages: any regular package of that name anywhere on the path
    would win over them, and they would be empty as soon as the project has left the path again.
    """
    parts = name.split(".")[:-1]
    for depth in range(1, len(parts) + 1):
        package = ".".join(parts[:depth])
        directory = project_dir.joinpath(*parts[:depth])
        if package in sys.modules or (directory / "__init__.py").exists() or not directory.is_dir():
            continue
        module = ModuleType(package)
        module.__path__ = [str(directory)]
        sys.modules[package] = module


def _files_of(name: str, project_dir: Path) -> list[Path]:
    """The project's files that importing a dotted name would run: packages first."""
    base = project_dir.joinpath(*name.split("."))
    packages = [parent / "__init__.py" for parent in (base, *base.parents) if project_dir in parent.parents]
    return [file for file in [*reversed(packages), base.with_suffix(".py")] if file.is_file()]


def _refuse_if_world_writable(file: Path) -> None:
    # Windows has no such bit: every file seems to be writable by all.
    if os.name == "posix" and file.stat().st_mode & stat.S_IWOTH:
        raise ConfigurationError(
            f"{file} can be written by everybody on this machine and is not run; chmod o-w '{file}'"
        )


def _refuse_foreign(module: ModuleType, name: str, project_dir: Path) -> None:
    """An installed module of the same name must not be run in place of the project's own."""
    own = [file for file in _files_of(name, project_dir) if file.stem == name.rpartition(".")[2]]
    actual = getattr(module, "__file__", None)
    if own and (actual is None or not Path(actual).samefile(own[-1])):
        raise ConfigurationError(
            f"{name} was imported from {actual}, not from {own[-1]};"
            " add __init__.py to the project's package or rename it"
        )


@contextmanager
def _importable(project_dir: Path) -> Iterator[None]:
    """The project's modules can be imported in the block, before any other of the same name."""
    entry = str(project_dir)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(entry)


@contextmanager
def _user_code(project_dir: Path, name: str, file: Path | None = None) -> Iterator[None]:
    """Whatever the user's module raises in the block becomes one line that names the place in their code."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and _is_module_itself(error, name):
            raise ConfigurationError(_not_found(name, project_dir)) from error
        place = _place(error, project_dir, file)
        if isinstance(error, ConfigurationError):
            raise ConfigurationError(f"{place}: {error}", error.findings) from error
        raise ConfigurationError(f"{place}: {_what(error)}") from error


def _is_module_itself(error: ModuleNotFoundError, name: str) -> bool:
    return error.name is not None and (error.name == name or name.startswith(f"{error.name}."))


def _not_found(name: str, project_dir: Path) -> str:
    known = [".".join(path.relative_to(project_dir).with_suffix("").parts) for path in project_modules(project_dir)]
    close = difflib.get_close_matches(name, known, n=1) or [full for full in known if full.rpartition(".")[2] == name]
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"no module {name} in the project {project_dir}{hint}"


def _what(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    if isinstance(error, SystemExit):
        return f"the module ends the program (sys.exit({error.code!r})) when it is imported"
    return " ".join(f"{type(error).__name__}: {error}".split("\n"))


def _place(error: BaseException, project_dir: Path, file: Path | None) -> str:
    """``jobs/revenue.py:12``: the innermost line of the user's own code that led to the error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_relative(Path(error.filename), project_dir)}:{error.lineno}"
    own = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(Path(frame.filename), project_dir, file)
    ]
    if not own:
        return str(file or project_dir)
    return f"{_relative(Path(own[-1].filename), project_dir)}:{own[-1].lineno}"


def _is_own(path: Path, project_dir: Path, file: Path | None) -> bool:
    if path == file:
        return True
    # A virtual environment may lie inside the project; what is installed there is not the user's code.
    return path.is_relative_to(project_dir) and "site-packages" not in path.parts


def _relative(path: Path, project_dir: Path) -> Path:
    return path.relative_to(project_dir) if path.is_relative_to(project_dir) else path


def _select(module: ModuleType, reference: JobReference) -> Sequence[Job]:
    if reference.variable is None:
        return list(find_jobs(module))
    value = getattr(module, reference.variable, None)
    if isinstance(value, Job):
        return [value]
    names = ", ".join(variable for variable, held in vars(module).items() if isinstance(held, Job)) or "none"
    raise ConfigurationError(f'"{reference.text}": {reference.variable} is not a job; variables with jobs: {names}')


def _reference_to(module: ModuleType, name: str, job: Job, jobs_count: int) -> str:
    if jobs_count == 1 and len(list(find_jobs(module))) == 1:
        return name
    variable = next((variable for variable, held in vars(module).items() if held is job), None)
    return f"{name}:{variable}" if variable else name
