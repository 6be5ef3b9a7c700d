"""The server and all its processes killed in the middle of a run, and started again: the run goes on by itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

import pytest

from etl.errors import ConfigurationError
from etl.store.embedded import EmbeddedServer
from etl.store.migrations import upgrade
from tests.faults import oracle
from tests.faults.arena import Arena, open_arena
from tests.faults.cases import SAMPLE, THOROUGH, Undisturbed, thorough
from tests.faults.fault import Action, Fault
from tests.faults.steps import CASES
from tests.support.databases import create_database, with_database
from tests.support.servers import SESSION_DIR_VARIABLE, SETTINGS

TEMPLATE = "etl_template"


class CrashingServer:
    """A server of this worker's own, to be killed."""

    def __init__(self) -> None:
        directory = Path(os.environ[SESSION_DIR_VARIABLE]) / f"crash-{os.getpid()}"
        self._server = EmbeddedServer(directory, {**SETTINGS, "shared_buffers": "16MB"})
        self.url = self._server.acquire()
        create_database(self.url, TEMPLATE)
        upgrade(with_database(self.url, TEMPLATE))

    def kill(self) -> None:
        """kill -9 of the postmaster and of every process below it."""
        postmaster = self._server.status().pid
        assert postmaster is not None
        # Looked up before: they are nobody's children once the postmaster is dead.
        doomed = [postmaster, *_children_of(postmaster)]
        for pid in doomed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def restart(self) -> None:
        """Bring it back at the same place."""
        assert self._server.acquire() == self.url

    def close(self) -> None:
        """End it."""
        self._server.release()


def _children_of(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if stat.read_text(errors="replace").rpartition(")")[2].split()[1] == str(parent):
                found.append(int(stat.parent.name))
    return found


@pytest.fixture(scope="session")
def crashing_server() -> Iterator[CrashingServer]:
    try:
        server = CrashingServer()
    except ConfigurationError as error:
        pytest.skip(str(error))
    yield server
    server.close()


@pytest.fixture(scope="session")
def worker_crash_arena(crashing_server: CrashingServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with open_arena(crashing_server.url, TEMPLATE, tmp_path_factory.mktemp("input")) as made:
        yield made


@pytest.fixture
def crash_arena(worker_crash_arena: Arena) -> Iterator[Arena]:
    yield worker_crash_arena
    worker_crash_arena.clean()


class UpAgain(StrEnum):
    """When the server is there again."""

    FIRST = "before the run notices"
    LATER = "while the run retries"


COMBINATIONS = [
    (kind, step, up_again)
    for number, (kind, step) in enumerate(thorough(CASES, SAMPLE - {"sink.fenced", "commit.delivered"}))
    for up_again in (UpAgain if THOROUGH else [list(UpAgain)[number % 2]])
]


@pytest.mark.parametrize("kind, step, up_again", COMBINATIONS)
def test_run_goes_on_by_itself_when_the_server_is_killed(
    crashing_server: CrashingServer,
    crash_arena: Arena,
    undisturbed: Undisturbed,
    kind: str,
    step: str,
    up_again: UpAgain,
) -> None:
    expected = undisturbed.state(kind)
    occurrence = min(2, undisturbed.result(kind).count(step))
    request = crash_arena.case(kind, Fault(Action.ASK, step, occurrence), restarts=1000)
    with crash_arena.told(request):
        run = crash_arena.spawn(request)
        assert run.asked() == step
        crashing_server.kill()
        if up_again is UpAgain.LATER:
            run.answer()
        crashing_server.restart()
        crash_arena.reconnect()
        if up_again is UpAgain.FIRST:
            run.answer()
        result = run.wait()

        assert result is not None
        assert result.exit_code == 0, result.trace
        oracle.check_done(crash_arena, request, expected)
