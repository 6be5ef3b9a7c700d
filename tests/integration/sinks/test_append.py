"""Appending: rows arrive exactly once or the unit fails as a whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import LiteralString

import pyarrow as pa
import pytest

from etl.errors import ConfigurationError, FenceBlockedError, FencedError, RecordError, StateError, TransientError
from etl.schema import Schema
from etl.sink import Sink, SinkContext, SinkWriter
from etl.testing.sink_contract import CONTRACT_SCHEMA, batch_of
from sinks import PostgresTable, TransactionalSink, TwoPhaseCommitSink, WriteAheadSink
from tests.support_sinks.stage import Stage

TWO_PHASE = TwoPhaseCommitSink(PostgresTable("out"))


@contextmanager
def _writing(sink: Sink, context: SinkContext) -> Iterator[SinkWriter]:
    sink.fence(context)
    writer = sink.create_writer(context)
    try:
        yield writer
    finally:
        writer.close()


def test_transactional_rows_commit_with_their_checkpoint(stage: Stage) -> None:
    context = stage.context()
    with _writing(TransactionalSink(PostgresTable("out")), context) as writer:
        writer.write(batch_of(1, 2))
        assert writer.prepare_commit(1) is None
        writer.write(batch_of(3))
        assert writer.prepare_commit(2) is None
        assert writer.rows == 3
        assert stage.scalars("SELECT id FROM out") == []
        stage.complete(context, 1)
        assert stage.scalars("SELECT id FROM out ORDER BY id") == [1, 2]
        stage.complete(context, 2)
    assert stage.scalars("SELECT id FROM out ORDER BY id") == [1, 2, 3]


def test_transactional_sink_opens_no_transaction_for_an_empty_unit(stage: Stage) -> None:
    with _writing(TransactionalSink(PostgresTable("out")), stage.context()) as writer:
        writer.write(batch_of())
        writer.prepare_commit(1)
    assert stage.event_names == ["sink.prepared"]


def test_two_phase_unit_announces_each_step(stage: Stage) -> None:
    context = stage.context()
    with _writing(TWO_PHASE, context) as writer:
        writer.write(batch_of(1))
        unit = writer.prepare_commit(1)
    assert unit is not None
    assert unit.payload == {"gid": f"etl:{stage.job_id}:1:1:1:0"}
    assert stage.gids() == [unit.payload["gid"]]
    committer = TWO_PHASE.create_committer(context)
    committer.commit(unit)
    committer.close()
    assert [(name, fields["checkpoint"]) for name, fields in stage.events] == [
        ("sink.begun", 1),
        ("sink.fenced", 1),
        ("sink.written", 1),
        ("sink.prepare.before", 1),
        ("sink.prepared", 1),
        ("commit.before", 1),
        ("commit.after", 1),
    ]


def test_two_phase_unit_with_many_chunks_arrives_exactly(stage: Stage) -> None:
    context = stage.context()
    with _writing(TWO_PHASE, context) as writer:
        for start in range(0, 200_000, 20_000):
            writer.write(batch_of(*range(start, start + 20_000)))
        unit = writer.prepare_commit(1)
    assert unit is not None
    assert unit.rows == 200_000
    committer = TWO_PHASE.create_committer(context)
    committer.commit(unit)
    committer.close()
    assert stage.fetch("SELECT count(*), sum(id), max(note) FROM out") == [(200_000, 19_999_900_000, "note 99999")]


def test_unit_rolled_back_by_hand_raises_the_alarm(stage: Stage) -> None:
    with _writing(TWO_PHASE, stage.context()) as writer:
        writer.write(batch_of(1, 2))
        unit = writer.prepare_commit(1)
    assert unit is not None
    stage.admin.execute(f"ROLLBACK PREPARED '{unit.payload['gid']}'")
    committer = TWO_PHASE.create_committer(stage.context(epoch=2, checkpoint_id=1))
    with pytest.raises(StateError) as caught:
        committer.recover([unit])
    committer.close()
    message = str(caught.value)
    expected = ["ALARM", "public.out", "2 rows of checkpoint 1", str(unit.payload["gid"]), "go back to checkpoint 0"]
    assert [part for part in expected if part not in message] == []


def test_open_unit_blocks_the_fence_of_a_newer_run_until_it_is_settled(stage: Stage) -> None:
    with _writing(TWO_PHASE, stage.context()) as writer:
        writer.write(batch_of(1))
        unit = writer.prepare_commit(1)
    assert unit is not None
    newer = stage.context(epoch=2)
    with pytest.raises(FenceBlockedError):
        TWO_PHASE.fence(newer)
    committer = TWO_PHASE.create_committer(newer)
    committer.recover([])
    committer.close()
    TWO_PHASE.fence(newer)
    assert stage.gids() == []


def test_outdated_writer_is_fenced_before_its_first_row(stage: Stage) -> None:
    outdated = stage.context(epoch=1)
    TWO_PHASE.fence(stage.context(epoch=2))
    writer = TWO_PHASE.create_writer(outdated)
    with pytest.raises(FencedError):
        writer.write(batch_of(1))
    writer.close()
    assert stage.scalars("SELECT id FROM out") == []


def test_recover_leaves_other_jobs_and_sinks_alone(stage: Stage) -> None:
    foreign = [f"etl:{stage.job_id}:1:1:2:0", f"etl:{stage.job_id}0:1:1:1:0", f"etl:{stage.job_id}:x", "other"]
    for number, gid in enumerate(foreign):
        stage.admin.execute(f"BEGIN; INSERT INTO out VALUES ({number}); PREPARE TRANSACTION '{gid}'")
    committer = TWO_PHASE.create_committer(stage.context(epoch=9))
    assert committer.recover([]) == 0
    committer.close()
    assert stage.gids() == sorted(foreign)


def test_write_ahead_recovery_waits_for_the_fence_when_another_sink_holds_it(stage: Stage) -> None:
    sink = WriteAheadSink(PostgresTable("out"))
    with _writing(sink, stage.context()) as writer:
        writer.write(batch_of(1))
        unit = writer.prepare_commit(1)
    assert unit is not None
    stage.admin.execute("BEGIN; SELECT FROM etl.fence FOR SHARE; INSERT INTO out VALUES (9); PREPARE TRANSACTION 'x'")
    context = stage.context(epoch=2, checkpoint_id=1)
    committer = sink.create_committer(context)
    assert committer.recover([unit]) == 0
    stage.admin.execute("ROLLBACK PREPARED 'x'")
    sink.fence(context)
    committer.verify([unit])
    committer.close()
    assert stage.scalars("SELECT id FROM out") == [1]


def test_write_ahead_unit_that_left_the_log_undelivered_raises_the_alarm(stage: Stage) -> None:
    sink, context = WriteAheadSink(PostgresTable("out")), stage.context()
    with _writing(sink, context) as writer:
        writer.write(batch_of(1))
        unit = writer.prepare_commit(1)
    assert unit is not None
    stage.admin.execute("DELETE FROM etl.write_ahead_log")
    committer = sink.create_committer(context)
    with pytest.raises(StateError, match=r"ALARM.*1 rows of checkpoint 1 are lost"):
        committer.commit(unit)
    committer.close()
    assert stage.scalars("SELECT checkpoint_id FROM etl.commit_ledger") == []


WRITE_AHEAD = WriteAheadSink(PostgresTable("out"))
_FILL_NOTE = """
    CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.note := 'filled'; RETURN NEW; END $$;
    CREATE TRIGGER fill BEFORE INSERT ON out FOR EACH ROW EXECUTE FUNCTION fill();
