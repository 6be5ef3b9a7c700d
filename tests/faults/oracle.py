"""What must hold after a fault, after the job was run again, and after a run that had nothing to do.

The truth is recomputed from the input files and the recorded positions: what a target shows must be exactly the rows
that lie before the positions of a completed checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import scalar_row

from etl.codec import decode_rows
from tests.faults.arena import Arena, Connection
from tests.faults.fault import RunRequest
from tests.faults.jobs import ALL_KINDS, Kind, Row, Rows, Target, rows_before
from tests.support.databases import one_snapshot
from tests.support.waiting import wait_until

Offsets = Mapping[str, Mapping[str, int]]
"""Byte offsets by source uid and split."""


@dataclass(frozen=True, slots=True)
class State:
    """A job as the store describes it.

    Attributes:
        job_id: Its id, empty when the job was never registered.
        checkpoint: Number of the last completed checkpoint.
        offsets: By checkpoint, from 0, where reading goes on.
    """

    job_id: str
    checkpoint: int
    offsets: Sequence[Offsets]

    def rows(self, kind: Kind, checkpoint: int) -> list[Row]:
        """All rows read up to a checkpoint."""
        return [row for uid in kind.sources for row in rows_before(uid, self.offsets[checkpoint].get(uid, {}))]


def read_state(connection: Connection, job: str) -> State:
    """Read the store."""
    found = connection.execute(
        "SELECT job_id, checkpoint_id FROM etl.head JOIN etl.job USING (job_id) WHERE name = %s", [job]
    ).fetchone()
    if found is None:
        return State("", 0, [{}])
    job_id, checkpoint = found
    offsets: list[dict[str, dict[str, int]]] = [{}]
    for number in range(1, checkpoint + 1):
        moved = connection.execute(
            "SELECT uid, split_id, position->>'offset' FROM etl.position WHERE job_id = %s AND checkpoint_id = %s",
            [job_id, number],
        )
        latest = {uid: dict(splits) for uid, splits in offsets[-1].items()}
        for uid, split, offset in moved:
            latest.setdefault(uid, {})[_split_name(split)] = int(offset)
        offsets.append(latest)
    return State(job_id, checkpoint, offsets)


def _split_name(split: str) -> str:
    return "/".join(split.rsplit("/", 2)[-2:])


def visible_rows(arena: Arena, target: Target) -> Rows:
    """What readers of the target see."""
    connection = arena.other if target.other else arena.store
    query = sql.SQL("SELECT id, key, amount FROM {}").format(sql.Identifier(target.table))
    return Counter(connection.execute(query).fetchall())


# --- right after a fault ----------------------------------------------------------------------------------------------


def check_interrupted(arena: Arena, request: RunRequest, undisturbed: State) -> None:
    """Right after a kill, while the server may still carry out what the dead process sent last."""
    kind = ALL_KINDS[request.kind]
    with one_snapshot(arena.store):
        # The other database is looked at first: between the two looks the dead run can only get further by one step.
        seen = {target: visible_rows(arena, target) for target in sorted(kind.targets, key=lambda one: not one.other)}
        state = read_state(arena.store, request.job)
    for target, rows in seen.items():
        allowed = [target.expected(state.rows(kind, number)) for number in _allowed_checkpoints(target, state)]
        if target.early and state.checkpoint < undisturbed.checkpoint:
            allowed.append(target.expected(undisturbed.rows(kind, state.checkpoint + 1)))
        assert rows in allowed, (
            f"{target.uid} shows {sorted(rows.elements())} at checkpoint {state.checkpoint}, which is no union of"
            f" complete checkpoints: {[sorted(one.elements()) for one in allowed]}"
        )


def _allowed_checkpoints(target: Target, state: State) -> list[int]:
    # With the look at the other database a moment earlier, the head may have moved once in between.
    lag = int(target.late) + int(target.other)
    return list(range(max(0, state.checkpoint - lag), state.checkpoint + 1))


# --- after the job was run again --------------------------------------------------------------------------------------


def check_done(arena: Arena, request: RunRequest, undisturbed: State) -> State:
    """Everything is there once, nothing is left over, and the records tell the truth."""
    kind = ALL_KINDS[request.kind]
    state = read_state(arena.store, request.job)
    assert state.offsets[-1] == undisturbed.offsets[-1], "positions differ from those of an undisturbed run"
    for target in kind.targets:
        expected = target.expected(state.rows(kind, state.checkpoint))
        rows = visible_rows(arena, target)
        lost, excess = expected - rows, rows - expected
        assert not lost, f"{target.uid} lost {sorted(lost.elements())}"
        assert not excess, f"{target.uid} has too much {sorted(excess.elements())}"
    check_operators(arena, kind, state)
    check_records(arena, kind, state)
    check_nothing_left(arena)
    return state


def is_done(arena: Arena, request: RunRequest, undisturbed: State) -> bool:
    """Whether everything is read, recorded and visible."""
    kind = ALL_KINDS[request.kind]
    state = read_state(arena.store, request.job)
    if state.offsets[-1] != undisturbed.offsets[-1]:
        return False
    rows = state.rows(kind, state.checkpoint)
    return all(visible_rows(arena, target) == target.expected(rows) for target in kind.targets)


def check_operators(arena: Arena, kind: Kind, state: State) -> None:
    """What operators have stored is what the rows of the last checkpoint come to, and no row of it is superfluous."""
    for uid, expected in kind.states.items():
        found = stored_state(arena.store, state.job_id, uid)
        assert found == expected(state.rows(kind, state.checkpoint)), f"{uid} remembers {found}"


def stored_state(connection: Connection, job_id: str, uid: str) -> set[tuple[Any, ...]]:
    """The newest row of each key, read without the engine's own way of restoring."""
    chunks = connection.execute(
        "SELECT key_group, sequence, content FROM etl.state JOIN etl.head USING (job_id, incarnation)"
        " WHERE job_id = %s AND uid = %s"
        " ORDER BY key_group, state.checkpoint_id",
        [job_id, uid],
    )
    found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    group_of: dict[tuple[Any, ...], int] = {}
    for key_group, sequence, content in chunks:
        rows = decode_rows(content)
        keys = sum(name.startswith("key:") for name in rows.schema.names)
        if sequence == 0:
            found = {key: row for key, row in found.items() if group_of[key] != key_group}
        for removed, *values in zip(*(column.to_pylist() for column in rows.columns), strict=True):
            key = tuple(values[:keys])
            assert group_of.setdefault(key, key_group) == key_group, f"key {key} is in two key groups"
            found[key] = tuple(values)
            if removed:
                del found[key]
    return set(found.values())


