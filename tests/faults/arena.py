"""Databases, input files and runs of one test worker."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from etl.sink import CheckpointMode
from tests.faults.fault import Fault, RunRequest, RunResult
from tests.faults.jobs import APPEND_TABLE, TABLES, UPSERT_TABLE, write_input
from tests.faults.proxy import Incident
from tests.faults.zygote import ChildRun, Zygote
from tests.support.databases import fresh_database

Connection = psycopg.Connection[Any]

RUNS_MAX = 3
BUSY = 75
OCCURRENCE_VARIABLE = "ETL_FAULT_OCCURRENCE"


class Arena:
    """Where one case after another takes place; each under a job name of its own, with empty tables.

    Attributes:
        zygote: Forks the runs.
        input_dir: The input files.
        store_url: The store database.
        other_url: The second database.
        store: The test's own session in the store.
        other: The test's own session in the second database.
    """

    def __init__(self, zygote: Zygote, input_dir: Path, store_url: str, other_url: str) -> None:
        self.zygote = zygote
        self.input_dir = input_dir
        self.store_url = store_url
        self.other_url = other_url
        self._names = itertools.count(1)
        self.store, self.other = self._connections()

    def _connections(self) -> tuple[Connection, Connection]:
        store, other = (
            psycopg.connect(url, autocommit=True, application_name="arena") for url in (self.store_url, self.other_url)
        )
        return store, other

    def reconnect(self) -> None:
        """Open the test's own sessions anew after the server has died."""
        self.close()
        self.store, self.other = self._connections()

    def create_tables(self) -> None:
        """Make the targets in both databases."""
        for connection in (self.store, self.other):
            for statement in TABLES:
                connection.execute(statement)

    def close(self) -> None:
        """End the test's own sessions."""
        self.store.close()
        self.other.close()

    def case(
        self, kind: str, *faults: Fault, mode: CheckpointMode = CheckpointMode.EXACTLY_ONCE, **options: Any
    ) -> RunRequest:
        """Empty the tables; the request of a first run."""
        for connection in (self.store, self.other):
            connection.execute(sql.SQL("TRUNCATE {}, {}").format(*map(sql.Identifier, (APPEND_TABLE, UPSERT_TABLE))))
        name = f"{kind}-{next(self._names)}"
        places = (str(self.input_dir), self.store_url, self.other_url)
        return RunRequest(kind, name, *places, faults=faults, mode=mode, **options)

    def spawn(self, request: RunRequest) -> ChildRun:
        """Start a run."""
        return self.zygote.spawn(request)

    def run(self, request: RunRequest) -> RunResult | None:
        """A run from start to end; None when it was killed."""
        return self.zygote.run(request)

    def again(self, request: RunRequest) -> RunResult | None:
        """Run, at most three times while another run still seems alive; None when it was killed."""
        for _ in range(RUNS_MAX):
            result = self.zygote.run(request)
            if result is None or result.exit_code != BUSY:
                break
        return result

    def finish(self, request: RunRequest) -> RunResult:
        """Run without faults until the job is done."""
        result = self.again(request.without_faults())
        assert result is not None
        assert result.exit_code == 0, f"the run after the fault exited with {result.exit_code}:\n{result.trace}"
        return result

    @contextmanager
    def told(self, request: RunRequest, *incidents: Incident) -> Iterator[None]:
        """A failure in the block says which case it was and how to have it again."""
        try:
            yield
        except BaseException as failure:
            happened: list[Fault | Incident] = [*request.faults, *incidents]
            occurrence = happened[0].occurrence if happened else 1
            test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
            failure.add_note(f"job {request.kind}: {'; '.join(map(str, happened))}")
            failure.add_note(f"again: {OCCURRENCE_VARIABLE}={occurrence} pytest '{test}'")
            raise

    def clean(self) -> None:
        """Remove what a failed case has left, so that the next one does not fail for it."""
        self.zygote.kill_all()
        for connection in (self.store, self.other):
            connection.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND starts_with(application_name, 'etl:')"
            )
            prepared = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            for (gid,) in connection.execute(prepared).fetchall():
                connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
        self.store.execute("DELETE FROM etl.write_ahead_log")


@contextmanager
def open_arena(server_url: str, template: str, input_dir: Path) -> Iterator[Arena]:
    """Two databases with the schema ``etl`` and the target tables, a zygote and the input."""
    write_input(input_dir)
    with ExitStack() as stack:
        urls = [stack.enter_context(fresh_database(server_url, template)) for _ in range(2)]
        made = Arena(stack.enter_context(Zygote()), input_dir, *urls)
        stack.callback(made.close)
        made.create_tables()
        yield made
