"""Channels and words between processes, here between two threads of one."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from threading import Event, Thread
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from etl.codec import encode_rows
from etl.errors import (
    ConfigurationError,
    DatabaseUnreachableError,
    EtlError,
    Finding,
    InternalError,
    RecordError,
    TransientError,
)
from etl.graph import JobGraph
from etl.job import Job
from etl.runtime.channel import ChannelClosedError, InputGate
from etl.runtime.element import Barrier, CutTaken, Element, EndOfInput, Watermark
from etl.runtime.message import Failed, Message, StateSnapshotted, SubtaskEnded, TimersFired
from etl.runtime.plan import MAIN, plan_of
from etl.runtime.workers.control import (
    ANSWERS,
    ORDERS,
    Connection,
    Reported,
    RestoreState,
    StoredFragment,
    raised,
    told,
)
from etl.runtime.workers.fleet import ChannelEnds
from etl.runtime.workers.frames import ChannelReceiver, ChannelSender, channel_sockets
from etl.runtime.workers.outline import outline_of, require_same
from etl.state import Fragment, StateChunk, StateCut, StateSummary
from tests.support.scripted import Numbers
from tests.support.waiting import wait_until

JOIN_TIMEOUT_S = 10


@dataclass
class Link:
    """A channel between two processes, with both of its ends at hand."""

    sender: ChannelSender
    receiver: ChannelReceiver
    gate: InputGate
    reported: list[Message]
    thread: Thread
    ends: tuple[socket.socket, socket.socket]

    def join(self) -> None:
        self.thread.join(JOIN_TIMEOUT_S)
        assert not self.thread.is_alive()


@pytest.fixture
def link() -> Iterator[Link]:
    yield from linked(InputGate(1))


@pytest.fixture
def narrow() -> Iterator[Link]:
    """One whose receiver has room for 10 rows."""
    yield from linked(InputGate(1, rows_max=10))


def linked(gate: InputGate) -> Iterator[Link]:
    ends = channel_sockets()
    reported: list[Message] = []
    receiver = ChannelReceiver("channel", ends[1], gate.channels[0], reported.append)
    thread = Thread(target=receiver.run, daemon=True)
    thread.start()
    made = Link(ChannelSender(ends[0]), receiver, gate, reported, thread, ends)
    yield made
    gate.close()
    made.receiver.close()
    made.join()
    for end in ends:
        end.close()


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"a": pa.array(values, pa.int64())})


def received(link: Link, count: int) -> list[Element]:
    return [link.gate.get()[1] for _ in range(count)]


def test_elements_of_every_kind_come_through_in_order(link: Link) -> None:
    elements: list[Element] = [
        Watermark(None),
        batch(1, 2),
        Watermark(1_700_000_000_000_000, idle=True),
        Barrier(7),
        batch(),
        batch(3),
        EndOfInput(),
    ]

    for element in elements:
        link.sender.put(element)

    assert received(link, len(elements)) == elements
    link.join()
    assert link.reported == []


def test_batches_keep_their_schema_also_when_it_changes(link: Link) -> None:
    numbers = pa.record_batch({"a": pa.array([Decimal("1.50"), None], pa.decimal128(10, 2))})
    texts = pa.RecordBatch.from_arrays(
        [pa.array([["x", None], []]), pa.array([b"\x00", None])],
        schema=pa.schema([pa.field("l", pa.list_(pa.string())), pa.field("b", pa.binary(), metadata={"k": "v"})]),
    )

    for sent in (numbers, texts, texts.slice(1), numbers):
        link.sender.put(sent)

    got = received(link, 4)
    assert got == [numbers, texts, texts.slice(1), numbers]
    assert isinstance(got[1], pa.RecordBatch)
    assert got[1].schema.field("b").metadata == {b"k": b"v"}
    assert pl.DataFrame(got[0])["a"].to_list() == [Decimal("1.50"), None]


def test_batch_larger_than_all_buffers_comes_through(link: Link) -> None:
    large = pa.record_batch({"a": pa.array(range(5_000_000), pa.int64())})
    thread = Thread(target=link.sender.put, args=(large,), daemon=True)

    thread.start()

    assert received(link, 1) == [large]
    thread.join(JOIN_TIMEOUT_S)
    assert not thread.is_alive()


def test_receiver_without_room_blocks_the_sender_and_loses_nothing(narrow: Link) -> None:
    rows = 10_000
    sent = [pa.record_batch({"a": pa.array([number] * rows, pa.int64())}) for number in range(100)]
    accepted: list[int] = []
    blocked = Event()

    def put() -> None:
        for number, element in enumerate(sent):
            narrow.sender.put(element)
            accepted.append(number)
        blocked.set()

    thread = Thread(target=put, daemon=True)
    thread.start()
    assert not blocked.wait(0.5), "8 MB went into a channel for 10 rows"
    # One in the channel, one in the receiver's hands, the rest in the system's buffers.
    assert len(accepted) < 60

    assert received(narrow, len(sent)) == sent
    thread.join(JOIN_TIMEOUT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_closing_either_side_wakes_a_blocked_sender(narrow: Link, side: str) -> None:
    woken = Event()

    def put() -> None:
        with pytest.raises(ChannelClosedError):
            while True:
                narrow.sender.put(batch(*range(10_000)))
        woken.set()

    thread = Thread(target=put, daemon=True)
    thread.start()
    wait_until(lambda: narrow.gate.channels[0]._elements, "the first batch")

    getattr(narrow, side).close()

    assert woken.wait(JOIN_TIMEOUT_S)
    assert narrow.reported == []


def test_end_of_the_other_process_ends_the_receiver_quietly(link: Link) -> None:
    link.sender.put(batch(1))
    link.ends[0].close()

    link.join()

    assert received(link, 1) == [batch(1)]
    assert link.reported == []


def test_what_is_no_frame_is_reported(link: Link) -> None:
    link.ends[0].sendall(b"?" + (0).to_bytes(8, "little"))

    link.join()

    (failed,) = link.reported
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, KeyError)


def test_cut_of_state_does_not_leave_its_process(link: Link) -> None:
    with pytest.raises(InternalError, match="CutTaken does not leave its process"):
        link.sender.put(CutTaken("totals", 1, StateCut("totals", [], StateSummary(0))))


def test_more_channels_than_files_may_be_open_are_refused() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    ends = ChannelEnds()
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 9, limits[1]))
    try:
        with pytest.raises(ConfigurationError, match="needs more open files than are allowed; raise the limit"):
            for number in range(9):
                ends.end(number, MAIN, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        ends.close((MAIN, 1))


# --- what is said ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        SubtaskEnded("totals[1]"),
        TimersFired("totals[1]"),
        StateSnapshotted(
            "totals[1]", 7, "totals", [StateChunk("totals", 3, 0, 1, b"\x00\xff", b"d" * 32)], StateSummary(4, -5, 6)
        ),
    ],
)
def test_report_of_a_subtask_comes_through(message: Message) -> None:
    ours, theirs = (Connection(end) for end in socket.socketpair())
    ours.send(Reported.of(message))

    content = theirs.receive()

    assert content is not None
    answer = ANSWERS.decode(content)
    assert isinstance(answer, Reported)
    assert answer.message() == message
    for end in (ours, theirs):
        end.close()


def test_connection_says_when_the_other_side_has_ended() -> None:
    ours, theirs = (Connection(end) for end in socket.socketpair())
    ours.close()

    assert theirs.receive() is None

    theirs.close()


def test_order_is_not_waited_with_when_it_need_not_be() -> None:
    ours, theirs = (Connection(end) for end in socket.socketpair())
    large = RestoreState("totals", [StoredFragment(0, 0, b"x" * (16 << 20))])

    with pytest.raises(BlockingIOError):
        ours.send(large, waiting=False)

    for end in (ours, theirs):
        end.close()


def test_fragment_of_state_comes_through() -> None:
    fragment = Fragment(5, 2, batch(1, 2))
    sent = RestoreState("totals", [StoredFragment.of(fragment)])
    ours, theirs = (Connection(end) for end in socket.socketpair())
    ours.send(sent)

    content = theirs.receive()

    assert content is not None
    order = ORDERS.decode(content)
    assert isinstance(order, RestoreState)
    assert order.fragments[0].fragment() == fragment
    assert order.fragments[0].rows == encode_rows(batch(1, 2))
    for end in (ours, theirs):
        end.close()


class OfAThirdPartyError(RecordError):
    exit_code = 99


@pytest.mark.parametrize(
    "error, kind",
    [
        (TransientError("may pass"), TransientError),
        (DatabaseUnreachableError("no answer"), DatabaseUnreachableError),
        (RecordError("bad", uid="orders", split="a.csv"), RecordError),
        (OfAThirdPartyError("bad", uid="orders"), RecordError),
        (ConfigurationError("not fit", [Finding("job", "it is wrong", "correct it")]), ConfigurationError),
        (InternalError("ValueError: x\ny"), InternalError),
    ],
)
def test_error_keeps_its_class_and_what_it_says(error: EtlError, kind: type[EtlError]) -> None:
    try:
        raise error
    except EtlError as caught:
        again = raised(told(caught))

    assert type(again) is kind
    assert str(again) == str(error)
    for name in ("uid", "split", "findings"):
        assert getattr(again, name, None) == getattr(error, name, None)
    assert Path(__file__).name in str(again.__cause__)


# --- places and the job itself --------------------------------------------------------------------------------------


def graph_of(*, factor: int = 1, kept: int = 0) -> tuple[Job, JobGraph]:
    from sinks import PostgresTable, UpsertSink

    job = Job("placed", parallelism=3)
    numbers = job.read("numbers", Numbers(5))
    filtered = numbers.filter(pl.col("id") > kept)
    mapped = filtered.map(lambda row: {"id": row["id"] * factor, "name": row["name"]})
    totals = mapped.key_by("id").aggregate("totals", rows=pl.len())
    totals.write("out", UpsertSink(PostgresTable("t", key=["id"])))
    filtered.select("id").write("plain", UpsertSink(PostgresTable("u", key=["id"])))
    return job, job.graph()


def test_what_runs_python_is_dealt_out_in_turn_and_the_rest_stays() -> None:
    _, graph = graph_of()

    plan = plan_of(graph, 3, workers=2)

    assert plan.workers == 2
    assert plan.places == {"filter-1": (MAIN,), "map-1": (1,), "totals": (2, 1, 2), "select-1": (MAIN,)}
    assert plan_of(graph, 3, workers=9).workers == 4


def test_without_workers_everything_is_in_one_process() -> None:
    _, graph = graph_of()

    plan = plan_of(graph, 2)

    assert plan.workers == 0
    assert set().union(*plan.places.values()) == {MAIN}


def test_same_declaration_is_the_same_job() -> None:
    require_same(outline_of(*graph_of()), outline_of(*graph_of()))


def test_other_declaration_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r'^"filter-1" is filter .*0.* in the main process and filter .*3'):
        require_same(outline_of(*graph_of()), outline_of(*graph_of(kept=3)))


def test_missing_part_is_refused_by_name() -> None:
    outline: list[Any] = list(outline_of(*graph_of()))
    with pytest.raises(ConfigurationError, match=r'^"out" is absent in the main process and UpsertSink of'):
        require_same([one for one in outline if one[0] != "out"], outline)
