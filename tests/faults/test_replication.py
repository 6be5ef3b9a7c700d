"""A synchronous standby that is lost in the middle of a run, and one that takes the primary's place.

The runs' commits wait for the standby; what the test itself writes does not.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from etl.store.embedded import EmbeddedServer
from etl.store.embedded.account import server_account
from etl.store.embedded.binaries import Programs
from etl.store.embedded.place import make_private
from tests.faults import oracle
from tests.faults.arena import Arena
from tests.faults.cases import SAMPLED, THOROUGH, Undisturbed
from tests.faults.crashing import TEMPLATE, CrashingServer, kill_all_of, require_programs
from tests.faults.fault import Action, Fault
from tests.faults.jobs import KINDS, write_input
from tests.faults.zygote import Zygote
from tests.support.databases import create_database, with_database
from tests.support.servers import SESSION_DIR_VARIABLE, SETTINGS
from tests.support.waiting import wait_until

UNREACHABLE = 69
WAIT_TIMEOUT_S = 20.0
PATIENCE_S = 0.5
DATABASES = ("replicated_store", "replicated_other")


class Standby:
    """A server that follows another one, and may take its place.

    Attributes:
        url: Of its database.
    """

    _numbers = count(1)

    def __init__(self, primary: Path, url: str) -> None:
        state_dir = Path(os.environ[SESSION_DIR_VARIABLE]) / f"standby-{os.getpid()}-{next(self._numbers)}"
        home = state_dir / "postgresql"
        self._data = home / "cluster" / "data"
        home.mkdir(parents=True)
        for directory in (state_dir, home):
            directory.chmod(0o711)
        account = server_account(primary.parent, os.environ)
        make_private(home / "cluster", account)
        shutil.copy2(primary.parents[1] / "password", home / "password")
        options = ("--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync")
        # Of a directory that is there the server makes nothing anew.
        (home / "server.conf").touch()
        failure = Programs(account, home, os.environ).run("pg_basebackup", "-D", self._data, "-d", url, *options)
        assert failure is None, failure
        self._server = EmbeddedServer(state_dir, {**SETTINGS, "shared_buffers": "16MB"})
        self.url = self._server.acquire()

    @property
    def data(self) -> Path:
        """Directory of its files."""
        return self._data

    def kill(self) -> None:
        """kill -9 of all its processes."""
        kill_all_of(self._data)

    def restart(self) -> None:
        """Bring it back at the same place."""
        assert self._server.acquire() == self.url

    def promote(self) -> None:
        """Have it take the primary's place; nobody follows it yet."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            assert connection.execute("SELECT pg_promote()").fetchone() == (True,)
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_reload_conf()")

    def close(self) -> None:
        """End it."""
        self._server.release()


