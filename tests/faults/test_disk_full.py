"""No space left where the tables are, or where the log of the server is: the run waits or fails, and all is exact.

Nothing that the jobs do spills to temporary files, and a prepared transaction takes room in the server's log alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from tests.faults import oracle
from tests.faults.arena import Arena, open_arena
from tests.faults.cases import THOROUGH, Undisturbed
from tests.faults.crashing import TEMPLATE, CrashingServer, kill_all_of, require_programs
from tests.faults.fault import Action, Fault
from tests.faults.jobs import KINDS
from tests.faults.steps import STEPS

TRANSIENT = 70
DISK_FULL = "53100"
SETTINGS_OF_A_SMALL_LOG = {
    "min_wal_size": "32MB",
    "max_wal_size": "32MB",
    "wal_recycle": "off",
}
_TOP = Path("/var/tmp")
_PREFIX = "etl-disk-"


class Disk:
    """A small file system in memory."""

    def __init__(self, size_mb: int, owner: int) -> None:
        # Not in the session's directory: what a killed session leaves mounted could not be removed with that.
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_TOP))
        self._ballast = self.path / "ballast"
        options = f"size={size_mb}m,mode=0700,uid={owner}"
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", self.path], capture_output=True, text=True, check=False
        )
        if mounted.returncode != 0:
            self.path.rmdir()
            pytest.skip(f"no file system can be mounted: {mounted.stderr.strip()}")

    def fill(self) -> None:
        """Leave no space."""
        with self._ballast.open("ab", buffering=0) as file, suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        status = os.statvfs(self.path)
        assert status.f_bavail == 0

    def make_room(self) -> None:
        """Take away what fills it."""
        self._ballast.unlink(missing_ok=True)

    def remove(self) -> None:
        """Unmount."""
        subprocess.run(["umount", self.path], check=True)
        self.path.rmdir()


class SmallServer:
    """A server of this worker's own with its databases and its log on small disks.

    Attributes:
        url: Of its database.
        data: The disk of the databases.
        log: The disk of the server's log.
    """

    def __init__(self) -> None:
        self._server = CrashingServer("small", SETTINGS_OF_A_SMALL_LOG)
        self.url = self._server.url
        owner = self._server.data.stat().st_uid
        self.data, self.log = Disk(64, owner), Disk(128, owner)
        self._move_log(self._server.data / "pg_wal")
        self._move_template()

    def _move_log(self, log: Path) -> None:
        self._server.kill()
        place = self.log.path / "pg_wal"
        shutil.copytree(log, place)
        for path in (place, *place.rglob("*")):
            shutil.chown(path, log.stat().st_uid, log.stat().st_gid)
        shutil.rmtree(log)
        log.symlink_to(place)
        self._server.restart()

    def _move_template(self) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            place = sql.Literal(str(self.data.path))
            connection.execute(sql.SQL("CREATE TABLESPACE small LOCATION {}").format(place))
            # Copies of a database lie where it lies.
            connection.execute(f"ALTER DATABASE {TEMPLATE} SET TABLESPACE small")

    def restart(self) -> None:
        """Bring it back at the same place."""
        self._server.restart()

    def kill(self) -> None:
        """End what a full disk has left of it: a recovery that failed for that has been seen to hang in its end."""
        kill_all_of(self._server.data)

    def close(self) -> None:
        """End it."""
        self._server.close()
        self.data.remove()
        self.log.remove()


def remove_disks_of_the_dead() -> None:
    """Unmount what killed sessions have left."""
    for path in _TOP.glob(f"{_PREFIX}*"):
        maker = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", maker).exists():
            # Their servers are ended by the sweep of dead sessions; an empty directory was left before it was mounted.
            subprocess.run(["umount", path], capture_output=True, check=False)
            path.rmdir()


@contextmanager
def small_server() -> Iterator[SmallServer]:
    """A server for the block."""
    server = SmallServer()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def small() -> Iterator[SmallServer]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    require_programs()
    remove_disks_of_the_dead()
    with small_server() as server:
        yield server


@pytest.fixture(scope="module")
def module_arena(small: SmallServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with open_arena(small.url, TEMPLATE, tmp_path_factory.mktemp("input")) as made:
        yield made


@pytest.fixture
def small_arena(module_arena: Arena, small: SmallServer) -> Iterator[Arena]:
    yield module_arena
    small.data.make_room()
    small.log.make_room()
    small.restart()
    module_arena.reconnect()
    module_arena.clean()


@pytest.mark.parametrize("kind", KINDS)
def test_run_goes_on_by_itself_when_there_is_room_again(
    small: SmallServer, small_arena: Arena, undisturbed: Undisturbed, kind: str
) -> None:
    expected = undisturbed.state(kind)
    faults = Fault(Action.ASK, "source.batch"), Fault(Action.ASK, "attempt.restarting", 2)
    request = small_arena.case(kind, *faults, restarts=1000)
    with small_arena.told(request):
        run = small_arena.spawn(request)
        assert run.asked() == "source.batch"
        small.data.fill()
        run.answer()
        assert run.asked() == "attempt.restarting"
        small.data.make_room()
        run.answer()
        result = run.end()

        assert any(DISK_FULL in warning for warning in result.warnings)
        oracle.check_done(small_arena, request, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_run_that_gives_up_leaves_nothing_that_the_next_one_does_not_make_good(
    small: SmallServer, small_arena: Arena, undisturbed: Undisturbed, kind: str
) -> None:
    expected = undisturbed.state(kind)
    request = small_arena.case(kind, Fault(Action.ASK, "source.batch"), restarts=1)
    with small_arena.told(request):
        run = small_arena.spawn(request)
        assert run.asked() == "source.batch"
        small.data.fill()
        run.answer()
        result = run.end(TRANSIENT)

        assert DISK_FULL in result.error
        oracle.check_interrupted(small_arena, request, expected)
        small.data.make_room()
        small_arena.finish(request)
        oracle.check_done(small_arena, request, expected)


LOG_FULL_AT = ("sink.fenced", "sink.prepare.before", "checkpoint.recorded", "checkpoint.completed", "commit.before")
LOG_CASES = [(kind, step) for kind in KINDS for step in LOG_FULL_AT if step in STEPS[kind]]


@pytest.mark.parametrize("kind, step", LOG_CASES if THOROUGH else LOG_CASES[::4])
def test_run_goes_on_by_itself_when_the_log_was_full_and_the_server_down(
    small: SmallServer, small_arena: Arena, undisturbed: Undisturbed, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind)
    faults = Fault(Action.ASK, step, 2), Fault(Action.ASK, "attempt.restarting", 3)
    request = small_arena.case(kind, *faults, restarts=1000)
    with small_arena.told(request):
        run = small_arena.spawn(request)
        assert run.asked() == step
        small.log.fill()
        # The next record needs a new file: the run's, or one of the server's own, before this is answered.
        with suppress(psycopg.OperationalError):
            small_arena.store.execute("SELECT pg_switch_wal()")
        run.answer()
        assert run.asked() == "attempt.restarting"
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(small.url)
        small.kill()
        small.log.make_room()
        small.restart()
        small_arena.reconnect()
        run.answer()
        run.end()

        oracle.check_done(small_arena, request, expected)
