"""pgbouncer between the runs and the server: in session mode all is exact, in transaction mode no run starts."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.faults import oracle
from tests.faults.arena import Arena
from tests.faults.cases import SAMPLE, THOROUGH, Undisturbed
from tests.faults.fault import Action, Fault, RunRequest
from tests.faults.jobs import KINDS
from tests.faults.steps import CASES
from tests.faults.wire import tcp_url
from tests.support.servers import SESSION_DIR_VARIABLE
from tests.support.waiting import wait_until

REFUSED = 2
CONFIGURATION = """
[databases]
* = host={host} port={port} user={user} password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
server_tls_sslmode = disable
"""


@contextmanager
def pooler(url: str, mode: str) -> Iterator[int]:
    """A pgbouncer before a server for the block; its port."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("pgbouncer is not installed")
    server = conninfo_to_dict(url)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        listen_port = probe.getsockname()[1]
    # It does not run as root; the directory must be open to whom it runs as.
    directory = Path(tempfile.mkdtemp(prefix="pooler-", dir=os.environ[SESSION_DIR_VARIABLE]))
    directory.chmod(0o755)
    configuration = directory / "pgbouncer.ini"
    text = CONFIGURATION.format(**server, listen_port=listen_port, mode=mode)
    configuration.write_text(text, encoding="utf-8")
    configuration.chmod(0o644)
    account = pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None
    with subprocess.Popen([program, "-q", configuration], user=account, stderr=subprocess.PIPE, text=True) as process:
        try:
            _await_answer(make_conninfo(url, host="127.0.0.1", port=listen_port), process)
            yield listen_port
        finally:
            process.kill()


def _await_answer(url: str, process: subprocess.Popen[str]) -> None:
    def answers() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return pq.PGconn.ping(url.encode()) == pq.Ping.OK

    wait_until(answers, "an answer of pgbouncer")


@pytest.fixture(scope="module")
def session_port(worker_arena: Arena) -> Iterator[int]:
    with pooler(tcp_url(worker_arena.store_url, worker_arena.store), "session") as port:
        yield port


@pytest.fixture
def transaction_port(arena: Arena) -> Iterator[int]:
    # Of each test's own: it keeps sessions with the names of the last who used them.
    with pooler(tcp_url(arena.store_url, arena.store), "transaction") as port:
        yield port


def through(port: int, request: RunRequest, *, store: bool = True, other: bool = True) -> RunRequest:
    """The same run through the pooler."""
    pooled = [make_conninfo(url, host="127.0.0.1", port=port) for url in (request.store_url, request.other_url)]
    return replace(
        request,
        store_url=pooled[0] if store else request.store_url,
        other_url=pooled[1] if other else request.other_url,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_run_through_a_session_pooler_is_as_any_other(
    arena: Arena, undisturbed: Undisturbed, session_port: int, kind: str
) -> None:
    expected = undisturbed.state(kind)
    request = through(session_port, arena.case(kind))
    with arena.told(request):
        result = arena.finish(request)

        assert result.restarts == 0
        state = oracle.check_done(arena, request, expected)
        oracle.check_idle(arena, request, state)


SAMPLED = [case for case in CASES if case[1] in SAMPLE]


@pytest.mark.parametrize("kind, step", SAMPLED if THOROUGH else SAMPLED[::7])
def test_kill_behind_a_session_pooler_is_made_good_by_the_next_run(
    arena: Arena, undisturbed: Undisturbed, session_port: int, kind: str, step: str
) -> None:
    expected = undisturbed.state(kind)
    occurrence = min(2, undisturbed.result(kind).count(step))
    request = through(session_port, arena.case(kind, Fault(Action.KILL, step, occurrence), owner_timeout_s=1.0))
    with arena.told(request):
        assert arena.run(request) is None
        oracle.check_interrupted(arena, request, expected)

        arena.finish(request)

        oracle.check_done(arena, request, expected)


@pytest.mark.parametrize("kind, store", [*((kind, True) for kind in KINDS), ("united", False)])
def test_transaction_pooler_is_refused_and_nothing_touched(
    arena: Arena, transaction_port: int, kind: str, *, store: bool
) -> None:
    request = through(transaction_port, arena.case(kind), store=store)
    with arena.told(request):
        result = arena.run(request)

        assert result is not None
        assert result.exit_code == REFUSED, result.trace
        assert "transaction pooler" in result.error
        assert "session mode" in result.error
        assert oracle.read_state(arena.store, request.job).job_id == ""
        for connection in (arena.store, arena.other):
            assert connection.execute("SELECT FROM etl.job WHERE name = %s", [request.job]).fetchall() == []
            # Other tests share the server.
            prepared = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            assert connection.execute(prepared).fetchall() == []
            in_use = (
                "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
                " AND starts_with(application_name, 'etl:') AND state <> 'idle'"
            )
            assert connection.execute(in_use).fetchall() == []
        assert all(oracle.visible_rows(arena, target).total() == 0 for target in KINDS[kind].targets)