"""


def _without_note(number: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"id": number, "note": None}], schema=CONTRACT_SCHEMA.to_arrow())


@pytest.mark.parametrize(
    ("change", "batch", "problem"),
    [
        ("ALTER COLUMN id TYPE int2", batch_of(1, 40_000), 'column "id".*40000'),
        ("ALTER COLUMN note TYPE varchar(7)", batch_of(1, 123), 'column "note": .*note 123.* longer than 7 characters'),
        ("ALTER COLUMN note SET NOT NULL", _without_note(1), r'column "note": a row has no value \(NULL\) in it'),
    ],
)
def test_write_ahead_sink_logs_nothing_that_the_table_will_refuse(
    stage: Stage, change: LiteralString, batch: pa.RecordBatch, problem: str
) -> None:
    stage.admin.execute("ALTER TABLE out " + change)
    with _writing(WRITE_AHEAD, stage.context()) as writer:
        writer.write(batch)
        with pytest.raises(RecordError, match=f'sink "out", table public.out, {problem}'):
            writer.prepare_commit(1)
    assert stage.scalars("SELECT rows FROM etl.write_ahead_log") == []


def test_write_ahead_sink_leaves_nulls_to_a_trigger_that_may_fill_them(stage: Stage) -> None:
    stage.admin.execute("ALTER TABLE out ALTER COLUMN note SET NOT NULL")
    stage.admin.execute(_FILL_NOTE)
    context = stage.context()
    with _writing(WRITE_AHEAD, context) as writer:
        writer.write(_without_note(1))
        unit = writer.prepare_commit(1)
    assert unit is not None
    committer = WRITE_AHEAD.create_committer(context)
    committer.commit(unit)
    committer.close()
    assert stage.fetch("SELECT id, note FROM out") == [(1, "filled")]


@pytest.mark.parametrize("sink_class", [TwoPhaseCommitSink, TransactionalSink])
def test_trigger_that_drops_rows_fails_the_unit(
    stage: Stage, sink_class: type[TwoPhaseCommitSink | TransactionalSink]
) -> None:
    stage.admin.execute(
        "CREATE FUNCTION drop_odd() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN IF NEW.id % 2 = 1 THEN RETURN NULL; END IF; RETURN NEW; END $$;"
        "CREATE TRIGGER t BEFORE INSERT ON out FOR EACH ROW EXECUTE FUNCTION drop_odd()"
    )
    with _writing(sink_class(PostgresTable("out")), stage.context()) as writer:
        writer.write(batch_of(1, 2, 3))
        with pytest.raises(StateError, match=r"3 rows were sent to table public\.out and 1 arrived"):
            writer.prepare_commit(1)
    assert stage.scalars("SELECT id FROM out") == []


def test_duplicate_key_fails_the_whole_unit(stage: Stage) -> None:
    with _writing(TWO_PHASE, stage.context()) as writer:
        writer.write(batch_of(1, 2, 1))
        with pytest.raises(RecordError, match="23505"):
            writer.prepare_commit(1)
    assert stage.gids() == []


def test_deferred_constraint_fails_at_prepare(stage: Stage) -> None:
    stage.admin.execute("CREATE TABLE parent (id int8 PRIMARY KEY)")
    stage.admin.execute("ALTER TABLE out ADD FOREIGN KEY (id) REFERENCES parent DEFERRABLE INITIALLY DEFERRED")
    with _writing(TWO_PHASE, stage.context()) as writer:
        writer.write(batch_of(1))
        with pytest.raises(RecordError, match="23503"):
            writer.prepare_commit(1)
    assert stage.gids() == []


def test_notifying_trigger_is_refused_by_name(stage: Stage) -> None:
    stage.admin.execute(
        "CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NOTIFY x; RETURN NEW; END $$;"
        "CREATE TRIGGER t AFTER INSERT ON out FOR EACH ROW EXECUTE FUNCTION tell()"
    )
    with _writing(TWO_PHASE, stage.context()) as writer:
        writer.write(batch_of(1))
        with pytest.raises(ConfigurationError, match="NOTIFY"):
            writer.prepare_commit(1)


def test_connection_lost_in_the_middle_is_transient(stage: Stage) -> None:
    with _writing(TWO_PHASE, stage.context()) as writer:
        writer.write(batch_of(1))
        stage.admin.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE '%writer%'"
        )
        with pytest.raises(TransientError):
            writer.prepare_commit(1)
    assert stage.gids() == []


def test_table_dropped_after_the_preflight_stops_the_run(stage: Stage) -> None:
    stage.admin.execute("DROP TABLE out")
    with _writing(TWO_PHASE, stage.context()) as writer:
        writer.write(batch_of(1))
        with pytest.raises(ConfigurationError, match=r"table public\.out does not exist"):
            writer.prepare_commit(1)


def test_arrays_that_copy_cannot_carry_are_inserted(stage: Stage) -> None:
    stage.schema = Schema.declare({"id": "int8", "tags": "uuid[]"})
    stage.admin.execute("CREATE TABLE tagged (id int8, tags uuid[])")
    sink, context = TwoPhaseCommitSink(PostgresTable("tagged")), stage.context()
    with _writing(sink, context) as writer:
        tags = [["0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9", None], None, []]
        writer.write(pa.RecordBatch.from_pydict({"id": [1, 2, 3], "tags": tags}, schema=stage.schema.to_arrow()))
        unit = writer.prepare_commit(1)
    assert unit is not None
    committer = sink.create_committer(context)
    committer.commit(unit)
    committer.close()
    found = stage.scalars("SELECT tags::text FROM tagged ORDER BY id")
    assert found == ["{0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9,NULL}", None, "{}"]


def test_two_subtasks_write_at_the_same_time(stage: Stage) -> None:
    first, second = stage.context(subtask=0), stage.context(subtask=1)
    barrier = threading.Barrier(2)
    with _writing(TWO_PHASE, first) as one, _writing(TWO_PHASE, second) as other:

        def write(writer: SinkWriter, start: int) -> None:
            barrier.wait()
            writer.write(batch_of(*range(start, start + 1000)))
            assert writer.prepare_commit(1) is not None

        thread = threading.Thread(target=write, args=(other, 1000))
        thread.start()
        write(one, 0)
        thread.join()
    assert stage.gids() == [f"etl:{stage.job_id}:1:1:1:0", f"etl:{stage.job_id}:1:1:1:1"]


def test_close_is_quiet_and_quick_after_a_copy_that_was_blocked_too_long(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etl.store.database.LOCK_TIMEOUT_S", 1)
    stage.admin.execute("BEGIN")
    stage.admin.execute("INSERT INTO out VALUES (1)")
    with _writing(TWO_PHASE, stage.context()) as writer:
        writer.write(batch_of(*range(100_000)))
        started = monotonic()
    assert monotonic() - started < 10
    stage.admin.execute("COMMIT")
    assert stage.scalars("SELECT id FROM out") == [1]
    assert caplog.messages == []
