"""``etl list``."""

from __future__ import annotations

import json

from tests.cli.conftest import Project


def test_list_shows_jobs_with_sources_and_sinks(project: Project) -> None:
    project.job("numbers", job=', schedule="*/5 * * * *"')

    done = project.etl("list")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "JOB      MODULE        SCHEDULE     SOURCES  SINKS",
        "numbers  jobs.numbers  */5 * * * *  numbers  table",
    ]


def test_list_shows_a_broken_module_beside_the_others(project: Project) -> None:
    project.job("numbers")
    project.write("jobs/broken.py", "import os\nnothing\n")

    done = project.etl("list")

    assert done.returncode == 2
    assert done.stdout.splitlines()[1].startswith("numbers  jobs.numbers")
    assert done.stderr == "etl: error: jobs.broken: jobs/broken.py:2: NameError: name 'nothing' is not defined\n"


def test_list_shows_an_invalid_job_with_its_findings(project: Project) -> None:
    project.write("jobs/empty.py", 'from etl import Job\njob = Job("empty")\n')

    done = project.etl("list", "--json")

    (entry,) = json.loads(done.stdout)
    assert done.returncode == 2
    assert (entry["job"], entry["module"]) == ("empty", "jobs.empty")
    assert "it reads nothing" in entry["error"]


def test_list_names_jobs_that_share_a_name(project: Project) -> None:
    project.job("numbers")
    project.write("jobs/copy_of.py", (project.dir / "jobs/numbers.py").read_text())

    done = project.etl("list")

    assert done.returncode == 2
    assert done.stderr == (
        'etl: error: jobs.numbers: the name "numbers" is taken by jobs.copy_of;'
        " both would share positions, rename one\n"
    )


def test_list_leaves_out_jobs_that_a_module_only_imports(project: Project) -> None:
    project.job("numbers")
    project.write("jobs/user.py", "from jobs.numbers import job\n")

    done = project.etl("list", "--json")

    assert [entry["module"] for entry in json.loads(done.stdout)] == ["jobs.numbers"]


def test_list_takes_a_directory_or_a_file(project: Project) -> None:
    project.job("numbers")
    project.write("jobs/team/other.py", (project.dir / "jobs/numbers.py").read_text().replace("'numbers'", "'other'"))

    def listed(path: str) -> list[str]:
        return [entry["job"] for entry in json.loads(project.etl("list", path, "--json").stdout)]

    assert listed("jobs/team") == ["other"]
    assert listed("jobs/numbers.py") == ["numbers"]
    assert listed(".") == ["numbers", "other"]


def test_list_without_jobs_says_how_to_begin(project: Project) -> None:
    done = project.etl("list")

    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"no jobs in {project.dir / 'jobs'}; start with: etl init\n"
