"""Rows by key to several subtasks, and how a graph is cut into chains."""

from __future__ import annotations

from threading import Thread

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.job import Job
from etl.key_group import groups_of_hashes, groups_of_subtask, hash_keys
from etl.runtime.channel import InputGate
from etl.runtime.element import Barrier, EndOfInput
from etl.runtime.exchange import HashExchange
from etl.runtime.plan import chains_of
from etl.runtime.rebalance import RebalanceExchange
from tests.support.declarations import DeclaredSink, DeclaredSource, orders_job


def batch(keys: list[int | None]) -> pa.RecordBatch:
    return pa.record_batch({"place": pa.array(range(len(keys)), pa.int64()), "key": pa.array(keys, pa.int32())})


def received(gate: InputGate) -> list[object]:
    found: list[object] = []
    while True:
        _, element = gate.get()
        found.append(element)
        if isinstance(element, EndOfInput):
            return found


@settings(deadline=None)
@given(st.lists(st.lists(st.one_of(st.none(), st.integers(-5, 40)), max_size=40), max_size=5), st.integers(2, 9))
def test_each_row_goes_to_the_owner_of_its_key_and_the_order_stays(
    batches: list[list[int | None]], parallelism: int
) -> None:
    gates = [InputGate(1) for _ in range(parallelism)]
    exchange = HashExchange([gate.channels[0] for gate in gates], [1])
    for keys in batches:
        exchange.put(batch(keys))
        exchange.put(Barrier(len(keys)))
    exchange.put(EndOfInput())

    rows: list[list[tuple[int, int | None]]] = [[] for _ in batches]
    for subtask, gate in enumerate(gates):
        *elements, _ = received(gate)
        assert [one for one in elements if isinstance(one, Barrier)] == [Barrier(len(keys)) for keys in batches]
        number = 0
        for element in elements:
            if isinstance(element, Barrier):
                number += 1
                continue
            assert isinstance(element, pa.RecordBatch)
            owned = groups_of_subtask(subtask, parallelism)
            assert all(group in owned for group in groups_of_hashes(hash_keys([element["key"]])))
            places = element["place"].to_pylist()
            assert places == sorted(places)
            rows[number] += zip(places, element["key"].to_pylist(), strict=True)
    assert [sorted(found) for found in rows] == [list(enumerate(keys)) for keys in batches]


def test_full_channel_blocks_the_exchange() -> None:
    gates = [InputGate(1, rows_max=4) for _ in range(2)]
    exchange = HashExchange([gate.channels[0] for gate in gates], [1])
    keys: list[int | None] = list(range(12))
    exchange.put(batch(keys))
    sender = Thread(target=exchange.put, args=[batch(keys)], daemon=True)
    sender.start()
    sender.join(0.05)
    assert sender.is_alive()
    for gate in gates:
        gate.get()
        gate.get()
    sender.join(10)
    assert not sender.is_alive()


def parallelism_of(job: Job, default: int = 1) -> dict[str, int]:
    return {chain.id: chain.parallelism for chain in chains_of(job.graph(), default)}


def test_steps_behind_an_operator_run_in_its_subtasks() -> None:
    job, orders = orders_job()
    late = orders.filter(pl.col("id") > 1).deduplicate("seen", "id", parallelism=3).filter(pl.col("id") > 2)
    late.with_columns(pl.col("id") + 1).write("out", DeclaredSink())
    (before, behind) = chains_of(job.graph())
    assert (before.id, before.parallelism, before.stateful) == ("filter-1", 1, None)
    assert (behind.id, behind.inputs, behind.parallelism) == ("with_columns-1", ("filter-1",), 3)
    assert behind.stateful is not None
    assert [node.id for node in behind.nodes] == ["seen", "filter-2", "with_columns-1"]
    assert [behind.subtask_uid(number) for number in range(3)] == [f"with_columns-1[{number}]" for number in range(3)]


def test_steps_have_as_many_subtasks_as_what_they_follow() -> None:
    job = Job("revenue")
    orders = job.read("orders", DeclaredSource(), parallelism=3)
    orders.filter(pl.col("id") > 1).write("out", DeclaredSink())
    dealt = orders.rebalance(2)
    dealt.filter(pl.col("id") > 2).write("more", DeclaredSink())
    dealt.filter(pl.col("id") > 3).deduplicate("seen", "id", parallelism=4).write("seen-out", DeclaredSink())
    orders.union(dealt).write("united", DeclaredSink())
    chains = {chain.id: (chain.parallelism, chain.forwarded) for chain in chains_of(job.graph())}
    assert chains == {
        "filter-1": (3, True),
        "rebalance-1": (2, False),
        "filter-2": (2, True),
        "filter-3": (2, True),
        "seen": (4, False),
        "union-1": (1, False),
    }


def test_batches_are_dealt_out_in_turn_and_all_else_goes_to_all() -> None:
    gates = [InputGate(1) for _ in range(3)]
    exchange = RebalanceExchange([gate.channels[0] for gate in gates], 4)
    batches = [batch([number]) for number in range(4)]
    for element in (batches[0], Barrier(1), *batches[1:], EndOfInput()):
        exchange.put(element)
    assert [received(gate) for gate in gates] == [
        [Barrier(1), batches[2], EndOfInput()],
        [batches[0], Barrier(1), batches[3], EndOfInput()],
        [Barrier(1), batches[1], EndOfInput()],
    ]


@pytest.mark.parametrize("default", [1, 4])
def test_parallelism_is_the_job_s_unless_an_operator_has_its_own(default: int) -> None:
    job, orders = orders_job()
    orders.deduplicate("a", "id").deduplicate("b", "status", parallelism=2).write("out", DeclaredSink())
    united = orders.deduplicate("c", "id").union(job.read("more", DeclaredSource()))
    united.write("other", DeclaredSink())
    assert parallelism_of(job, default) == {"a": default, "b": 2, "c": default, "union-1": 1}
