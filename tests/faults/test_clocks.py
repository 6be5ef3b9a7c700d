"""Clocks of the client and of the server that are wrong by an hour, or jump in the middle of a run: nothing changes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from etl.store.embedded import account
from tests.faults import oracle
from tests.faults.arena import BUSY, Arena
from tests.faults.cases import THOROUGH, Undisturbed
from tests.faults.crashing import TEMPLATE, CrashingServer, require_programs
from tests.faults.fault import Action, Fault
from tests.faults.jobs import KINDS, write_input
from tests.faults.zygote import Zygote
from tests.support.databases import fresh_database
from tests.support.servers import SESSION_DIR_VARIABLE

FENCED = 78
HOUR_S = 3600
LIBRARY = "libfaketime.so.1"
VARIABLES = ("LD_PRELOAD", "FAKETIME_TIMESTAMP_FILE", "FAKETIME_NO_CACHE", "FAKETIME_DONT_FAKE_MONOTONIC")


def find_library() -> Path:
    """The library that turns clocks."""
    package = importlib.util.find_spec("libfaketime")
    places = [Path(place) for place in (package.submodule_search_locations or ())] if package else []
    for place in (*places, *Path("/usr/lib").glob("*/faketime")):
        for found in place.rglob(LIBRARY):
            return found
    pytest.skip(f"there is no {LIBRARY} (Debian: libfaketime)")


class TurnedClock:
    """What processes with this environment take for the time of day. Their monotonic clock is left as it is.

    Attributes:
        environ: The environment.
    """

    def __init__(self, name: str) -> None:
        directory = Path(os.environ[SESSION_DIR_VARIABLE])
        # Where the server's account can read them.
        library = directory / LIBRARY
        if not library.exists():
            shutil.copy(find_library(), library)
        self._file = directory / f"clock-{name}-{os.getpid()}"
        self.turn(0)
        values = (str(library), str(self._file), "1", "1")
        self.environ: Mapping[str, str] = dict(zip(VARIABLES, values, strict=True))

    def turn(self, offset_s: int) -> None:
        """Set it off against the true time, at once."""
        making = self._file.with_suffix(".making")
        making.write_text(f"{offset_s:+d}", encoding="ascii")
        making.chmod(0o644)
        making.replace(self._file)


@pytest.fixture(scope="module")
def client_clock() -> TurnedClock:
    return TurnedClock("client")


@pytest.fixture(scope="module")
def server_clock() -> TurnedClock:
    return TurnedClock("server")


@pytest.fixture(scope="module")
def server(server_clock: TurnedClock) -> Iterator[CrashingServer]:
    with pytest.MonkeyPatch.context() as patch:
        # The server's environment is closed to everything else.
        patch.setattr(account, "_INHERITED", (*account._INHERITED, *VARIABLES))
        for name, value in server_clock.environ.items():
            patch.setenv(name, value)
        require_programs()
        made = CrashingServer("clock")
    yield made
    made.close()


@pytest.fixture(scope="module")
def module_arena(
    server: CrashingServer, client_clock: TurnedClock, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Arena]:
    input_dir = tmp_path_factory.mktemp("input")
    write_input(input_dir)
    with ExitStack() as stack:
        urls = [stack.enter_context(fresh_database(server.url, TEMPLATE)) for _ in range(2)]
        made = Arena(stack.enter_context(Zygote(client_clock.environ)), input_dir, *urls)
        stack.callback(made.close)
        made.create_tables()
        yield made


@pytest.fixture
def turned(module_arena: Arena, client_clock: TurnedClock, server_clock: TurnedClock) -> Iterator[Arena]:
    yield module_arena
    client_clock.turn(0)
    server_clock.turn(0)
    module_arena.clean()


def offset_of_server_s(arena: Arena) -> float:
    """How far the server's clock is from ours."""
    row = arena.store.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
    assert row is not None
    return float(row[0]) - time.time()


def offset_of_client_s(clock: TurnedClock) -> float:
    """How far the clock of a run's process is from ours."""
    command = [sys.executable, "-c", "import time; print(time.time())"]
    told = subprocess.run(command, env={**os.environ, **clock.environ}, capture_output=True, text=True, check=True)
    return float(told.stdout) - time.time()


