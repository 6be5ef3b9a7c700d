"""Rows of the schema ``etl`` edited by hand, in the middle of a run or between two: refused by name, or exact."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from etl.store.tables import COMMITTABLE_DIGEST, POSITION_DIGEST
from tests.faults import oracle
from tests.faults.arena import Arena
from tests.faults.cases import THOROUGH, Undisturbed
from tests.faults.fault import Action, Fault, RunRequest
from tests.faults.jobs import KINDS
from tests.faults.oracle import State

EXACT, STATE, FENCED = 0, 70, 78
KIND_NAMES = ("transactional", "two-phase", "write-ahead", "upsert")
STAGED = ("two-phase", "write-ahead")
MINE = "job_id = (SELECT job_id FROM etl.job WHERE name = '{job}')"


@dataclass(frozen=True, slots=True)
class Edit:
    """What somebody does.

    Attributes:
        statement: ``{mine}`` selects the job's rows.
        exit_codes: Of the runs from then on; the last one is exact when it exits with 0.
        told: What the last error says.
        kinds: The jobs that have such rows.
    """

    statement: str
    exit_codes: tuple[int, ...]
    told: str = ""
    kinds: Sequence[str] = KIND_NAMES


WHILE_RUNNING = {
    "epoch lowered": Edit("UPDATE etl.head SET epoch = 0 WHERE {mine}", (FENCED, STATE), "gave out epoch 1"),
    "epoch negative": Edit("UPDATE etl.head SET epoch = -5 WHERE {mine}", (FENCED, STATE), "gave out epoch -4"),
    "epoch raised": Edit("UPDATE etl.head SET epoch = 99 WHERE {mine}", (FENCED, EXACT)),
    "head set back": Edit("UPDATE etl.head SET checkpoint_id = 0 WHERE {mine}", (FENCED, STATE), "names checkpoint 0"),
    "head negative": Edit(
        "UPDATE etl.head SET checkpoint_id = -1 WHERE {mine}", (FENCED, STATE), "names checkpoint -1"
    ),
    "head set forward": Edit(
        "UPDATE etl.head SET checkpoint_id = 7 WHERE {mine}", (FENCED, STATE), "names checkpoint 7"
    ),
    "head deleted": Edit("DELETE FROM etl.head WHERE {mine}", (FENCED, STATE), "has vanished"),
    "incarnation raised": Edit(
        "UPDATE etl.head SET incarnation = 2 WHERE {mine}", (EXACT, STATE), "checkpoint 3 of incarnation 2"
    ),
    "owner forgotten": Edit(
        "UPDATE etl.head SET owner_pid = NULL, owner_backend_start = NULL, owner_host = NULL WHERE {mine}",
        (EXACT, EXACT),
    ),
    "heartbeat negative": Edit("UPDATE etl.head SET heartbeat = -9 WHERE {mine}", (EXACT, EXACT)),
    "failures negative": Edit("UPDATE etl.head SET failures = -1000000 WHERE {mine}", (EXACT, EXACT)),
    "checkpoints deleted": Edit("DELETE FROM etl.checkpoint WHERE {mine}", (EXACT, STATE), "etl.position: checkpoint"),
    "positions deleted": Edit("DELETE FROM etl.position WHERE {mine}", (EXACT, STATE), "etl.position: checkpoint 1"),
    "handles deleted": Edit("DELETE FROM etl.committable WHERE {mine}", (EXACT, EXACT), kinds=STAGED),
    "ledger deleted": Edit("DELETE FROM etl.commit_ledger WHERE {mine}", (EXACT, EXACT), kinds=STAGED),
    "run deleted": Edit(
        # As a superuser can, past the foreign key.
        "SET session_replication_role = replica; DELETE FROM etl.run WHERE {mine};"
        " SET session_replication_role = origin",
        (STATE, EXACT),
        "recording checkpoint 2: 23503",
    ),
}
"""After the first of three checkpoints."""


def position(value: str, *, forged: bool = True) -> str:
    """Give the newest position another value."""
    newest = "WHERE {mine} AND checkpoint_id = 2"
    forge = f"; UPDATE etl.position SET digest = {POSITION_DIGEST} {newest}"
    return f"UPDATE etl.position SET position = {value} {newest}" + forge * forged


def offset(value: str) -> str:
    """Give the newest position another offset."""
    return position(f"jsonb_set(position, '{{offset}}', {value})")


def handle(change: str, *, forged: bool = True) -> str:
    """Change the handle of the newest checkpoint."""
    newest = "WHERE {mine} AND checkpoint_id = 2"
    forge = f"; UPDATE etl.committable SET digest = {COMMITTABLE_DIGEST} {newest}"
    return f"UPDATE etl.committable SET {change} {newest}" + forge * forged


BETWEEN_RUNS = {
    "fence lowered": Edit("UPDATE etl.fence SET epoch = 0 WHERE {mine}", (EXACT,), kinds=("transactional", "upsert")),
    "fence negative": Edit("UPDATE etl.fence SET epoch = -9 WHERE {mine}", (EXACT,), kinds=("write-ahead", "upsert")),
    "fence raised": Edit(
        "UPDATE etl.fence SET epoch = 99 WHERE {mine}",
        (STATE, STATE),
        "etl.fence of a database is ahead",
        ("transactional", "upsert"),
    ),
    "fence deleted": Edit("DELETE FROM etl.fence WHERE {mine}", (EXACT,), kinds=("write-ahead", "transactional")),
    "position empty": Edit(position("'{}'"), (STATE,), "the stored position is not one of a file"),
    "position a list": Edit(position("'[]'"), (STATE,), "is no object"),
    "position null": Edit(position("'null'"), (STATE,), "is no object"),
    "position null and unsealed": Edit(position("'null'", forged=False), (STATE,), "is not the one that was written"),
    "position of the checkpoint before": Edit(
        position("(SELECT position FROM etl.position WHERE {mine} AND checkpoint_id = 1)", forged=False),
        (STATE,),
        'etl.position: that of source "orders", split "',
    ),
    "position with the digest of the checkpoint before": Edit(
        "UPDATE etl.position SET (position, digest) ="
        " (SELECT position, digest FROM etl.position WHERE {mine} AND checkpoint_id = 1)"
        " WHERE {mine} AND checkpoint_id = 2",
        (STATE,),
        'etl.position: that of source "orders", split "',
    ),
    "position without number": Edit(offset("""'"x"'"""), (STATE,), "the stored position is not one of a file"),
    "position negative": Edit(offset("'-5'"), (STATE,), "the stored position contradicts itself"),
    "position at the start": Edit(offset("'0'"), (STATE,), "the stored position contradicts itself"),
    "position a row before": Edit(
        offset("to_jsonb((position ->> 'offset')::int - 8)"), (STATE,), "the stored position contradicts"
    ),
    "position beyond the end": Edit(offset("'99999'"), (STATE,), "was truncated or replaced"),
    "position of another source": Edit(
        f"UPDATE etl.position SET uid = 'orders2' WHERE {{mine}}; UPDATE etl.position SET digest = {POSITION_DIGEST}",
        (STATE,),
        "a renamed source would read everything again",
    ),
    "position nobody counted": Edit(
        "INSERT INTO etl.position SELECT job_id, incarnation, 'nobody', split_id, 1, position, digest"
        f" FROM etl.position WHERE {{mine}} LIMIT 1; UPDATE etl.position SET digest = {POSITION_DIGEST}",
        (STATE,),
        "etl.position: checkpoint 1 has counted 1 rows, and 2 are there",
    ),
    "payload empty": Edit(handle("payload = '{}'"), (STATE,), "may have uncommitted rows", STAGED),
    "payload a list": Edit(handle("payload = '[1]'"), (STATE,), "is no object", STAGED),
    "payload null": Edit(handle("payload = 'null'"), (STATE,), "is no object", STAGED),
    "handle of fewer rows": Edit(
        handle("rows = 1", forged=False), (STATE,), 'etl.committable: that of sink "appended", checkpoint 2', STAGED
    ),
    "payload of another gid": Edit(
        handle("""payload = payload || '{"gid": "etl:nonsense"}'"""), (STATE,), "ALARM", ("two-phase",)
    ),
    "handle of another epoch": Edit(handle("epoch = 77"), (STATE,), "ALARM", STAGED),
    "handle of another subtask": Edit(handle("subtask = 9"), (STATE,), "ALARM", STAGED),
    "handle of another sink": Edit(handle("uid = 'nobody'"), (STATE,), "may have uncommitted rows", STAGED),
    "handle of more rows": Edit(handle("rows = 999"), (STATE,), "ALARM", ("write-ahead",)),
    "units uncounted": Edit("UPDATE etl.checkpoint SET units = 0 WHERE {mine}", (STATE,), "has counted 0 rows", STAGED),
    "epoch of a checkpoint": Edit("UPDATE etl.checkpoint SET epoch = 99 WHERE {mine}", (STATE,), "never used twice"),
    "sink renumbered": Edit("UPDATE etl.sink SET sink_id = 5 WHERE {mine}", (STATE,), "ALARM", STAGED),
    "sink deleted": Edit("DELETE FROM etl.sink WHERE {mine}", (EXACT,)),
    "log of another epoch": Edit(
        "UPDATE etl.write_ahead_log SET epoch = 50 WHERE {mine}", (STATE,), "ALARM", ("write-ahead",)
    ),
    "log made nonsense": Edit(
        "UPDATE etl.write_ahead_log SET segment = '\\x00' WHERE {mine}",
        (STATE,),
        'etl.write_ahead_log: a segment of sink "appended", checkpoint 2',
        ("write-ahead",),
    ),
}
"""After a run that was killed with the second of three checkpoints completed and not yet visible."""


def combinations(edits: dict[str, Edit]) -> list[tuple[str, str]]:
    """Each edit with each job that it makes sense for, or with one of them in turn."""
    turns = itertools.count()
    return [
        (name, kind)
        for name, edit in edits.items()
        for kind in (edit.kinds if THOROUGH else [edit.kinds[next(turns) % len(edit.kinds)]])
    ]


@pytest.mark.parametrize("name, kind", combinations(WHILE_RUNNING))
def test_edit_while_a_run_is_at_work(arena: Arena, undisturbed: Undisturbed, name: str, kind: str) -> None:
    edit, expected = WHILE_RUNNING[name], undisturbed.state(kind)
    request = arena.case(kind, Fault(Action.ASK, "commit.end"), restarts=2)
    with arena.told(request):
        run = arena.spawn(request)
        assert run.asked() is not None
        apply(arena, edit, request)
        run.answer()
        result = run.end(edit.exit_codes[0])

        if len(edit.exit_codes) == 1 or edit.exit_codes[0] == STATE:
            assert edit.told in result.error
        require_no_row_wrong(arena, request, expected, done=result.exit_code == EXACT)
        go_on(arena, edit, edit.exit_codes[1:], request, expected)


@pytest.mark.parametrize("name, kind", combinations(BETWEEN_RUNS))
def test_edit_between_two_runs(arena: Arena, undisturbed: Undisturbed, name: str, kind: str) -> None:
    edit, expected = BETWEEN_RUNS[name], undisturbed.state(kind)
    request = arena.case(kind, Fault(Action.KILL, "checkpoint.completed", 2), restarts=2)
    with arena.told(request):
        assert arena.run(request) is None
        # What the killed run has left open would be waited for, and is none of this test's business.
        oracle.check_sessions_gone(arena.store)
        apply(arena, edit, request)
        go_on(arena, edit, edit.exit_codes, request, expected)


def apply(arena: Arena, edit: Edit, request: RunRequest) -> None:
    """Do it."""
    arena.store.execute(edit.statement.replace("{mine}", MINE.format(job=request.job)).encode())


def go_on(arena: Arena, edit: Edit, exit_codes: Sequence[int], request: RunRequest, expected: State) -> None:
    """Run until the codes are used up; no run may show a row that an undisturbed one would not show."""
    for exit_code in exit_codes:
        result = arena.again(request.without_faults())
        assert result is not None
        assert result.exit_code == exit_code, result.trace
        if exit_code != EXACT:
            assert edit.told in result.error
            assert result.count("source.batch") == 0
        require_no_row_wrong(arena, request, expected, done=exit_code == EXACT)


def require_no_row_wrong(arena: Arena, request: RunRequest, expected: State, *, done: bool) -> None:
    """The target holds whole checkpoints of an undisturbed run; all of them when the job is done."""
    (target,) = KINDS[request.kind].targets
    rows = oracle.visible_rows(arena, target)
    numbers = [expected.checkpoint] if done else range(expected.checkpoint + 1)
    assert rows in [target.expected(expected.rows(KINDS[request.kind], number)) for number in numbers]