def check_records(arena: Arena, kind: Kind, state: State) -> None:
    """The record of checkpoints and runs agrees with the head and with itself."""
    numbers = _column(
        arena.store, "SELECT checkpoint_id FROM etl.checkpoint WHERE job_id = %s ORDER BY 1", state.job_id
    )
    assert numbers == list(range(1, state.checkpoint + 1)), "the history of checkpoints has gaps"
    epochs = _column(
        arena.store, "SELECT epoch FROM etl.checkpoint WHERE job_id = %s ORDER BY checkpoint_id", state.job_id
    )
    assert epochs == sorted(epochs), "epochs went back"
    for table in ("checkpoint", "run"):
        query = sql.SQL("SELECT sum(rows_read)::int8 FROM etl.{} WHERE job_id = %s").format(sql.Identifier(table))
        assert _column(arena.store, query, state.job_id) == [kind.rows], f"etl.{table} does not count every row once"
    _check_ledger(arena, state)
    assert _column(arena.store, "SELECT owner_pid FROM etl.head WHERE job_id = %s", state.job_id) == [None]
    running = "SELECT run_id FROM etl.run WHERE job_id = %s AND status = 'running'"
    assert _column(arena.store, running, state.job_id) == [], "a run that has ended counts as running"


def _check_ledger(arena: Arena, state: State) -> None:
    """Every recorded unit is in the ledger of its target, and nothing else is."""
    unit = "sink_id, checkpoint_id, epoch, rows"
    units = f"SELECT {unit} FROM etl.committable JOIN etl.sink USING (job_id, uid) WHERE job_id = %s"
    recorded = arena.store.execute(units, [state.job_id]).fetchall()
    ledger = f"SELECT {unit} FROM etl.commit_ledger WHERE job_id = %s"
    committed = [row for one in (arena.store, arena.other) for row in one.execute(ledger, [state.job_id]).fetchall()]
    assert sorted(committed) == sorted(recorded), "ledger and completed checkpoints differ"


def check_nothing_left(arena: Arena) -> None:
    """No prepared transaction, no lock of one, no row in the log, no session."""
    for connection in (arena.store, arena.other):
        prepared = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        assert _column(connection, prepared) == [], "prepared transactions are left"
        locks = (
            "SELECT l.relation::regclass::text FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
            " WHERE d.datname = current_database() AND l.pid IS NULL"
        )
        assert _column(connection, locks) == [], "locks of a prepared transaction"
        check_sessions_gone(connection)
    assert _column(arena.store, "SELECT count(*) FROM etl.write_ahead_log") == [0], "rows are left in the log"


def sessions(connection: Connection) -> list[str]:
    """Sessions of runs in this database."""
    query = (
        "SELECT application_name || ': ' || coalesce(state, '?') FROM pg_stat_activity"
        " WHERE datname = current_database() AND starts_with(application_name, 'etl:')"
    )
    return _column(connection, query)


def check_sessions_gone(connection: Connection) -> None:
    """The server notices the end of a client a moment later."""
    wait_until(lambda: not sessions(connection), "the end of all sessions")


# --- after a run with nothing to do -----------------------------------------------------------------------------------


def check_idle(arena: Arena, request: RunRequest, before: State) -> None:
    """A further run reads and writes nothing."""
    kind = ALL_KINDS[request.kind]
    rows = {target: visible_rows(arena, target) for target in kind.targets}
    result = arena.finish(request)
    assert (result.rows_read, sum(result.rows_written.values())) == (0, 0)
    assert read_state(arena.store, request.job) == before
    assert {target: visible_rows(arena, target) for target in kind.targets} == rows
    check_nothing_left(arena)


def _column(connection: Connection, query: sql.Composed | str, *parameters: object) -> list[Any]:
    with psycopg.Cursor(connection, row_factory=scalar_row) as cursor:
        return cursor.execute(sql.SQL(query) if isinstance(query, str) else query, parameters).fetchall()
