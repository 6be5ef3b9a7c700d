"""Somebody reads all the time while runs are killed and repeated: never a row twice, too early, in part or gone."""

from __future__ import annotations

from dataclasses import replace

import psycopg
import pytest

from tests.faults import oracle, steps
from tests.faults.arena import Arena
from tests.faults.cases import SAMPLE, Undisturbed, thorough
from tests.faults.fault import Action, Fault
from tests.faults.jobs import APPEND_TABLE, KINDS, UPSERT_TABLE
from tests.faults.reader import Reader


@pytest.mark.parametrize("kind", KINDS)
def test_undisturbed_run_shows_each_checkpoint_as_a_whole(arena: Arena, undisturbed: Undisturbed, kind: str) -> None:
    count = undisturbed.state(kind).checkpoint
    request = arena.case(kind, *(Fault(Action.ASK, "commit.end", number) for number in range(1, count + 1)))
    with Reader(request) as reader:
        run = arena.spawn(request)
        while run.asked():
            reader.look_again()
            run.answer()
        run.end()

    state = oracle.read_state(arena.store, request.job)
    for target in KINDS[kind].targets:
        wholes = [target.expected(state.rows(KINDS[kind], number)) for number in range(state.checkpoint + 1)]
        assert reader.states[target.uid] == tuple(wholes)


GUARDED = "guarded upsert"
CASES = [*steps.CASES, *((GUARDED, step) for kind, step in steps.CASES if kind == "upsert")]
SEEN = SAMPLE - {"recovery.settled", "sink.fenced"}
"""Steps that differ in what readers may see."""


@pytest.mark.parametrize("kind, step", thorough(CASES, SEEN))
def test_reader_sees_nothing_of_runs_that_are_killed_and_repeated(
    arena: Arena, undisturbed: Undisturbed, kind: str, step: str
) -> None:
    guarded = kind == GUARDED
    kind = "upsert" if guarded else kind
    expected = undisturbed.state(kind)
    occurrence = min(2, undisturbed.result(kind).count(step))
    request = arena.case(kind, guarded=guarded)
    with arena.told(request), Reader(request) as reader:
        # The second one when it has made visible, or dropped, what the first one had left.
        for fault in (Fault(Action.KILL, step, occurrence), Fault(Action.KILL, "recovery.settled")):
            assert arena.again(replace(request, faults=(fault,))) is None, f"{fault}: not reached"
            reader.look_again()
        arena.finish(request)
    oracle.check_done(arena, request, expected)


TWICE = f"INSERT INTO {APPEND_TABLE} SELECT * FROM {APPEND_TABLE} LIMIT 1"
HOLE = f"DELETE FROM {APPEND_TABLE} WHERE id = 3"
IN_PART = f"INSERT INTO {APPEND_TABLE} VALUES (7, 2, 70)"
TOO_EARLY = f"INSERT INTO {APPEND_TABLE} SELECT i, i % 5, i * 10 FROM generate_series(7, 11) AS i"
OLDER_KEY = f"UPDATE {UPSERT_TABLE} SET id = 1, amount = 10 WHERE key = 1"
NEWER_KEYS = (
    f"INSERT INTO {UPSERT_TABLE} SELECT i, i % 5, i * 10 FROM generate_series(7, 11) AS i"
    " ON CONFLICT (key) DO UPDATE SET id = excluded.id, amount = excluded.amount"
)
NEXT_KEYS, FAR_TOO_NEW_KEYS = NEWER_KEYS.replace("(7, 11)", "(7, 8)"), NEWER_KEYS.replace("(7, 11)", "(9, 13)")
OLDER_KEYS = f"UPDATE {UPSERT_TABLE} SET id = id - 5, amount = (id - 5) * 10 WHERE id IN (7, 8, 10, 11)"


@pytest.mark.parametrize(
    "kind, tampering, told",
    [
        # The head is at checkpoint 1, which is the first six rows; the fourth is filtered out.
        ("transactional", [TWICE], "too much"),
        ("transactional", [HOLE], "missing"),
        ("transactional", [IN_PART], "no whole checkpoints"),
        ("transactional", [TOO_EARLY], "no whole checkpoints"),
        ("transactional", [f"TRUNCATE {APPEND_TABLE}"], "no whole checkpoints"),
        ("two-phase", [TOO_EARLY], "no whole checkpoints"),
        ("two-phase", [f"DELETE FROM {APPEND_TABLE}"], "are not there"),
        ("write-ahead", [f"DELETE FROM {APPEND_TABLE}"], "are not there"),
        ("two-phase-upsert", [NEWER_KEYS], "no whole checkpoints"),
        ("two-phase-upsert", [OLDER_KEY], "no whole checkpoints"),
        ("upsert", [OLDER_KEY], "no whole checkpoints"),
        ("upsert", [FAR_TOO_NEW_KEYS], "no whole checkpoints"),
        ("upsert", [f"DELETE FROM {UPSERT_TABLE} WHERE key = 2"], "no whole checkpoints"),
        (GUARDED, [NEXT_KEYS, OLDER_KEYS], "went back"),
        ("transactional", ["UPDATE etl.head SET checkpoint_id = 0"], "the head went back"),
        ("transactional", ["UPDATE etl.head SET epoch = 0"], "the epoch went back"),
        (
            "transactional",
            [
                "UPDATE etl.position SET position = jsonb_set(position, '{offset}', '0')"
                " WHERE jsonb_typeof(position) = 'object'"
            ],
            "the ends of checkpoints were",
        ),
        ("transactional", ["DELETE FROM etl.position"], "the ends of checkpoints were"),
    ],
)
def test_reader_finds(arena: Arena, kind: str, tampering: list[str], told: str) -> None:
    guarded = kind == GUARDED
    request = arena.case("upsert" if guarded else kind, guarded=guarded)
    with pytest.raises(AssertionError, match=told), Reader(request) as reader:
        arena.run(replace(request, faults=(Fault(Action.KILL, "source.barrier", 2),)))
        reader.look_again()
        for statement in tampering:
            arena.store.execute(statement)
            reader.look_again()


def test_reader_lets_unguarded_runs_that_differ_show_older_values_again_but_lose_no_key(arena: Arena) -> None:
    request = arena.case("upsert")
    with Reader(request, cuts_vary=True) as reader:
        arena.run(replace(request, faults=(Fault(Action.KILL, "source.barrier", 2),)))
        for statement in (NEWER_KEYS, OLDER_KEYS):
            arena.store.execute(statement)
            reader.look_again()
    with pytest.raises(AssertionError, match="are not there"), Reader(request, cuts_vary=True) as reader:
        arena.store.execute(f"DELETE FROM {UPSERT_TABLE} WHERE key = 2")
        reader.look_again()


def test_reader_tells_that_the_server_went_away_unless_it_may(arena: Arena) -> None:
    request = arena.case("upsert")
    kick = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'reader'"
    with pytest.raises(psycopg.OperationalError), Reader(request) as reader:
        arena.store.execute(kick)
        reader.look_again()
    with Reader(request, server_may_stop=True) as reader:
        arena.store.execute(kick)
        reader.look_again()
        assert reader.reconnects > 0
