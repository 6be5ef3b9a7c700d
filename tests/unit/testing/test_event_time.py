"""Event time in plays: watermarks of rows, of marks, and after restarts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import polars as pl
import pytest

from etl.errors import ConfigurationError
from etl.event_time import FOREVER, EventTime, microseconds_since_1970
from etl.job import Job
from etl.operators.keyed.deduplicate import DeduplicateOperator
from etl.testing import advance, assert_same_result, checkpoint, crash, drain, play, rows
from etl.window import Session, Sliding, Tumbling
from sinks import PostgresTable, TwoPhaseCommitSink, UpsertSink
from tests.support.declarations import DeclaredSource

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)


def minutes(number: int) -> datetime:
    return NOON + timedelta(minutes=number)


def timed_job(*sources: str, columns: str = "timestamptz", **event_time: Any) -> Job:
    job = Job("timed")
    first, *others = (
        job.read(uid, DeclaredSource({"n": "int8", "at": columns}), event_time=EventTime("at", **event_time))
        for uid in sources
    )
    stream = first.union(*others) if others else first
    stream.deduplicate("seen", "n").write("sink", TwoPhaseCommitSink(PostgresTable("t")))
    return job


@pytest.fixture
def watermarks(monkeypatch: pytest.MonkeyPatch) -> list[int | str]:
    """Minutes after noon that the operator has been told, and where a restart came."""
    told: list[int | str] = []

    def note(_operator: DeduplicateOperator, watermark: int) -> Iterable[Any]:
        span = watermark - microseconds_since_1970(NOON)
        told.append("forever" if watermark == FOREVER else span // 60_000_000)
        return ()

    monkeypatch.setattr(DeduplicateOperator, "advance", note)
    return told


def at(source: str, *moments: int) -> Any:
    return rows(source, *({"n": moment, "at": minutes(moment)} for moment in moments))


def test_rows_move_event_time_as_their_source_declares(watermarks: list[int | str]) -> None:
    job = timed_job("events", out_of_orderness=timedelta(minutes=5))

    play(job, [at("events", 0, 10), at("events", 7), at("events", 20)])

    assert watermarks == [5, 15]


def test_event_time_goes_on_where_the_checkpoint_had_it(watermarks: list[int | str]) -> None:
    play(timed_job("events"), [at("events", 0), checkpoint(), at("events", 10), crash(), at("events", 20)])

    assert watermarks == [0, 10, 0, 10, 20]


def test_event_time_advances_without_rows(watermarks: list[int | str]) -> None:
    script = [
        at("events", 0), advance(minutes(10)), checkpoint(), crash(), at("events", 5), advance(minutes(3)), drain()
    ]  # fmt: skip

    result = play(timed_job("events"), script)

    assert watermarks == [0, 10, 10, "forever"]
    assert [row["n"] for row in result.output["sink"]] == [0, 5]
    assert result.late_rows("seen") == 0


def test_rows_behind_a_drain_are_those_of_another_run() -> None:
    job = windowed_job(HOURS)
    script = [rows("events", event(0), event(50)), drain(), rows("events", event(20), event(60), event(130)), drain()]

    result = play(job, script)

    assert [(row["window_start"], row["times"]) for row in result.output["windows"]] == [
        (minutes(0), 2),
        (minutes(60), 1),
        (minutes(120), 1),
    ]
    assert result.output["late"] == [event(20)]
    assert_same_result(job, script, number=10)


def test_advances_since_the_checkpoint_are_made_again_after_a_crash(watermarks: list[int | str]) -> None:
    play(timed_job("events"), [at("events", 0), advance(minutes(10)), drain(), crash()])

    assert watermarks == [0, 10, "forever"] * 2


def test_slowest_source_decides(watermarks: list[int | str]) -> None:
    script = [
        rows("left"),
        rows("right"),
        advance(minutes(10), "left"),
        advance(minutes(5), "right"),
        checkpoint(),
        crash(),
        advance(minutes(8), "right"),
        advance(minutes(20)),
    ]

    play(timed_job("left", "right"), script)

    assert watermarks == [5, 5, 8, 20]


def test_event_time_that_was_held_back_by_another_input_is_known_to_it_after_a_crash() -> None:
    """Behind an operator that has stored more than whoever comes behind it, which waits for a slower source."""
    job = Job("union")
    fast, slow = (
        job.read(uid, DeclaredSource({"n": "int8", "at": "timestamptz"}), event_time=EventTime("at"))
        for uid in ("fast", "slow")
    )
    events = fast.deduplicate("once", ["n"], ttl=timedelta(hours=1), time="at").union(slow)
    counts = events.key_by("n").window(Tumbling(timedelta(minutes=10)), time="at").aggregate("counts", times=pl.len())
    counts.write("out", TwoPhaseCommitSink(PostgresTable("out")))
    script = [at("fast", 1, 30), at("slow", 1), checkpoint(), crash(), at("slow", 40)]

    result = play(job, script)

    assert [(row["n"], row["window_start"], row["times"]) for row in result.output["out"]] == [(1, NOON, 2)]


def test_event_time_stays_at_its_place_when_it_is_played_otherwise(watermarks: list[int | str]) -> None:
    script = [at("events", 0, 1, 2), advance(minutes(10)), at("events", 11, 12), drain()]

    assert_same_result(timed_job("events"), script, number=20)

    assert watermarks.count("forever") >= 20
    assert watermarks[:5] == [2, 10, 12, "forever", 2]


def windowed_job(window: Any, **settings: Any) -> Job:
    """Counts events by ``n`` in windows; events may come five minutes late."""
    job = Job("windows")
    events = job.read(
        "events",
        DeclaredSource({"n": "int8", "at": "timestamptz"}),
        event_time=EventTime("at", out_of_orderness=timedelta(minutes=5)),
    )
    counts = events.key_by("n").window(window, time="at", **settings).aggregate("counts", times=pl.len())
    counts.write("windows", UpsertSink(PostgresTable("w", key=["n", "window_start"])))
    counts.late.write("late", TwoPhaseCommitSink(PostgresTable("l")))
    return job


def event(minute: int, n: int = 1) -> dict[str, Any]:
    return {"n": n, "at": minutes(minute)}


def counted(rows_: Iterable[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Start and end in minutes after noon, and how many."""
    found = [(row["window_start"], row["window_end"], row["times"]) for row in rows_]
    minute = timedelta(minutes=1)
    return [((start - NOON) // minute, (end - NOON) // minute, times) for start, end, times in found]


HOURS = Tumbling(timedelta(hours=1))


def test_windows_close_when_event_time_passes_their_end() -> None:
    script = [rows("events", event(10), event(50), event(61), event(40)), checkpoint(), crash()]

    result = play(windowed_job(HOURS), script)
    assert result.output == {"windows": [], "late": []}
    assert result.state("counts") == {
        (1, minutes(0)): {"window_end": minutes(60), "times": 3},
        (1, minutes(60)): {"window_end": minutes(120), "times": 1},
    }

    result = play(windowed_job(HOURS), [*script, rows("events", event(65, n=2)), crash()])
    assert counted(result.output["windows"]) == [(0, 60, 3)]
    assert set(result.state("counts")) == {(1, minutes(60)), (2, minutes(60))}

    result = play(
        windowed_job(HOURS), [*script, advance(minutes(60)), checkpoint(), crash(), rows("events", event(59))]
    )
    assert counted(result.output["windows"]) == [(0, 60, 3)]
    assert result.output["late"] == [event(59)]
    assert result.late_rows("counts") == 1

    result = play(windowed_job(HOURS), [*script, drain()])
    assert counted(result.output["windows"]) == [(0, 60, 3), (60, 120, 1)]
    assert result.state("counts") == {}


def test_windows_that_were_emitted_at_a_checkpoint_are_remembered_until_they_close() -> None:
    job = windowed_job(HOURS, emit="checkpoint")

    result = play(job, [rows("events", event(10)), checkpoint(), rows("events", event(20)), checkpoint(), crash()])

    assert counted(result.output["windows"]) == [(0, 60, 1), (0, 60, 2)]
    assert counted(result.table("windows").values()) == [(0, 60, 2)]
    assert result.state("counts") == {(1, minutes(0)): {"window_end": minutes(60), "times": 2}}


def test_open_sessions_are_shown_as_they_would_close() -> None:
    job = windowed_job(Session(timedelta(minutes=10)))

    result = play(
        job, [rows("events", event(0), event(6)), checkpoint(), rows("events", event(14), event(30)), crash()]
    )

    assert counted(result.output["windows"]) == [(0, 24, 3)]
    assert result.state("counts") == {(1, minutes(30)): {"window_end": minutes(40), "times": 1}}


@pytest.mark.parametrize(
    ("window", "settings"),
    [
        (HOURS, {}),
        (HOURS, {"lateness": timedelta(minutes=30)}),
        (HOURS, {"emit": "checkpoint"}),
        (Sliding(timedelta(hours=1), every=timedelta(minutes=20)), {}),
        (Session(timedelta(minutes=15)), {}),
    ],
)
def test_windows_do_not_depend_on_how_their_rows_are_played(window: Any, settings: dict[str, Any]) -> None:
    moments = [0, 12, 31, 29, 55, 90, 20, 88, 130, 61, 126, 127, 200, 199, 140]
    script = [
        rows("events", *(event(moment, n=number % 4) for number, moment in enumerate(moments))),
        advance(minutes(210)),
        rows("events", event(100), event(230, n=2)),
        drain(),
    ]

    assert_same_result(windowed_job(window, **settings), script, number=15)


def findings(job: Job, script: list[Any]) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        play(job, script)
    return [re.sub(r" at \S+:\d+", " at HERE", str(finding)) for finding in caught.value.findings]


def test_advance_of_another_type_or_source_is_refused() -> None:
    script = [
        rows("events"),
        advance(datetime(2024, 5, 1)),
        advance(date(2024, 5, 1)),
        advance(minutes(0), "event"),
    ]

    assert findings(timed_job("events"), script) == [
        'advance(datetime.datetime(2024, 5, 1, 0, 0)) at HERE: column "at": datetime.datetime(2024, 5, 1, 0, 0) has no'
        " time zone, which is wrong for timestamptz; give a value of the column's type",
        'advance(datetime.date(2024, 5, 1)) at HERE: column "at": datetime.date(2024, 5, 1) is date, timestamptz takes'
        " datetime; give a value of the column's type",
        f'advance({minutes(0)!r}, "event") at HERE: no such source declares event time; those that do: "events"',
    ]


def test_advance_needs_event_time() -> None:
    job = Job("untimed")
    job.read("events", DeclaredSource({"n": "int8"})).write("sink", TwoPhaseCommitSink(PostgresTable("t")))

    assert findings(job, [rows("events"), advance(minutes(0))]) == [
        f"advance({minutes(0)!r}) at HERE: no source declares event time; give job.read(…, event_time=EventTime"
        '("column"))'
    ]


@pytest.mark.parametrize(("columns", "moment"), [("timestamp", datetime(2024, 5, 1, 12)), ("date", date(2024, 5, 2))])
def test_moments_are_of_the_type_of_the_column(
    columns: str, moment: datetime | date, watermarks: list[int | str]
) -> None:
    play(timed_job("events", columns=columns), [rows("events"), advance(moment)])

    assert watermarks == [0 if columns == "timestamp" else 12 * 60]
