"""The loader for upserts: it bets on new rows, and a lost bet costs time only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psycopg
import pyarrow as pa
import pytest

from etl.errors import RecordError
from etl.schema import Schema
from etl.transaction import transaction
from sinks import PostgresTable
from sinks.postgres_loaders import PROBED_KEYS, UpsertLoader, chunked_loader, streaming_loader
from sinks.postgres_writer import ArrayInsert, ChunkedCopy, Loader, StreamingCopy, WritePlan
from tests.support_sinks.stage import Stage

SCHEMA = Schema.declare({"id": "int8", "note": "text"})
UNPROBED = 2 * PROBED_KEYS - 1
"""Of ten times as many keys as are probed, one that is not: every tenth is."""
assert UNPROBED % 10 != 0


@pytest.fixture
def stage(store_url: str) -> Iterator[Stage]:
    stage = Stage(store_url)
    # A statement trigger that notes which statement wrote rows: COPY counts as INSERT, so the query itself is noted.
    stage.admin.execute("CREATE TABLE kept (id int8 PRIMARY KEY, note text UNIQUE)")
    stage.admin.execute("CREATE TABLE statement (number int8 GENERATED ALWAYS AS IDENTITY, kind text)")
    stage.admin.execute(
        "CREATE FUNCTION note_statement() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN IF split_part(current_query(), ' ', 1) IN (TG_OP, 'COPY') THEN"
        " INSERT INTO statement (kind) VALUES (split_part(current_query(), ' ', 1)); END IF; RETURN NULL; END$$"
    )
    stage.admin.execute("CREATE TRIGGER t AFTER INSERT OR UPDATE ON kept EXECUTE FUNCTION note_statement()")
    yield stage
    stage.close()


def _plan(stage: Stage, *, key: Sequence[str] = ("id",)) -> WritePlan:
    return WritePlan.make(stage.admin, "out", PostgresTable("kept", key=key or None), SCHEMA)


def _batch(ids: Sequence[int], prefix: str = "n") -> pa.RecordBatch:
    columns = [pa.array(ids, pa.int64()), pa.array([f"{prefix}{number}" for number in ids], pa.string())]
    return pa.RecordBatch.from_arrays(columns, names=["id", "note"])


def _load(stage: Stage, loader: Loader, *chunks: pa.RecordBatch) -> list[str]:
    """Load chunks in one transaction; returns the statements that wrote rows."""
    stage.admin.execute("TRUNCATE statement")
    with transaction(stage.admin):
        for chunk in chunks:
            loader.load(stage.admin, chunk)
        loader.end()
    return [str(kind) for kind in stage.scalars("SELECT kind FROM statement ORDER BY number")]


def _rows(stage: Stage) -> list[tuple[int, str]]:
    return [tuple(row) for row in stage.admin.execute("SELECT id, note FROM kept ORDER BY id").fetchall()]


def test_new_keys_are_copied(stage: Stage) -> None:
    written_by = _load(stage, UpsertLoader(_plan(stage)), _batch(range(100)), _batch(range(100, 200)))
    assert written_by == ["COPY", "COPY"]
    assert _rows(stage) == [(number, f"n{number}") for number in range(200)]


def test_old_keys_are_updated(stage: Stage) -> None:
    _load(stage, UpsertLoader(_plan(stage)), _batch(range(100), "old"))
    written_by = _load(stage, UpsertLoader(_plan(stage)), _batch(range(100), "new"), _batch(range(50), "newer"))
    assert written_by == ["UPDATE", "UPDATE"]
    assert _rows(stage) == [(n, f"newer{n}" if n < 50 else f"new{n}") for n in range(100)]


def test_mixture_is_inserted_without_a_bet(stage: Stage) -> None:
    _load(stage, UpsertLoader(_plan(stage)), _batch(range(0, 100, 3), "old"))
    written_by = _load(stage, UpsertLoader(_plan(stage)), _batch(range(100)))
    assert written_by == ["INSERT"]
    assert _rows(stage) == [(number, f"n{number}") for number in range(100)]


def test_one_new_key_among_many_old_ones_loses_the_bet(stage: Stage) -> None:
    ids = range(10 * PROBED_KEYS)
    _load(stage, UpsertLoader(_plan(stage)), _batch([number for number in ids if number != UNPROBED], "old"))
    written_by = _load(stage, UpsertLoader(_plan(stage)), _batch(ids, "new"))
    assert written_by == ["INSERT"]
    assert _rows(stage) == [(number, f"new{number}") for number in ids]


def test_planner_is_left_as_it_was_after_an_update(stage: Stage) -> None:
    _load(stage, UpsertLoader(_plan(stage)), _batch(range(100)))
    loader = UpsertLoader(_plan(stage))
    with transaction(stage.admin):
        loader.load(stage.admin, _batch(range(100)))
        settings = [stage.scalars(f"SHOW enable_{kind}join") for kind in ("hash", "merge")]
    assert settings == [["on"], ["on"]]


def test_trigger_that_changes_rows_sees_all_of_them_as_inserted(stage: Stage) -> None:
    _load(stage, UpsertLoader(_plan(stage)), _batch(range(3), "old"))
    stage.admin.execute(
        "CREATE FUNCTION loud() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN NEW.note = upper(NEW.note); RETURN NEW; END$$"
    )
    stage.admin.execute("CREATE TRIGGER loud BEFORE INSERT ON kept FOR EACH ROW EXECUTE FUNCTION loud()")
    assert _load(stage, UpsertLoader(_plan(stage)), _batch(range(3), "new")) == ["INSERT"]
    assert _rows(stage) == [(0, "NEW0"), (1, "NEW1"), (2, "NEW2")]


def test_version_guard_decides_row_by_row(stage: Stage) -> None:
    stage.admin.execute("CREATE TABLE guarded (id int8 PRIMARY KEY, note text, seen int8)")
    schema = Schema.declare({"id": "int8", "note": "text", "seen": "int8"})
    table = PostgresTable("guarded", key=["id"], version="seen")
    plan = WritePlan.make(stage.admin, "out", table, schema)
    for seen, note in (([1, 5], "first"), ([3, 3], "second")):
        columns = [pa.array([1, 2], pa.int64()), pa.array([note, note]), pa.array(seen, pa.int64())]
        _load(stage, UpsertLoader(plan), pa.RecordBatch.from_arrays(columns, names=["id", "note", "seen"]))
    found = stage.admin.execute("SELECT id, note, seen FROM guarded ORDER BY id").fetchall()
    assert [tuple(row) for row in found] == [(1, "second", 3), (2, "first", 5)]


def test_one_old_key_among_many_new_ones_loses_the_bet(stage: Stage) -> None:
    _load(stage, UpsertLoader(_plan(stage)), _batch([UNPROBED], "old"))
    ids = range(10 * PROBED_KEYS)
    written_by = _load(stage, UpsertLoader(_plan(stage)), _batch(ids))
    assert written_by == ["INSERT"]
    assert _rows(stage) == [(number, f"n{number}") for number in ids]


def test_bets_are_made_less_often_after_each_lost_one(stage: Stage) -> None:
    size = 10 * PROBED_KEYS
    chunks = [range(start, start + size) for start in range(0, 6 * size, size)]
    lost = [chunks[0][1], chunks[2][1]]
    _load(stage, UpsertLoader(_plan(stage)), _batch(lost, "old"))
    written_by = _load(stage, UpsertLoader(_plan(stage)), *map(_batch, chunks))
    # Lost at the first, then one without a bet; lost at the third, then two without; won at the sixth.
    assert written_by == ["INSERT", "INSERT", "INSERT", "INSERT", "INSERT", "COPY"]
    assert _rows(stage) == [(number, f"n{number}") for number in range(6 * size)]


def test_last_row_of_a_key_wins_when_copied(stage: Stage) -> None:
    ids = pa.array([2, 1, 2], pa.int64())
    batch = pa.RecordBatch.from_arrays([ids, pa.array(["first", "only", "last"])], names=["id", "note"])
    assert _load(stage, UpsertLoader(_plan(stage)), batch) == ["COPY"]
    assert _rows(stage) == [(1, "only"), (2, "last")]


def test_other_unique_index_is_an_error_whichever_way_rows_go(stage: Stage) -> None:
    _load(stage, UpsertLoader(_plan(stage)), _batch([1]))
    batch = pa.RecordBatch.from_arrays([pa.array([2], pa.int64()), pa.array(["n1"])], names=["id", "note"])
    with pytest.raises(RecordError, match="kept_note_key"):
        _load(stage, UpsertLoader(_plan(stage)), batch)
    assert _rows(stage) == [(1, "n1")]


def test_row_of_another_session_loses_the_bet(stage: Stage, store_url: str) -> None:
    loader = UpsertLoader(_plan(stage))
    with transaction(stage.admin):
        stage.admin.execute("SELECT count(*) FROM kept")
        with psycopg.connect(store_url, autocommit=True) as other:
            other.execute("INSERT INTO kept VALUES (33, 'other')")
        loader.load(stage.admin, _batch(range(320)))
    assert _rows(stage) == [(number, f"n{number}") for number in range(320)]


@pytest.mark.parametrize(
    ("key", "own", "shared"), [(("id",), UpsertLoader, UpsertLoader), ((), StreamingCopy, ChunkedCopy)]
)
def test_loader_follows_from_the_table(
    stage: Stage, key: Sequence[str], own: type[Loader], shared: type[Loader]
) -> None:
    plan = _plan(stage, key=key)
    assert (type(streaming_loader(plan)), type(chunked_loader(plan))) == (own, shared)


def test_arrays_that_copy_cannot_carry_are_inserted(stage: Stage) -> None:
    stage.admin.execute("CREATE TABLE listed (id int8 PRIMARY KEY, ids uuid[])")
    schema = Schema.declare({"id": "int8", "ids": "uuid[]"})
    plan = WritePlan.make(stage.admin, "out", PostgresTable("listed", key=["id"]), schema)
    assert type(streaming_loader(plan)) is ArrayInsert
