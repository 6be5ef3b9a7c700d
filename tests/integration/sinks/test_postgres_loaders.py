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


@pytest.fixture
def stage(store_url: str) -> Iterator[Stage]:
    stage = Stage(store_url)
    # A statement trigger that notes which statement wrote rows: COPY counts as INSERT, so the query itself is noted.
    stage.admin.execute("CREATE TABLE kept (id int8 PRIMARY KEY, note text UNIQUE)")
    stage.admin.execute("CREATE TABLE statement (number int8 GENERATED ALWAYS AS IDENTITY, kind text)")
    stage.admin.execute(
        "CREATE FUNCTION note_statement() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN INSERT INTO statement (kind) VALUES (split_part(current_query(), ' ', 1)); RETURN NULL; END$$"
    )
    stage.admin.execute("CREATE TRIGGER t AFTER INSERT ON kept EXECUTE FUNCTION note_statement()")
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


def test_old_keys_are_found_and_inserted_without_a_bet(stage: Stage) -> None:
    _load(stage, UpsertLoader(_plan(stage)), _batch(range(100), "old"))
    written_by = _load(stage, UpsertLoader(_plan(stage)), _batch(range(100), "new"))
    assert written_by == ["INSERT"]
    assert _rows(stage) == [(number, f"new{number}") for number in range(100)]


def test_one_old_key_among_many_new_ones_loses_the_bet(stage: Stage) -> None:
    unprobed = 2 * PROBED_KEYS - 1
    _load(stage, UpsertLoader(_plan(stage)), _batch([unprobed], "old"))
    ids = range(10 * PROBED_KEYS)
    assert unprobed % (len(ids) // PROBED_KEYS) != 0
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