class Replication:
    """A primary and what follows it.

    Attributes:
        url: Of the primary's database.
    """

    def __init__(self) -> None:
        self._first = CrashingServer("primary")
        self._standbys: list[Standby] = []
        self._data = self._first.data
        self.url = self._first.url
        with psycopg.connect(self.url, autocommit=True) as connection:
            for name in DATABASES:
                create_database(self.url, name, TEMPLATE)
            connection.execute("ALTER ROLE postgres SET synchronous_commit = local")

    def follow(self) -> Standby:
        """A new standby, for which commits wait from now on."""
        standby = Standby(self._data, self.url)
        self._standbys.append(standby)
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
            _await(connection, "SELECT FROM pg_stat_replication WHERE sync_state = 'sync'")
        return standby

    def part(self, standby: Standby) -> None:
        """Nobody waits for this standby any more."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_reload_conf()")
        standby.kill()

    def fail_over(self, standby: Standby) -> None:
        """The primary is gone, the standby takes its place."""
        kill_all_of(self._data)
        standby.restart()
        standby.promote()
        self._data, self.url = standby.data, standby.url

    def close(self) -> None:
        """End all servers."""
        for standby in self._standbys:
            standby.close()
        self._first.close()


def _await(connection: psycopg.Connection[tuple[object, ...]], query: str) -> None:
    wait_until(lambda: connection.execute(query).fetchall(), query, WAIT_TIMEOUT_S)


@pytest.fixture(scope="module")
def replication() -> Iterator[Replication]:
    if not (require_programs() / "pg_basebackup").is_file():
        pytest.skip("there is no pg_basebackup")
    with closing(Replication()) as made:
        yield made


@pytest.fixture(scope="module")
def module_arena(replication: Replication, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    input_dir = tmp_path_factory.mktemp("input")
    write_input(input_dir)
    with ExitStack() as stack:
        urls = [with_database(replication.url, name) for name in DATABASES]
        made = Arena(stack.enter_context(Zygote()), input_dir, *urls)
        stack.callback(made.close)
        made.create_tables()
        yield made


@pytest.fixture
def replicated(module_arena: Arena) -> Iterator[Arena]:
    yield module_arena
    module_arena.clean()


@pytest.fixture
def standby(replication: Replication) -> Iterator[Standby]:
    made = replication.follow()
    yield made
    if made.url != replication.url:
        replication.part(made)


@pytest.mark.parametrize("kind, step", SAMPLED if THOROUGH else SAMPLED[::8])
@pytest.mark.parametrize("killed", [False, True])
def test_run_waits_for_a_lost_standby(
    replicated: Arena, undisturbed: Undisturbed, standby: Standby, kind: str, step: str, *, killed: bool
) -> None:
    expected = undisturbed.state(kind)
    occurrence = min(2, undisturbed.result(kind).count(step))
    request = replace(replicated.case(kind, Fault(Action.ASK, step, occurrence)), owner_timeout_s=PATIENCE_S)
    with replicated.told(request):
        run = replicated.spawn(request)
        assert run.asked() == step
        standby.kill()
        run.answer()
        # Long enough for the run to ask the server what takes it so long.
        _await(
            replicated.store,
            "SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            f" AND clock_timestamp() > state_change + interval '{4 * PATIENCE_S} s'",
        )
        oracle.check_interrupted(replicated, request, expected)
        if killed:
            os.kill(run.pid, 9)
        standby.restart()
        result = run.wait()

        if killed:
            assert result is None
            result = replicated.finish(request)
        assert result is not None
        assert (result.exit_code, result.restarts) == (0, 0), result.trace
        oracle.check_done(replicated, request, expected)


BETWEEN = {"sink.prepared", "checkpoint.completed"}
"""A unit is prepared, and is to be dropped; a unit is prepared, and is to be committed."""

PROMOTED = [(kind, step) for kind, step in SAMPLED if THOROUGH or (step in BETWEEN and "upsert" not in kind)]


@pytest.mark.parametrize("kind, step", PROMOTED)
@pytest.mark.parametrize("behind", [False, True])
def test_job_goes_on_at_the_promoted_standby(
    replication: Replication,
    replicated: Arena,
    undisturbed: Undisturbed,
    standby: Standby,
    kind: str,
    step: str,
    *,
    behind: bool,
) -> None:
    expected = undisturbed.state(kind)
    occurrence = min(2, undisturbed.result(kind).count(step))
    request = replicated.case(kind, Fault(Action.ASK, step, occurrence), restarts=0)
    with replicated.told(request):
        run = replicated.spawn(request)
        assert run.asked() == step
        if behind:
            # What the run commits last never comes to the standby, and so is never answered.
            standby.kill()
            run.answer()
            _await(replicated.store, "SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
            replication.fail_over(standby)
        else:
            replication.fail_over(standby)
            run.answer()
        run.end(UNREACHABLE)

        replicated.store_url, replicated.other_url = (with_database(replication.url, name) for name in DATABASES)
        replicated.reconnect()
        moved = replace(request, store_url=replicated.store_url, other_url=replicated.other_url)
        oracle.check_interrupted(replicated, moved, expected)
        replicated.finish(moved)
        oracle.check_done(replicated, moved, expected)


@pytest.mark.parametrize("kind", KINDS if THOROUGH else ["united"])
def test_standby_is_refused(replicated: Arena, standby: Standby, kind: str) -> None:
    request = replicated.case(kind)
    reading = [make_conninfo(with_database(standby.url, name)) for name in DATABASES]
    with replicated.told(request):
        result = replicated.run(replace(request, store_url=reading[0], other_url=reading[1]))

        assert result is not None
        assert result.exit_code == 2, result.trace
        assert "the server is a standby" in result.error
