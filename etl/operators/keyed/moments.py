"""Moments as the engine counts them, as a function sees them, and as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa

from etl.errors import RecordError
from etl.event_time import microseconds_of, microseconds_since_1970
from etl.operators.calling import shortened
from etl.operators.keyed.handles import Held, PythonColumn, offsets_of
from etl.operators.keyed.time_queue import Moments
from etl.schema import PostgresType

_EPOCH = datetime(1970, 1, 1)
_UTC = ZoneInfo("UTC")


class MomentType:
    """Moments of a column type: whole microseconds since 1970 here, what a row has in a function.

    Args:
        name: What messages call them.
        type_: ``timestamptz``, ``timestamp`` or ``date``.

    Attributes:
        arrow: As what they are stored.
    """

    def __init__(self, name: str, type_: PostgresType) -> None:
        self._held = Held(name, type_)
        self.arrow = pa.timestamp("us", tz=type_.arrow.tz if pa.types.is_timestamp(type_.arrow) else None)
        self._shown = _SHOWN[type_.base]

    def counted(self, moment: Any) -> int:
        """A moment that a function gives.

        Raises:
            RecordError: It is none of this type.
        """
        kept = self._held.kept(moment)
        if kept is None:
            raise RecordError(f'state "{self._held.name}": None is no moment')
        return microseconds_since_1970(_aware(kept))

    def shown(self, moment: int) -> Any:
        """A moment as rows have it."""
        return self._shown(_EPOCH + timedelta(microseconds=moment))


def _aware(moment: datetime | date) -> datetime:
    if not isinstance(moment, datetime):
        return datetime.combine(moment, time(), UTC)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


_SHOWN: dict[str, Callable[[datetime], Any]] = {
    "timestamptz": lambda moment: moment.replace(tzinfo=_UTC),
    "timestamp": lambda moment: moment,
    "date": lambda moment: moment.date(),
}


class MomentColumn(PythonColumn):
    """A moment for each id."""

    values: list[int | None]

    def array(self, values: Sequence[Any]) -> pa.Array:
        """See :meth:`PythonColumn.array`."""
        return pa.array(values, pa.int64()).cast(self.arrow)

    def objects(self, values: pa.Array) -> Sequence[Any]:
        """See :meth:`PythonColumn.objects`."""
        objects: list[Any] = values.cast(pa.int64()).to_pylist()
        return objects


class SortedMomentsColumn(PythonColumn):
    """Moments for each id, in their order; None where there are none."""

    values: list[Any]

    def __init__(self, arrow: pa.DataType, declared: str) -> None:
        super().__init__(pa.list_(arrow), declared)

    def array(self, values: Sequence[Any]) -> pa.Array:
        """See :meth:`PythonColumn.array`."""
        moments = pa.array([moment for value in values for moment in sorted(value or ())], pa.int64())
        mask = pa.array([value is None for value in values], pa.bool_())
        elements = moments.cast(self.arrow.value_type)
        return pa.ListArray.from_arrays(offsets_of(values), elements, type=self.arrow, mask=mask)

    def objects(self, values: pa.Array) -> Sequence[Any]:
        """See :meth:`PythonColumn.objects`."""
        found: list[list[int] | None] = values.cast(pa.list_(pa.int64())).to_pylist()
        return found


class MomentsColumn(SortedMomentsColumn):
    """A set of moments for each id, None where it would be empty; stored in their order."""

    values: list[set[int] | None]

    def objects(self, values: pa.Array) -> Sequence[Any]:
        """See :meth:`PythonColumn.objects`."""
        return [None if one is None else set(one) for one in super().objects(values)]


def moments_of(batch: pa.RecordBatch, column: str) -> Moments:
    """When the rows of a batch happened.

    Raises:
        RecordError: In one of them the column is NULL.
    """
    moments = microseconds_of(batch.column(column))
    if moments.null_count:
        row = batch.slice(int(np.flatnonzero(np.asarray(moments.is_null()))[0]), 1).to_pylist()[0]
        raise RecordError(f'column "{column}" is NULL in the row {shortened(row)}; filter such rows before')
    return np.asarray(moments)
