"""Parallel subtasks of a join, driven by hand: rows go to the one that owns their key, cuts through their bytes."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa

from etl.codec import decode_rows, encode_rows
from etl.event_time import FOREVER, microseconds_of
from etl.joins import Join
from etl.key_group import groups_of_subtask, hash_keys, subtasks_of_hashes
from etl.operator import Output, SideOutput
from etl.operators import operator_for
from etl.operators.keyed.joining import JoinOperator
from etl.schema import Schema
from etl.state import Fragment, ranks

Row = tuple[Any, ...]

START = dt.datetime(2024, 1, 1, tzinfo=ZoneInfo("UTC"))
START_US = 1_704_067_200_000_000


def moment(number: int) -> dt.datetime:
    """So many microseconds behind the start."""
    return START + dt.timedelta(microseconds=number)


def batch_of(schema: Schema, rows: Sequence[Row]) -> pa.RecordBatch:
    columns: list[Any] = list(zip(*rows, strict=True)) if rows else [[]] * len(schema)
    arrow = schema.to_arrow()
    arrays = [pa.array(values, field.type) for values, field in zip(columns, arrow, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow)


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True)) if batch.num_rows else []


class JoinStage:
    """Several subtasks of one join.

    Args:
        transformation: The join.
        inputs: Columns of both sides.
        times: Columns of the result by which event time goes on: no row may be behind what was passed on of it.
        parallelism: How many subtasks.

    Attributes:
        rows: What came out.
        late: By tag, what came out beside that.
        late_rows: How many, as the cuts say it.
        watermark: What was passed on.
    """

    def __init__(
        self, transformation: Join, inputs: Sequence[Schema], times: Sequence[str], parallelism: int = 1
    ) -> None:
        self._transformation = transformation
        self._inputs = inputs
        self._times = times
        self._output = transformation.output_schema(list(inputs))
        self._chains: dict[int, list[Fragment]] = {}
        self.operators = self._made(parallelism)
        self.rows: list[Row] = []
        self.late: dict[str, list[Row]] = {}
        self.late_rows = 0
        self.watermark = -(1 << 63)

    def _made(self, parallelism: int) -> list[JoinOperator]:
        made = [operator_for(self._transformation, self._inputs, self._output) for _ in range(parallelism)]
        assert all(isinstance(one, JoinOperator) for one in made)
        return made  # type: ignore[return-value]

    def give(self, side: int, *rows: Row) -> None:
        """Rows of a side, as one batch."""
        batch = batch_of(self._inputs[side], rows)
        keys = [batch.column(name) for name in self._transformation.keys_of_inputs[side]]
        owners = subtasks_of_hashes(hash_keys(keys), len(self.operators))
        for number, operator in enumerate(self.operators):
            some = batch.take(pa.array(np.flatnonzero(owners == number)))
            self._note(operator.entry(side)(some))

    def advance(self, microseconds: int) -> None:
        """Event time has come so far behind the start."""
        watermark = microseconds if microseconds == FOREVER else START_US + microseconds
        passed_on = set()
        for operator in self.operators:
            self._note(operator.advance(watermark))
            passed_on.add(operator.passed_on(watermark))
        (self.watermark,) = passed_on

    def restart(self, parallelism: int) -> None:
        """Cut the state, and go on from what was stored in other operators."""
        watermarks = set()
        for operator in self.operators:
            assert not list(operator.flush())
            cut = operator.cut()
            watermarks.add(cut.summary.watermark)
            self.late_rows += cut.summary.late_rows
            for fragment in cut.fragments:
                rows = decode_rows(encode_rows(fragment.rows))
                stored = Fragment(fragment.key_group, fragment.sequence, rows)
                chain = [] if fragment.sequence == 0 else self._chains[fragment.key_group]
                assert len(chain) == fragment.sequence
                self._chains[fragment.key_group] = [*chain, stored]
        (watermark,) = watermarks
        self.operators = self._made(parallelism)
        for number, operator in enumerate(self.operators):
            owned = groups_of_subtask(number, parallelism)
            for rank in ranks(one for group in sorted(self._chains) if group in owned for one in self._chains[group]):
                operator.restore(rank)
            if watermark is not None:
                operator.resume(watermark)

    @property
    def waiting(self) -> int:
        """How many rows are remembered."""
        return sum(len(side.table) for operator in self.operators for side in operator.sides)

    def _note(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            if isinstance(output, SideOutput):
                self.late.setdefault(output.tag, []).extend(rows_of(output.batch))
                continue
            assert output.schema == self._output.to_arrow()
            output.validate(full=True)
            self._require_in_time(output)
            self.rows += rows_of(output)

    def _require_in_time(self, batch: pa.RecordBatch) -> None:
        for name in self._times:
            moments = microseconds_of(batch.column(name)).drop_null().to_pylist()
            assert min(moments, default=FOREVER) >= self.watermark
