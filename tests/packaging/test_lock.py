"""The lock file pins what pyproject.toml asks for, by hash, from wherever pip is told to look."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.conftest import CHECKOUT


def lock_text() -> str:
    return (CHECKOUT / "requirements-dev.lock").read_text()


def declared() -> list[Requirement]:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    requirements = [Requirement(text) for text in texts]
    return [requirement for requirement in requirements if requirement.name != project["name"]]


def entries() -> list[str]:
    """The pins with their hashes, one text each."""
    return [entry for entry in re.split(r"^(?=[a-z0-9])", lock_text(), flags=re.MULTILINE) if "==" in entry]


def pinned() -> dict[str, set[str]]:
    versions: dict[str, set[str]] = defaultdict(set)
    for entry in entries():
        name, version = re.split("==| |\n", entry, maxsplit=2)[:2]
        versions[canonicalize_name(name)].add(version)
    return versions


def test_lock_satisfies_every_declared_dependency() -> None:
    versions = pinned()

    unmet = {
        str(requirement)
        for requirement in declared()
        if not versions.get(canonicalize_name(requirement.name))
        or not all(requirement.specifier.contains(version) for version in versions[canonicalize_name(requirement.name)])
    }
    assert unmet == set()


def test_lock_pins_by_hash_and_names_no_index() -> None:
    assert [entry for entry in entries() if "--hash=sha256:" not in entry] == []
    assert re.findall(r"https?://|--index-url|--extra-index-url|--find-links|file:", lock_text()) == []
