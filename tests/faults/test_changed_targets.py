"""What a run needs is changed or taken away by others between two of its checkpoints: refused by name, or exact."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from psycopg.conninfo import make_conninfo

from tests.faults import oracle
from tests.faults.arena import Arena
from tests.faults.cases import Undisturbed
from tests.faults.fault import Action, Fault, RunRequest
from tests.faults.jobs import KINDS

CONFIGURATION = 2


@dataclass(frozen=True, slots=True)
class Change:
    """What somebody does to a target.

    Attributes:
        change: The statement; ``{0}`` is the table, ``{1}`` the role of the run.
        cure: Undoes it.
        told: What the error says; empty when the run comes out exact all the same.
        keyed: Whether it makes sense for tables with a key, without one, or both.
    """

    change: str
    cure: str
    told: tuple[str, ...] = ()
    keyed: tuple[bool, ...] = (True, False)


CHANGES = {
    "column renamed": Change(
        "ALTER TABLE {0} RENAME amount TO amounts", "ALTER TABLE {0} RENAME amounts TO amount", ("amount",)
    ),
    "table renamed": Change("ALTER TABLE {0} RENAME TO renamed", "ALTER TABLE renamed RENAME TO {0}", ("{0}",)),
    "type of the same width": Change(
        "ALTER TABLE {0} ALTER amount TYPE float8",
        "ALTER TABLE {0} ALTER amount TYPE int8",
        ("amount", "double precision"),
    ),
    "type of another width": Change(
        "ALTER TABLE {0} ALTER amount TYPE numeric", "ALTER TABLE {0} ALTER amount TYPE int8"
    ),
    "column added": Change("ALTER TABLE {0} ADD added int DEFAULT 7", "ALTER TABLE {0} DROP added"),
    "privilege revoked": Change("REVOKE INSERT ON {0} FROM {1}", "GRANT INSERT ON {0} TO {1}", ("42501", "{0}")),
    "no longer logged": Change("ALTER TABLE {0} SET UNLOGGED", "ALTER TABLE {0} SET LOGGED", ("unlogged",)),
    "unique index dropped": Change(
        "ALTER TABLE {0} DROP CONSTRAINT by_key_pkey",
        "ALTER TABLE {0} ADD PRIMARY KEY (key)",
        ("42P10", "{0}"),
        keyed=(True,),
    ),
    "row security": Change(
        "ALTER TABLE {0} ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE {0} DISABLE ROW LEVEL SECURITY",
        ("0A000", "{0}"),
    ),
}

COMBINATIONS = [
    (kind, name)
    for kind in ("transactional", "two-phase", "two-phase-upsert", "write-ahead", "upsert")
    for name, change in CHANGES.items()
    if (KINDS[kind].targets[0].table == "by_key") in change.keyed
]


@pytest.mark.parametrize("kind, name", COMBINATIONS)
def test_changed_target_is_refused_by_name_or_written_exactly(
    arena: Arena, undisturbed: Undisturbed, ordinary: str, kind: str, name: str
) -> None:
    expected = undisturbed.state(kind)
    (target,) = KINDS[kind].targets
    change = CHANGES[name]
    request = as_role(arena.case(kind, Fault(Action.ASK, "commit.end", 1), restarts=3), ordinary)
    with arena.told(request):
        run = arena.spawn(request)
        assert run.asked() is not None
        arena.store.execute(change.change.format(target.table, ordinary).encode())
        try:
            run.answer()
            result = run.wait()

            assert result is not None
            if change.told:
                assert result.exit_code == CONFIGURATION, result.trace
                for part in change.told:
                    assert part.format(target.table) in result.error
            else:
                assert result.exit_code == 0, result.trace
        except BaseException:
            # What is left, perhaps a prepared transaction, would keep the table from being changed back.
            arena.clean()
            raise
        finally:
            arena.store.execute(change.cure.format(target.table, ordinary).encode())
        oracle.check_interrupted(arena, request, expected)
        arena.finish(request)
        oracle.check_done(arena, request, expected)


def as_role(request: RunRequest, role: str) -> RunRequest:
    """The same run under a role whose password is its name."""
    store, other = (make_conninfo(url, user=role, password=role) for url in (request.store_url, request.other_url))
    return replace(request, store_url=store, other_url=other)
