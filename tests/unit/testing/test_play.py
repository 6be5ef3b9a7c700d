"""Plays of jobs: what comes out, what is remembered, what a crash takes away and a restart gives back."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from etl.errors import ConfigurationError, InternalError
from etl.job import Job
from etl.keyed_process import ListState, MapState
from etl.testing import assert_same_result, checkpoint, crash, play, rescale, rows, wait
from etl.transformation import Row
from sinks import PostgresTable, TwoPhaseCommitSink, UpsertSink
from tests.support.declarations import DeclaredSource
from tests.support.payments import payment, payments_job

APPENDED = TwoPhaseCommitSink(PostgresTable("t"))


def copying_job(columns: dict[str, str], *sources: str) -> Job:
    """Appends what it reads."""
    job = Job("copy")
    first, *others = (job.read(uid, DeclaredSource(columns)) for uid in sources or ("source",))
    (first.union(*others) if others else first).write("sink", APPENDED)
    return job


def test_output_is_what_checkpoints_made_visible_in_order() -> None:
    first, second, third = (payment("a", amount) for amount in ("1.00", "20.00", "300.00"))

    result = play(payments_job(), [rows("payments", first, second), checkpoint(), rows("payments", third)])

    assert result.output == {
        "jumps": [second, third],
        "totals": [
            {"card": "a", "total": Decimal("21.00"), "payments": 2},
            {"card": "a", "total": Decimal("321.00"), "payments": 3},
        ],
    }
    assert result.uncommitted == {"jumps": [], "totals": []}


def test_what_follows_the_last_checkpoint_is_not_visible_without_a_final_one() -> None:
    first, second = payment("a", "1.00"), payment("a", "20.00")

    result = play(
        payments_job(),
        [rows("payments", first), checkpoint(), rows("payments", second)],
        final_checkpoint=False,
    )

    assert result.output["jumps"] == []
    assert result.uncommitted["jumps"] == [second]
    assert result.table("totals") == {("a",): {"card": "a", "total": Decimal("1.00"), "payments": 1}}
    assert result.state("last_payment") == {("a",): {"last": Decimal("1.00")}}


def test_state_is_shown_as_it_was_stored() -> None:
    result = play(payments_job(), [rows("payments", payment("a", "1"), payment("b", "2.5"), payment("a", "3"))])

    assert result.state("last_payment") == {("a",): {"last": Decimal("3.00")}, ("b",): {"last": Decimal("2.50")}}
    assert result.state("sums") == {
        ("a",): {"total": Decimal("4.00"), "payments": 2},
        ("b",): {"total": Decimal("2.50"), "payments": 1},
    }
    assert str(result.state("last_payment")["b",]["last"]) == "2.50"


def test_crash_takes_back_what_no_checkpoint_holds_and_reads_it_again() -> None:
    script = [rows("payments", payment("a", "1")), checkpoint(), rows("payments", payment("a", "20")), crash()]

    result = play(payments_job(), script)

    assert result.output["jumps"] == [payment("a", "20.00")]
    assert result.state("sums") == {("a",): {"total": Decimal("21.00"), "payments": 2}}


def test_only_what_was_read_since_the_checkpoint_is_read_again_after_a_crash() -> None:
    calls: list[Decimal] = []

    def remembering(row: Row, _state: Any) -> Iterator[Row]:
        calls.append(row["amount"])
        yield row

    script = [
        rows("payments", payment("a", "1")),
        checkpoint(),
        rows("payments", payment("a", "2")),
        rows("payments", payment("b", "3")),
        crash(),
        crash(),
        rows("payments", payment("a", "4")),
    ]
    result = play(payments_job(remembering), script)

    assert calls == list(map(Decimal, ("1", "2", "3", "2", "3", "2", "3", "4")))
    assert [row["amount"] for row in result.output["jumps"]] == list(map(Decimal, ("1", "2", "3", "4")))


def test_state_outlives_crashes_between_all_rows() -> None:
    amounts = [Decimal(number) for number in range(1, 30)]
    script = [
        mark
        for amount in amounts
        for mark in (rows("payments", payment("a", str(amount))), crash(), checkpoint(), crash())
    ]

    result = play(payments_job(), script)

    assert result.state("sums") == {("a",): {"total": sum(amounts), "payments": len(amounts)}}


@pytest.mark.parametrize("parallelism", [1, 2, 7, 128])
def test_result_is_the_same_at_any_parallelism(parallelism: int) -> None:
    cards = [f"card-{number % 40}" for number in range(200)]
    script = [rows("payments", *(payment(card, str(number)) for number, card in enumerate(cards)))]

    result = play(payments_job(), script, parallelism=parallelism)

    assert result.table("totals") == play(payments_job(), script).table("totals")
    assert len(result.state("last_payment")) == 40


def test_job_keeps_its_own_parallelism_unless_another_is_given() -> None:
    assert len(play(payments_job(parallelism=3), [rows("payments", payment("a", "1"))]).output["totals"]) == 1


def test_keys_on_disk_are_remembered_as_well() -> None:
    job = Job("bounded")
    payments = job.read("payments", DeclaredSource({"card": "text", "amount": "numeric(12,2)"})).key_by("card")
    payments.aggregate("sums", total=pl.col("amount").sum(), keys_in_memory=2).write(
        "totals", UpsertSink(PostgresTable("totals", key=["card"]))
    )
    cards = [f"card-{number}" for number in range(20)]
    some = rows("payments", *(payment(card, "1") for card in cards))

    result = play(job, [some, checkpoint(), crash(), some, checkpoint(), crash()])

    assert result.state("sums") == {(card,): {"total": Decimal("2.00")} for card in cards}
    assert_same_result(job, [some, some], number=6)


def test_rescaling_moves_state_to_other_subtasks() -> None:
    cards = [f"card-{number}" for number in range(50)]
    some = rows("payments", *(payment(card, "1") for card in cards))
    others = rows("payments", *(payment(card, "20") for card in cards))

    result = play(payments_job(), [some, checkpoint(), rescale(5), others, rescale(2), rescale(3)])

    assert sorted(row["card"] for row in result.output["jumps"]) == sorted(cards)
    assert set(result.table("totals")) == {(card,) for card in cards}
    assert all(row["total"] == 21 for row in result.table("totals").values())


def test_batches_end_where_rows_end_and_where_they_are_cut() -> None:
    sizes: list[int] = []

    def counted(frame: pl.DataFrame) -> pl.DataFrame:
        sizes.append(len(frame))
        return frame

    job = Job("sizes")
    job.read("numbers", DeclaredSource({"n": "int8"})).map_batches(counted, schema={"n": "int8"}).write(
        "sink", APPENDED
    )
    script = [rows("numbers", *({"n": number} for number in range(5))), rows("numbers", {"n": 5})]

    expected = [{"n": number} for number in range(6)]
    assert play(job, script).output["sink"] == expected
    assert play(job, script, batch_rows=2).output["sink"] == expected
    assert sizes == [5, 1, 2, 2, 1, 1]


def test_sources_are_read_in_the_order_of_the_script() -> None:
    job = copying_job({"n": "int8"}, "left", "right")
    script = [rows("right", {"n": 1}), rows("left", {"n": 2}), checkpoint(), rows("right", {"n": 3}), crash()]

    assert [row["n"] for row in play(job, script).output["sink"]] == [1, 2, 3]


def test_streams_that_part_and_meet_again_align_their_barriers() -> None:
    job = Job("diamond")
    numbers = job.read("numbers", DeclaredSource({"n": "int8"}))
    even, odd = numbers.filter(pl.col("n") % 2 == 0), numbers.filter(pl.col("n") % 2 == 1).deduplicate("odd", "n")
    even.union(odd).key_by("n").aggregate("counts", times=pl.len()).write(
        "sink", UpsertSink(PostgresTable("t", key=["n"]))
    )
    script = [
        rows("numbers", *({"n": number} for number in (1, 2, 3, 4, 1, 2))),
        checkpoint(),
        rows("numbers", {"n": 1}, {"n": 4}),
        crash(),
    ]

    result = play(job, script, parallelism=3)

    assert {key: row["times"] for (key,), row in result.table("sink").items()} == {1: 1, 2: 2, 3: 1, 4: 2}
    assert result.state("odd") == {(1,): {}, (3,): {}}


def test_lists_and_maps_of_state_are_shown_as_functions_see_them() -> None:
    def remembering(row: Row, state: Any) -> None:
        if row["n"] > 0:
            state.seen.append(row["n"])
        state.times["all"] = state.times.get("all", 0) + 1

    job = Job("lists")
    job.read("numbers", DeclaredSource({"k": "text", "n": "int8"})).key_by("k").process(
        "seen", remembering, state={"seen": ListState("int8"), "times": MapState("text", "int8")}
    ).write("sink", APPENDED)

    result = play(job, [rows("numbers", {"k": "a", "n": 1}, {"k": None, "n": 0}, {"k": "a", "n": 2}), crash()])

    assert result.state("seen") == {
        ("a",): {"seen": [1, 2], "times": {"all": 2}},
        (None,): {"seen": [], "times": {"all": 1}},
    }


def test_values_come_out_exactly_as_a_sink_gets_them() -> None:
    values: Row = {
        "int2": -32768,
        "int8": 2**63 - 1,
        "float8": 0.1,
        "numeric(38,10)": Decimal("1234567890123456789012345678.0123456789"),
        "bool": False,
        "text": "Zoë 🎁",
        "date": date(1, 1, 1),
        "time": time(23, 59, 59, 999999),
        "timestamp": datetime(9999, 12, 31, 23, 59, 59, 999999),
        "timestamptz": datetime(2024, 3, 31, 2, 30, tzinfo=timezone(timedelta(hours=2))),
        "uuid": "00000000-0000-4000-8000-00000000000a",
        "jsonb": '{"a": 1.10}',
        "bytea": b"\0\xff",
        "numeric(4,1)[]": [Decimal("1.5"), None],
        "int4": None,
    }

    [row] = play(copying_job({name: name for name in values}), [rows("source", values)]).output["sink"]

    assert row == values
    assert row["timestamptz"].astimezone(UTC).isoformat() == "2024-03-31T00:30:00+00:00"
    assert {name: type(value) for name, value in row.items()} == {name: type(value) for name, value in values.items()}


@pytest.mark.parametrize("library", ["polars", "table", "record batch"])
def test_rows_may_be_a_table(library: str) -> None:
    arrow = pa.table({"b": ["x", None], "a": pa.array([Decimal("1.50"), Decimal("2.00")], pa.decimal128(6, 2))})
    given = {"polars": pl.DataFrame(arrow), "table": arrow, "record batch": arrow.to_batches()[0]}[library]

    result = play(copying_job({"a": "numeric(12,2)", "b": "text"}), [rows("source", given)])

    assert result.output["sink"] == [{"a": Decimal("1.50"), "b": "x"}, {"a": Decimal("2.00"), "b": None}]


def test_rows_of_a_table_in_pieces_all_come() -> None:
    pieces = [pa.table({"a": pa.array([number], pa.int64())}) for number in range(3)]

    result = play(copying_job({"a": "int8"}), [rows("source", pa.concat_tables(pieces))])

    assert [row["a"] for row in result.output["sink"]] == [0, 1, 2]


def test_key_that_is_no_column_is_told() -> None:
    job = Job("keys")
    job.read("source", DeclaredSource({"a": "int8"})).write("sink", UpsertSink(PostgresTable("t", key=["b"])))

    with pytest.raises(ConfigurationError, match='sink "sink" goes by "b", which is no column of: a int8'):
        play(job, [rows("source", {"a": 1})]).table("sink")


def test_empty_table_is_no_rows() -> None:
    script = [rows("source", pa.table({"a": pa.array([], pa.int64())}))]

    assert play(copying_job({"a": "int8"}), script).output == {"sink": []}


def test_missing_columns_are_null_where_that_is_said() -> None:
    script = [rows("source", {"b": "x"}, {"a": 1}, {}, missing_null=True)]

    assert play(copying_job({"a": "int8", "b": "text"}), script).output["sink"] == [
        {"a": None, "b": "x"},
        {"a": 1, "b": None},
        {"a": None, "b": None},
    ]


@pytest.mark.parametrize(
    ("version", "expected"),
    [(None, {"k": 1.0, "v": None, "n": 5}), ("v", {"k": 1.0, "v": 2, "n": 3})],
)
def test_table_holds_what_the_server_would_keep(version: str | None, expected: Row) -> None:
    job = Job("versions")
    job.read("source", DeclaredSource({"k": "float8", "v": "int8", "n": "int8"})).write(
        "sink", UpsertSink(PostgresTable("t", key=["k"], version=version))
    )
    given = [(1.0, None, 0), (1.0, 2, 1), (1.0, 1, 2), (1.0, 2, 3), (1.0, 1, 4), (1.0, None, 5)]
    nan = float("nan")
    script = [rows("source", *({"k": k, "v": v, "n": n} for k, v, n in given), *[{"k": nan, "v": 1, "n": 9}] * 2)]

    table = play(job, script).table("sink")

    assert table[1.0,] == expected
    assert len(table) == 2


def test_nothing_is_started_and_no_thread_is_left() -> None:
    before = threading.active_count()

    play(payments_job(), [rows("payments", payment("a", "1")), crash()])

    assert threading.active_count() == before


def test_error_of_a_function_comes_as_it_is_in_a_run() -> None:
    def failing(row: Row, _state: Any) -> None:
        raise ValueError("no such card")

    with pytest.raises(InternalError, match="raised ValueError: no such card for the row") as caught:
        play(payments_job(failing), [rows("payments", payment("a", "1"))])
    assert isinstance(caught.value.__cause__, ValueError)


def findings(script: list[Any], **arguments: Any) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        play(payments_job(), script, **arguments)
    return [re.sub(r" at \S+:\d+", " at HERE", str(finding)) for finding in caught.value.findings]


WHERE = 'rows("payments") at HERE'
CURE = "correct the rows"
KNOWN = "the columns are: card text, amount numeric(12,2)"


def test_all_mistakes_of_a_script_are_reported_at_once() -> None:
    script = [
        rows("payment", payment("a", "1")),
        rows("payments", {"card": "a"}, payment("a", "1")),
        rows("payments", payment("a", "1"), {"card": "a", "amount": Decimal(1), "amuont": 1}),
        rows("payments", {"card": "a", "amount": 1.0}),
        rows("payments", {"card": "a", "amount": Decimal("0.001")}),
        rows("payments", [payment("a", "1")]),
        rows("payments", {"crad": "a"}, missing_null=True),
        rows("payments", pl.DataFrame({"card": ["a"]})),
        rows("payments", pl.DataFrame({"card": ["a"], "amount": [1.0]})),
        checkpoint,
        "crash",
        rescale(0),
        rescale(129),
    ]

    found = findings(script)

    assert found[:4] == [
        'rows("payment") at HERE: the job has no such source; choose from "payments"',
        f"{WHERE}: row 1 lacks 'amount'; {KNOWN}; {CURE}",
        f"{WHERE}: row 2 has unknown 'amuont'; {KNOWN}; {CURE}",
        f'{WHERE}: column "amount": 1.0 is float, numeric(12,2) takes Decimal; {CURE}',
    ]
    assert found[4].startswith(f"{WHERE}: column \"amount\": Decimal('0.001') does not fit numeric(12,2): ")
    assert found[5:] == [
        f"{WHERE}: row 1 is list, not a dict of column values; {CURE}",
        f"{WHERE}: row 1 has unknown 'crad'; {KNOWN}; {CURE}",
        f"{WHERE}: the table lacks 'amount'; {KNOWN}; {CURE}",
        f'{WHERE}: column "amount" came as double, declared is numeric(12,2); {CURE}',
        "mark 10: checkpoint is not called; write checkpoint(…)",
        "mark 11: str is not a mark; use rows(…), checkpoint(), crash(), rescale(…), advance(…), drain() or wait(…)",
        "rescale(0) at HERE: 0 is not 1 to 128; choose another number",
        "rescale(129) at HERE: 129 is not 1 to 128; choose another number",
    ]
    assert all("\n" not in one for one in found)


def test_every_source_must_be_in_the_script() -> None:
    with pytest.raises(ConfigurationError) as caught:
        play(copying_job({"n": "int8"}, "left", "right"), [rows("left", {"n": 1})])

    cure = 'say rows("right") if it has nothing to read'
    assert [str(one) for one in caught.value.findings] == [f'source "right": the script has no rows for it; {cure}']
    assert play(copying_job({"n": "int8"}, "left", "right"), [rows("left"), rows("right")]).output == {"sink": []}


def test_wrong_settings_are_refused() -> None:
    script = [rows("payments")]

    assert findings(script, batch_rows=0) == ["batch_rows: 0 is not at least 1; choose another number"]
    assert findings(script, now=datetime(2024, 5, 1)) == [
        "now: datetime.datetime(2024, 5, 1, 0, 0) has no time zone; e.g. datetime(2024, 5, 1, tzinfo=UTC)"
    ]
    assert findings([*script, wait(timedelta(0))]) == [
        "wait(datetime.timedelta(0)) at HERE: no time passes by that; e.g. wait(timedelta(hours=1))"
    ]
    assert findings(script, parallelism=0) == ["parallelism: 0 is not 1 to 128; choose another number"]


def test_mistakes_of_the_job_are_reported_as_before_a_run() -> None:
    job = Job("nothing")
    job.read("source", DeclaredSource({"n": "int8"}))

    with pytest.raises(ConfigurationError, match="it writes nothing"):
        play(job, [])


def test_unknown_names_are_told_with_those_that_are_there() -> None:
    result = play(payments_job(), [rows("payments")])

    with pytest.raises(ConfigurationError, match='the job has no sink "jump"; its sinks: "jumps", "totals"'):
        result.output["jump"]
    with pytest.raises(ConfigurationError, match='the job has no sink "jump"; its sinks: "jumps", "totals"'):
        result.table("jump")
    with pytest.raises(ConfigurationError, match='the job has no operator "x"; its operators: "last_payment", "sums"'):
        result.state("x")
    with pytest.raises(ConfigurationError, match='sink "jumps" has no key: every row is added; look at output'):
        result.table("jumps")
    with pytest.raises(ConfigurationError, match='no operator "x"; its operators: none'):
        play(copying_job({"n": "int8"}), [rows("source")]).state("x")
