"""Operators in several subtasks, and what a store would hold of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from etl.codec import decode_rows, encode_rows
from etl.key_group import groups_of_subtask, hash_keys, subtasks_of_hashes
from etl.operator import Output
from etl.state import Fragment, StatefulOperator, StateSummary, ranks


class Subtasks:
    """Parallel subtasks of an operator, fed by key; after a crash they are there again as of the last cut.

    Args:
        make: A new operator.
        keys: By which rows are exchanged.
    """

    def __init__(self, make: Callable[[], StatefulOperator], keys: Sequence[str], parallelism: int = 1) -> None:
        self._make = make
        self._keys = keys
        self.running = [make() for _ in range(parallelism)]
        self.chains: dict[int, list[Fragment]] = {}
        self.summary = StateSummary(0)

    def process(self, batch: pa.RecordBatch) -> list[Output]:
        owners = subtasks_of_hashes(hash_keys([batch.column(key) for key in self._keys]), len(self.running))
        parts = [batch.filter(pa.array(owners == number)) for number in range(len(self.running))]
        return [
            one
            for operator, part in zip(self.running, parts, strict=True)
            if len(part)
            for one in operator.process(part)
        ]

    def advance(self, watermark: int) -> list[Output]:
        return [one for operator in self.running for one in operator.advance(watermark)]

    def tick(self, now: int) -> list[Output]:
        return [one for operator in self.running for one in operator.tick(now)]

    def due(self) -> int | None:
        return min((operator.due for operator in self.running if operator.due is not None), default=None)

    def cut(self) -> None:
        cuts = [operator.cut() for operator in self.running]
        for fragment in (one for cut in cuts for one in cut.fragments):
            rows = decode_rows(encode_rows(fragment.rows))
            rows.validate(full=True)
            if fragment.sequence == 0:
                self.chains[fragment.key_group] = []
            chain = self.chains[fragment.key_group]
            assert fragment.sequence == len(chain)
            chain.append(Fragment(fragment.key_group, fragment.sequence, rows))
        self.summary = cuts[0].summary
        for cut in cuts[1:]:
            self.summary = self.summary.plus(cut.summary)
        assert self.summary.chunks == sum(map(len, self.chains.values()))

    def crash(self, parallelism: int) -> None:
        self.running = [self._make() for _ in range(parallelism)]
        for number, operator in enumerate(self.running):
            groups = groups_of_subtask(number, parallelism)
            for rank in ranks(one for chain in self.chains.values() for one in chain if one.key_group in groups):
                operator.restore(rank)
            if self.summary.watermark is not None:
                operator.resume(self.summary.watermark)

    def stored_keys(self) -> int:
        """How many rows a restore would find."""
        found: dict[tuple[object, ...], bool] = {}
        for chain in self.chains.values():
            for fragment in chain:
                names = [name for name in fragment.rows.schema.names if name.startswith("key:")]
                keys = zip(*(fragment.rows[name].to_pylist() for name in names), strict=True)
                found |= dict(zip(keys, np.asarray(fragment.rows["removed"]).tolist(), strict=True))
        return sum(not removed for removed in found.values())
