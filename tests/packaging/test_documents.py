"""The documents say what the code does, where that can be compared."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from etl import errors
from etl.cli.main import cli
from etl.guarantee import Guarantee, classic_markdown
from etl.runtime.summary import RunSummary
from etl.store.tables import RunStatus
from tests.packaging.conftest import CHECKOUT

DOCUMENTS = sorted([*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").glob("*.md")])
SETUP = "python3 -m venv .venv && "


def text_of(name: str) -> str:
    return (CHECKOUT / name).read_text(encoding="utf-8")


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(group: click.Group, path: tuple[str, ...] = ("etl",)) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by what is typed."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def options_of(command: click.Command) -> set[str]:
    return {name for option in command.params if isinstance(option, click.Option) for name in option.opts}


def documented_options() -> dict[str, set[str]]:
    """Options in the tables of docs/cli.md by the heading above them."""
    sections = re.split(r"^## `(etl[^`]*)`$", text_of("docs/cli.md"), flags=re.MULTILINE)
    names, bodies = sections[1::2], sections[2::2]
    return {
        name: set(re.findall(r"^\| `(--[a-z-]+)", body.partition("\n## ")[0], flags=re.MULTILINE))
        for name, body in zip(names, bodies, strict=True)
    }


def test_cli_document_lists_every_command_and_option() -> None:
    expected = {name: options_of(command) for name, command in commands(cli)}

    assert documented_options() == {"etl": options_of(cli), **expected}


def test_cli_document_lists_every_exit_code_of_an_error() -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", text_of("docs/cli.md"), flags=re.MULTILINE)}
    raised = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")}

    # 0 is no error, and 130 is what a stop without a checkpoint means after Ctrl-C.
    assert documented == raised | {0, 130}


def test_cli_document_names_every_key_and_status_of_the_summary() -> None:
    text = text_of("docs/cli.md")

    keys = re.findall(r'"(\w+)": ', RunSummary("flights", RunStatus.SUCCEEDED).to_json())
    (example,) = code_blocks(text, "json")
    assert [key for key in re.findall(r'"(\w+)": ', example) if key not in ("flights", "late_arrivals")] == keys
    ends = set(RunStatus) - {RunStatus.RUNNING, RunStatus.CRASHED}
    assert [status for status in ends if f"`{status}`" not in text] == []


def test_guarantees_document_holds_the_table_that_the_code_derives() -> None:
    assert classic_markdown() in text_of("docs/guarantees.md")


def test_guarantees_document_explains_every_guarantee() -> None:
    rows = re.findall(r"^\| ([a-z -]+) \| [a-z]", text_of("docs/guarantees.md"), flags=re.MULTILINE)

    assert [str(guarantee) for guarantee in Guarantee if guarantee not in rows] == []


def test_readme_shows_the_example_job_as_it_is() -> None:
    assert code_blocks(text_of("README.md"), "python") == [text_of("jobs/flights.py")]


def test_readme_gives_two_commands_that_set_up_everything_in_one_line() -> None:
    first, second = [block for block in code_blocks(text_of("README.md"), "sh") if block.startswith(SETUP)]

    assert (first.count("\n"), second.count("\n")) == (1, 1)
    assert first.rstrip().endswith(" && .venv/bin/etl run jobs.flights")
    assert second.rstrip().endswith(" && .venv/bin/pytest -q -n 3")


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = text_of(".ci/run")
    pattern = re.search(r"sed -n 's/(.*)/\\1/p' README\.md", script)
    assert pattern is not None
    # sed's basic expressions escape the group's parentheses, Python's do not.
    expression = pattern[1].replace(r"\(", "(").replace(r"\)", ")").replace(r"\/", "/")

    found = re.findall(expression, text_of("README.md"), flags=re.MULTILINE)

    second = [block for block in code_blocks(text_of("README.md"), "sh") if block.startswith(SETUP)][1]
    assert [f"{line}\n" for line in found] == [second]
    assert script.rstrip().endswith('step bash -c "$test_command"')


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_of_documents_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))

    local = [link for link in links if not link.startswith("https://")]
    assert [link for link in local if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_in_documents_exist(document: Path) -> None:
    paths = re.findall(r"`((?:etl|sinks|jobs|migrations|docs|tests)/[\w/.-]*)`", document.read_text(encoding="utf-8"))

    assert [path for path in paths if not (CHECKOUT / path).exists()] == []


def emitted_events() -> set[str]:
    """Names of events in calls of ``emit``, wherever the engine and the sinks make them."""
    source = "".join(path.read_text() for top in ("etl", "sinks") for path in (CHECKOUT / top).rglob("*.py"))
    return set(re.findall(r'emit\(\s*"([a-z_.]+)"', source))


def test_telemetry_document_lists_exactly_the_events_of_the_code() -> None:
    documented = set(re.findall(r"^\| `([a-z_.]+)` \|", text_of("docs/telemetry.md"), flags=re.MULTILINE))

    assert documented == emitted_events()


def test_architecture_speaks_only_of_events_that_exist() -> None:
    groups = "|".join({name.partition(".")[0] for name in emitted_events()})
    spoken_of = set(re.findall(rf"`((?:{groups})\.[a-z_.]+)`", text_of("ARCHITECTURE.md")))

    assert spoken_of - emitted_events() == set()
    assert len(spoken_of) > 20


def test_architecture_names_the_layers_that_are_checked() -> None:
    contracts = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    checked = [set(layer.split(" | ")) for contract in contracts for layer in contract.get("layers", [])]

    lines = re.findall(r"^(etl\.\w+(?:, etl\.\w+)*) {2,}\S", text_of("ARCHITECTURE.md"), flags=re.MULTILINE)
    assert [set(line.split(", ")) for line in lines] == checked
