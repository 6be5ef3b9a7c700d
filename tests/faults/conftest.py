"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.arena import Arena, open_arena
from tests.faults.cases import Undisturbed


@pytest.fixture(scope="session")
def worker_arena(server_url: str, store_template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """Databases and zygote of this worker."""
    with open_arena(server_url, store_template, tmp_path_factory.mktemp("input")) as made:
        yield made


@pytest.fixture(scope="session")
def undisturbed(worker_arena: Arena) -> Undisturbed:
    """Undisturbed runs, made when they are first asked for."""
    return Undisturbed(worker_arena)


@pytest.fixture
def arena(worker_arena: Arena) -> Iterator[Arena]:
    """The worker's arena; whatever a failed test leaves is removed."""
    yield worker_arena
    worker_arena.clean()