def test_clocks_can_be_turned(turned: Arena, client_clock: TurnedClock, server_clock: TurnedClock) -> None:
    client_clock.turn(-HOUR_S)
    server_clock.turn(HOUR_S)

    assert abs(offset_of_client_s(client_clock) + HOUR_S) < HOUR_S / 2
    assert abs(offset_of_server_s(turned) - HOUR_S) < HOUR_S / 2


DIRECTIONS = [
    (client, server) for client in (-HOUR_S, 0, HOUR_S) for server in (-HOUR_S, 0, HOUR_S) if client or server
]


@pytest.mark.parametrize("kind", KINDS if THOROUGH else ["two-phase", "united"])
@pytest.mark.parametrize("client_s, server_s", DIRECTIONS if THOROUGH else [(HOUR_S, -HOUR_S), (-HOUR_S, HOUR_S)])
def test_jump_in_the_middle_of_a_run_changes_nothing(
    turned: Arena,
    undisturbed: Undisturbed,
    client_clock: TurnedClock,
    server_clock: TurnedClock,
    kind: str,
    client_s: int,
    server_s: int,
) -> None:
    expected = undisturbed.state(kind)
    request = turned.case(kind, Fault(Action.ASK, "source.batch", 4))
    with turned.told(request):
        run = turned.spawn(request)
        assert run.asked() == "source.batch"
        client_clock.turn(client_s)
        server_clock.turn(server_s)
        run.answer()
        result = run.end()

        # The server's own timeouts go by the time of day: it may end a session that seems to have idled for an hour.
        assert result.restarts == sum("25P03" in warning for warning in result.warnings), result.warnings
        oracle.check_done(turned, request, expected)


@pytest.mark.parametrize("kind", KINDS if THOROUGH else ["two-phase", "united"])
@pytest.mark.parametrize("client_s, server_s", DIRECTIONS if THOROUGH else [(-HOUR_S, -HOUR_S), (HOUR_S, HOUR_S)])
def test_next_run_makes_a_kill_good_by_another_clock(
    turned: Arena,
    undisturbed: Undisturbed,
    client_clock: TurnedClock,
    server_clock: TurnedClock,
    kind: str,
    client_s: int,
    server_s: int,
) -> None:
    expected = undisturbed.state(kind)
    request = turned.case(kind, Fault(Action.KILL, "checkpoint.completed", 2))
    with turned.told(request):
        assert turned.run(request) is None
        client_clock.turn(client_s)
        server_clock.turn(server_s)

        turned.finish(request)

        state = oracle.check_done(turned, request, expected)
        client_clock.turn(-client_s)
        server_clock.turn(-server_s)
        oracle.check_idle(turned, request, state)


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
def test_owner_is_judged_by_no_clock(
    turned: Arena, undisturbed: Undisturbed, client_clock: TurnedClock, server_clock: TurnedClock, jump_s: int
) -> None:
    expected = undisturbed.state("two-phase")
    request = turned.case("two-phase", Fault(Action.ASK, "source.batch", 4))
    with turned.told(request):
        alive = turned.spawn(request)
        assert alive.asked() is not None
        client_clock.turn(jump_s)
        server_clock.turn(jump_s)
        refused = turned.run(request.without_faults())
        assert refused is not None
        assert refused.exit_code == BUSY, refused.trace
        alive.answer()
        alive.end()
        oracle.check_done(turned, request, expected)


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
def test_hung_owner_is_replaced_whatever_the_clocks_say(
    turned: Arena, undisturbed: Undisturbed, client_clock: TurnedClock, server_clock: TurnedClock, jump_s: int
) -> None:
    expected = undisturbed.state("two-phase")
    request = turned.case("two-phase", Fault(Action.STOP, "source.batch", 4))
    with turned.told(request):
        stopped = turned.spawn(request)
        assert stopped.wait_stopped()
        client_clock.turn(jump_s)
        server_clock.turn(jump_s)
        started_s = time.monotonic()

        turned.finish(replace(request, owner_timeout_s=2.0))

        # Neither at once nor an hour later.
        assert 2.0 <= time.monotonic() - started_s < 60.0
        state = oracle.check_done(turned, request, expected)
        stopped.go_on()
        stopped.end(FENCED)
        assert oracle.check_done(turned, request, expected) == state
