"""Bounded channels: order, backpressure in rows and bytes, and waking at the end."""

from __future__ import annotations

from threading import Event, Thread

import pyarrow as pa
import pytest

from etl.runtime.channel import ChannelClosedError, InputGate
from etl.runtime.element import Barrier, Element, EndOfInput


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"a": pa.array(values, pa.int64())})


def put_in_thread(gate: InputGate, element: Element) -> tuple[Thread, Event]:
    """Put into the gate's first channel from another thread; the event says that it went through."""
    done = Event()

    def put() -> None:
        gate.channels[0].put(element)
        done.set()

    thread = Thread(target=put, daemon=True)
    thread.start()
    return thread, done


def test_channel_keeps_the_order_of_its_elements() -> None:
    gate = InputGate(1)
    elements: list[Element] = [batch(1), Barrier(1), batch(2), EndOfInput()]
    for element in elements:
        gate.channels[0].put(element)
    assert [gate.get()[1] for _ in elements] == elements


def test_polled_gate_takes_turns_leaves_blocked_channels_and_does_not_wait() -> None:
    gate = InputGate(2)
    elements: list[Element] = [batch(1), batch(2), batch(3)]
    for index, element in zip((0, 0, 1), elements, strict=True):
        gate.channels[index].put(element)

    assert [gate.poll(), gate.poll()] == [(0, elements[0]), (1, elements[2])]
    assert gate.poll({0}) is None
    assert [gate.poll(), gate.poll()] == [(0, elements[1]), None]


def test_channel_blocks_its_sender_when_rows_are_full() -> None:
    gate = InputGate(1, rows_max=3)
    gate.channels[0].put(batch(1, 2))
    thread, done = put_in_thread(gate, batch(3, 4))
    thread.join(0.05)
    assert not done.is_set()
    gate.get()
    assert done.wait(5)


def test_channel_blocks_its_sender_when_bytes_are_full() -> None:
    gate = InputGate(1, bytes_max=20)
    gate.channels[0].put(batch(1, 2))
    thread, done = put_in_thread(gate, batch(3))
    thread.join(0.05)
    assert not done.is_set()
    gate.get()
    assert done.wait(5)


def test_channel_lets_a_barrier_pass_when_it_is_full() -> None:
    gate = InputGate(1, rows_max=1)
    gate.channels[0].put(batch(1))
    gate.channels[0].put(Barrier(1))
    assert gate.get()[1].num_rows == 1
    assert gate.get()[1] == Barrier(1)


def test_channel_takes_one_oversized_batch_when_it_is_empty() -> None:
    gate = InputGate(1, rows_max=1, bytes_max=1)
    gate.channels[0].put(batch(1, 2, 3))
    assert gate.get()[1].num_rows == 3


def test_gate_takes_turns_between_its_channels() -> None:
    gate = InputGate(2)
    for value in (1, 2):
        gate.channels[0].put(batch(value))
        gate.channels[1].put(batch(value * 10))
    assert [gate.get()[0] for _ in range(4)] == [0, 1, 0, 1]


def test_gate_leaves_a_blocked_channel_alone() -> None:
    gate = InputGate(2)
    gate.channels[0].put(batch(1))
    gate.channels[1].put(batch(2))
    assert gate.get(blocked={0}) == (1, batch(2))


def test_gate_wakes_a_waiting_sender_when_it_closes() -> None:
    gate = InputGate(1, rows_max=1)
    gate.channels[0].put(batch(1))
    raised = Event()

    def put() -> None:
        with pytest.raises(ChannelClosedError):
            gate.channels[0].put(batch(2))
        raised.set()

    Thread(target=put, daemon=True).start()
    gate.close()
    assert raised.wait(5)


def test_gate_raises_for_its_reader_when_it_is_closed() -> None:
    gate = InputGate(1)
    gate.close()
    with pytest.raises(ChannelClosedError):
        gate.get()
