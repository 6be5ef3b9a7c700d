"""Where jobs are played: a server to be killed, two databases with the tables of every job, a zygote, a stranger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.faults.arena import BUSY, RUNS_MAX, Arena, open_arena
from tests.faults.crashing import TEMPLATE, CrashingServer
from tests.faults.described import COLUMNS
from tests.faults.fault import RunRequest, RunResult
from tests.model.mutants import Mutant
from tests.soak.invention import SINKS_MAX
from tests.soak.plan import Cycle, JobPlan

_STRANGER = "etl_stranger"
_TABLES = [f"soak_{kind}_{place}" for kind in ("appended", "keyed") for place in range(SINKS_MAX)]


@dataclass(slots=True)
class Stage:
    """One worker's.

    Attributes:
        server: To be killed.
        arena: Databases and runs.
        runs: How many runs were started.
        mutant: What is wrong with the engine in all of them.
    """

    server: CrashingServer
    arena: Arena
    mutant: Mutant | None = None
    runs: int = 0

    def begin(self, plan: JobPlan) -> RunRequest:
        """Empty the tables; what all runs of the job have in common."""
        for connection in (self.arena.store, self.arena.other):
            connection.execute(sql.SQL("TRUNCATE {}").format(sql.SQL(", ").join(map(sql.Identifier, _TABLES))))
        directory = self.arena.input_dir / f"job-{plan.number}"
        for source in plan.described.sources:
            (directory / source).mkdir(parents=True)
        return RunRequest(
            "described",
            f"soak {plan.seed} {plan.number}",
            str(directory),
            self.arena.store_url,
            self.arena.other_url,
            described=plan.described,
            mutant=self.mutant,
        )

    def prepared(self, request: RunRequest, cycle: Cycle) -> RunRequest:
        """Let the input grow; what the runs of the cycle have in common."""
        for growth in cycle.growth:
            with (Path(request.input_dir) / growth.name).open("ab") as file:
                file.write(growth.text.encode())
        assert request.described is not None
        described = replace(
            request.described,
            batch_rows=cycle.batch_rows,
            interval_s=cycle.interval_s,
            parallelism=cycle.parallelism,
        )
        return replace(request, described=described, rows=cycle.rows)

    def run(self, request: RunRequest) -> tuple[int, RunResult | None]:
        """A run from start to end, at most three times while another run still seems alive; its process and result."""
        for _ in range(RUNS_MAX):
            self.runs += 1
            child = self.arena.spawn(request)
            result = child.wait()
            if result is None or result.exit_code != BUSY:
                break
        return child.pid, result

    def as_stranger(self, request: RunRequest) -> RunRequest:
        """The same run under a role that may not end the sessions of the others."""
        store, other = (
            make_conninfo(url, user=_STRANGER, password=_STRANGER) for url in (request.store_url, request.other_url)
        )
        return replace(request, store_url=store, other_url=other)


@contextmanager
def open_stage(server: CrashingServer, directory: Path, mutant: Mutant | None) -> Iterator[Stage]:
    """Databases and zygote for the block."""
    with open_arena(server.url, TEMPLATE, directory) as arena:
        _create_tables(arena)
        yield Stage(server, arena, mutant)


def _create_tables(arena: Arena) -> None:
    columns = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in COLUMNS.items()
    )
    for connection in (arena.store, arena.other):
        for table in _TABLES:
            key = sql.SQL(", PRIMARY KEY (key)" if "keyed" in table else "")
            connection.execute(sql.SQL("CREATE TABLE {} ({}{})").format(sql.Identifier(table), columns, key))
    role = sql.Identifier(_STRANGER)
    known = arena.store.execute("SELECT FROM pg_roles WHERE rolname = %s", [_STRANGER]).fetchone()
    if known is None:
        arena.store.execute(sql.SQL("CREATE ROLE {} SUPERUSER LOGIN PASSWORD {}").format(role, sql.Literal(_STRANGER)))
    for connection in (arena.store, arena.other):
        connection.execute(sql.SQL("GRANT USAGE ON SCHEMA etl, public TO {}").format(role))
        connection.execute(sql.SQL("GRANT ALL ON ALL TABLES IN SCHEMA etl, public TO {}").format(role))
