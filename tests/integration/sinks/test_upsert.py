"""Upserts: the last row of a key wins, whatever the borders of batches, chunks and units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest

from etl.errors import ConfigurationError, RecordError
from etl.schema import Schema
from etl.sink import Sink
from etl.testing.sink_contract import batch_of
from sinks import PostgresTable, TransactionalSink, TwoPhaseCommitSink, UpsertSink
from tests.support_sinks.stage import Stage


def _batch(schema: Schema, columns: Mapping[str, Sequence[Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(dict(columns), schema=schema.to_arrow())


def _upsert(stage: Stage, table: PostgresTable, *batches: Mapping[str, Sequence[Any]], epoch: int = 1) -> None:
    sink: Sink = UpsertSink(table)
    context = stage.context(epoch)
    sink.fence(context)
    writer = sink.create_writer(context)
    try:
        for number, columns in enumerate(batches):
            writer.write(_batch(stage.schema, columns))
            assert writer.prepare_commit(number + 1) is None
    finally:
        writer.close()


def test_last_row_of_a_key_wins_within_a_batch_and_across_batches(stage: Stage) -> None:
    _upsert(
        stage,
        PostgresTable("out", key=["id"]),
        {"id": [2, 1, 1, 1], "note": ["b", "x", "y", "z"]},
        {"id": [1, 3], "note": [None, "c"]},
    )
    assert stage.fetch("SELECT id, note FROM out ORDER BY id") == [(1, None), (2, "b"), (3, "c")]


def test_replay_with_other_borders_ends_in_the_same_state(stage: Stage) -> None:
    table = PostgresTable("out", key=["id"])
    _upsert(stage, table, {"id": [1, 2], "note": ["a", "b"]}, {"id": [1], "note": ["c"]})
    _upsert(stage, table, {"id": [1], "note": ["a"]}, {"id": [2, 1], "note": ["b", "c"]}, epoch=2)
    assert stage.fetch("SELECT id, note FROM out ORDER BY id") == [(1, "c"), (2, "b")]


def test_only_the_columns_of_the_stream_are_written(stage: Stage) -> None:
    stage.admin.execute("ALTER TABLE out ADD COLUMN mine int NOT NULL DEFAULT 7")
    stage.admin.execute("INSERT INTO out VALUES (1, 'old', 42)")
    _upsert(stage, PostgresTable("out", key=["id"]), {"id": [1, 2], "note": ["new", "new"]})
    assert stage.fetch("SELECT id, note, mine FROM out ORDER BY id") == [(1, "new", 42), (2, "new", 7)]


def test_version_keeps_a_row_from_going_back(stage: Stage) -> None:
    stage.schema = Schema.declare({"id": "int8", "note": "text", "v": "int4"})
    stage.admin.execute("ALTER TABLE out ADD COLUMN v int4")
    stage.admin.execute("INSERT INTO out VALUES (4, 'unversioned', NULL)")
    table = PostgresTable("out", key=["id"], version="v")
    assert UpsertSink(table).monotone
    _upsert(
        stage,
        table,
        {"id": [1, 1, 1, 2, 3], "note": ["old", "new", "same", "a", "n"], "v": [1, 3, 3, 5, None]},
        {"id": [1, 2, 3, 4], "note": ["older", "b", "m", "given"], "v": [2, 5, 1, 1]},
    )
    assert stage.fetch("SELECT id, note, v FROM out ORDER BY id") == [
        (1, "same", 3),
        (2, "b", 5),
        (3, "m", 1),
        (4, "given", 1),
    ]


def test_table_of_keys_alone_keeps_what_is_there(stage: Stage) -> None:
    stage.schema = Schema.declare({"a": "int8", "b": "text"})
    stage.admin.execute("CREATE TABLE link (a int8, b text, PRIMARY KEY (b, a))")
    columns: dict[str, Sequence[Any]] = {"a": [1, 1, 2], "b": ["x", "x", "x"]}
    _upsert(stage, PostgresTable("link", key=["a", "b"]), columns, columns)
    assert stage.fetch("SELECT a, b FROM link ORDER BY a") == [(1, "x"), (2, "x")]


def test_keys_that_differ_in_case_are_one_key_to_citext(stage: Stage) -> None:
    stage.schema = Schema.declare({"id": "text", "n": "int4"})
    stage.admin.execute("CREATE EXTENSION citext")
    stage.admin.execute("CREATE TABLE ci (id citext PRIMARY KEY, n int4)")
    _upsert(stage, PostgresTable("ci", key="id"), {"id": ["Ab", "aB"], "n": [1, 2]})
    assert stage.fetch("SELECT id, n FROM ci") == [("aB", 2)]


def test_null_in_the_key_is_refused(stage: Stage) -> None:
    with pytest.raises(RecordError, match='key column "id": a row has no value') as caught:
        _upsert(stage, PostgresTable("out", key=["id"]), {"id": [1, None], "note": ["a", "b"]})
    assert caught.value.uid == "out"
    assert stage.fetch("SELECT * FROM out") == []


def test_null_in_the_key_is_kept_where_nulls_are_equal(stage: Stage) -> None:
    stage.admin.execute("CREATE TABLE nulls (id int8, note text, UNIQUE NULLS NOT DISTINCT (id))")
    columns: dict[str, Sequence[Any]] = {"id": [None, None], "note": ["a", "b"]}
    _upsert(stage, PostgresTable("nulls", key=["id"]), columns, columns)
    assert stage.fetch("SELECT id, note FROM nulls") == [(None, "b")]


def test_names_that_need_quotes_work(stage: Stage) -> None:
    stage.schema = Schema.declare({"select": "int8", 'a"b': "text", "%s": "text", "Ü 😀": "text[]"})
    table = PostgresTable("Order.Lines", schema="public", key=["select"], create=True)
    UpsertSink(table).prepare_target(stage.preflight_context())
    _upsert(stage, table, {"select": [1], 'a"b': ["x"], "%s": ["y"], "Ü 😀": [["z", None]]})
    assert stage.fetch('SELECT * FROM public."Order.Lines"') == [(1, "x", "y", ["z", None])]


def test_violation_of_a_second_unique_constraint_is_a_record_error(stage: Stage) -> None:
    stage.admin.execute("ALTER TABLE out ADD UNIQUE (note)")
    with pytest.raises(RecordError, match="23505"):
        _upsert(stage, PostgresTable("out", key=["id"]), {"id": [1, 2], "note": ["a", "a"]})


def test_more_rows_than_a_chunk_arrive_exactly(stage: Stage) -> None:
    rows = 70_000
    given = {"id": [*range(rows), *range(rows)], "note": ["old"] * rows + ["new"] * rows}
    _upsert(stage, PostgresTable("out", key=["id"]), given)
    assert stage.fetch("SELECT count(*), count(*) FILTER (WHERE note = 'new'), sum(id) FROM out") == [
        (rows, rows, rows * (rows - 1) // 2)
    ]


def test_unit_is_invisible_until_it_is_flushed_and_visible_after(stage: Stage) -> None:
    sink, context = UpsertSink(PostgresTable("out", key=["id"])), stage.context()
    sink.fence(context)
    writer = sink.create_writer(context)
    writer.write(batch_of(*range(40_000)))
    assert stage.scalars("SELECT count(*) FROM out") == [0]
    writer.prepare_commit(1)
    assert stage.scalars("SELECT count(*) FROM out") == [40_000]
    writer.close()
    names = ["sink.begun", "sink.fenced", "sink.written", "sink.written", "sink.prepare.before", "sink.prepared"]
    assert stage.event_names == names


@pytest.mark.parametrize("sink_class", [TwoPhaseCommitSink, TransactionalSink])
def test_other_sinks_upsert_too(stage: Stage, sink_class: type[TwoPhaseCommitSink | TransactionalSink]) -> None:
    assert sink_class(PostgresTable("out", key=["id"])).exclusive_target == "table public.out"
    assert sink_class(PostgresTable("out")).exclusive_target is None


def test_upsert_sink_refuses_a_table_without_key() -> None:
    with pytest.raises(ConfigurationError, match="UpsertSink needs a key"):
        UpsertSink(PostgresTable("out"))
