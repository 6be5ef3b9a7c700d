"""Finding jobs by module, file and variable; mistakes of user code as single lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from etl.cli.loading import load_jobs, project_modules
from etl.errors import ConfigurationError

ONE_JOB = 'from etl import Job\njob = Job("orders")\n'
TWO_JOBS = 'from etl import Job\nfirst = Job("a")\nsecond = Job("b")\n'


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A project directory; modules of that name which other tests have imported are out of the way meanwhile."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_job_module(name)}
    (tmp_path / "jobs").mkdir()
    yield tmp_path
    for name in [name for name in sys.modules if _is_job_module(name)]:
        del sys.modules[name]
    sys.modules.update(hidden)


def _is_job_module(name: str) -> bool:
    return name.split(".")[0] == "jobs" or name.startswith("etl_job_")


def write(project: Path, name: str, text: str) -> Path:
    path = project / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o644)
    return path


@pytest.mark.parametrize("text", ["jobs.orders", "jobs/orders.py", "jobs.orders:job", "jobs/orders.py:job"])
def test_load_jobs_finds_the_same_job_by_every_name(project: Path, text: str) -> None:
    write(project, "jobs/__init__.py", "")
    write(project, "jobs/orders.py", ONE_JOB)

    (loaded,) = load_jobs(text, project, cwd=project)

    assert loaded.job.name == "orders"
    assert loaded.job.base_dir == project
    assert loaded.reference == "jobs.orders"


def test_load_jobs_works_without_init_file_beside_an_installed_package_of_that_name(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path_factory.mktemp("installed")
    write(installed, "jobs/__init__.py", "raise AssertionError")
    monkeypatch.syspath_prepend(installed)
    write(project, "jobs/orders.py", ONE_JOB)

    assert [loaded.reference for loaded in load_jobs("jobs.orders", project, cwd=project)] == ["jobs.orders"]


def test_functions_of_a_job_can_import_helpers_when_they_run(project: Path) -> None:
    write(project, "jobs/team/helper.py", "VALUE = 7\n")
    write(
        project,
        "jobs/team/orders.py",
        f"{ONE_JOB}def value():\n    from jobs.team.helper import VALUE\n    return VALUE\n",
    )

    load_jobs("jobs.team.orders", project, cwd=project)

    assert sys.modules["jobs.team.orders"].value() == 7


def test_load_jobs_returns_all_jobs_of_a_module_with_references_that_tell_them_apart(project: Path) -> None:
    write(project, "jobs/both.py", TWO_JOBS)

    loaded = load_jobs("jobs.both", project, cwd=project)

    assert [each.job.name for each in loaded] == ["a", "b"]
    assert [each.reference for each in loaded] == ["jobs.both:first", "jobs.both:second"]


def test_load_jobs_returns_one_of_several_jobs_by_variable(project: Path) -> None:
    write(project, "jobs/both.py", TWO_JOBS)

    (loaded,) = load_jobs("jobs.both:second", project, cwd=project)

    assert (loaded.job.name, loaded.reference) == ("b", "jobs.both:second")


def test_load_jobs_imports_helpers_of_the_project(project: Path) -> None:
    write(project, "jobs/__init__.py", "")
    write(project, "jobs/shared.py", 'NAME = "shared name"\n')
    write(project, "jobs/orders.py", "from etl import Job\nfrom jobs.shared import NAME\njob = Job(NAME)\n")

    (loaded,) = load_jobs("jobs/orders.py", project, cwd=project)

    assert loaded.job.name == "shared name"
    assert str(project) not in sys.path


def test_load_jobs_resolves_a_path_against_the_working_directory(project: Path) -> None:
    write(project, "jobs/orders.py", ONE_JOB)

    assert load_jobs("orders.py", project, cwd=project / "jobs")[0].reference == "jobs.orders"


def test_load_jobs_reads_a_file_outside_of_the_project(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = write(tmp_path_factory.mktemp("elsewhere"), "my-job.py", ONE_JOB)

    (loaded,) = load_jobs(str(file), project, cwd=project)

    assert (loaded.job.name, loaded.reference, loaded.job.base_dir) == ("orders", str(file), project)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jobs.nothing", "no module jobs.nothing in the project {project}"),
        ("jobs.order", "no module jobs.order in the project {project}; did you mean jobs.orders?"),
        ("orders", "no module orders in the project {project}; did you mean jobs.orders?"),
        ("jobs/orders", 'no such file: "jobs/orders"; did you mean "jobs/orders.py"?'),
        ("jobs/", '"jobs/" is a directory; name a job file in it, or see: etl list'),
        ("jobs/data.csv", '"jobs/data.csv" is not a Python file'),
        ("not-a-module", '"not-a-module" is neither a module (jobs.revenue) nor a file (jobs/revenue.py)'),
        ("jobs.orders:other", '"jobs.orders:other": other is not a job; variables with jobs: job'),
        ("jobs.empty", '"jobs.empty" declares no job; assign one: job = Job("name")'),
    ],
)
def test_load_jobs_says_what_is_wrong_with_the_name(project: Path, text: str, message: str) -> None:
    write(project, "jobs/__init__.py", "")
    write(project, "jobs/orders.py", ONE_JOB)
    write(project, "jobs/empty.py", "")
    write(project, "jobs/data.csv", "")

    with pytest.raises(ConfigurationError) as caught:
        load_jobs(text, project, cwd=project)

    assert str(caught.value) == message.format(project=project)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os\n1 / 0\n", "jobs/bad.py:2: ZeroDivisionError: division by zero"),
        ("import no_such_package\n", "jobs/bad.py:1: ModuleNotFoundError: No module named 'no_such_package'"),
        ("\n\nif True\n", "jobs/bad.py:3: SyntaxError: expected ':'"),
        ("import json\njson.loads('{')\n", "jobs/bad.py:2: JSONDecodeError: "),
        ("import sys\nsys.exit(3)\n", "jobs/bad.py:2: the module ends the program (sys.exit(3)) when it is imported"),
        ('raise ValueError("a\\nb")\n', "jobs/bad.py:1: ValueError: a b"),
    ],
)
def test_load_jobs_names_the_place_in_the_users_code(project: Path, code: str, message: str) -> None:
    write(project, "jobs/bad.py", code)

    with pytest.raises(ConfigurationError) as caught:
        load_jobs("jobs.bad", project, cwd=project)

    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_load_jobs_names_the_helper_in_which_the_error_is(project: Path) -> None:
    write(project, "jobs/__init__.py", "")
    write(project, "jobs/shared.py", "\nundefined\n")
    write(project, "jobs/orders.py", "import jobs.shared\n")

    with pytest.raises(ConfigurationError, match=r"^jobs/shared.py:2: NameError: name 'undefined' is not defined$"):
        load_jobs("jobs.orders", project, cwd=project)


def test_load_jobs_keeps_the_findings_of_a_wrong_declaration(project: Path) -> None:
    write(project, "jobs/orders.py", 'from etl.schema import Schema\nSchema.declare({"id": "int9"})\n')

    with pytest.raises(ConfigurationError) as caught:
        load_jobs("jobs.orders", project, cwd=project)

    assert str(caught.value).startswith("jobs/orders.py:2: schema: 1 problem(s)\n")
    assert [finding.subject for finding in caught.value.findings] == ['column "id"']


@pytest.mark.parametrize("name", ["jobs/orders.py", "jobs/__init__.py"])
def test_load_jobs_refuses_code_that_everybody_can_write(project: Path, name: str) -> None:
    write(project, "jobs/__init__.py", "")
    write(project, "jobs/orders.py", ONE_JOB)
    (project / name).chmod(0o646)

    with pytest.raises(ConfigurationError, match="can be written by everybody on this machine and is not run"):
        load_jobs("jobs.orders", project, cwd=project)

    assert "jobs.orders" not in sys.modules


def test_load_jobs_refuses_a_module_from_elsewhere_with_the_projects_name(project: Path) -> None:
    write(project, "json/decoder.py", ONE_JOB)

    with pytest.raises(ConfigurationError, match=r"json.decoder was imported from .*, not from .*/json/decoder.py"):
        load_jobs("json/decoder.py", project, cwd=project)


def test_project_modules_leaves_private_files_out(project: Path) -> None:
    for name in (
        "jobs/__init__.py",
        "jobs/b.py",
        "jobs/a.py",
        "jobs/_private.py",
        "jobs/team/c.py",
        "jobs/.hidden/d.py",
    ):
        write(project, name, "")

    names = [str(path.relative_to(project)) for path in project_modules(project)]

    assert names == ["jobs/a.py", "jobs/b.py", "jobs/team/c.py"]
