"""What operators remember, as JSON has it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from etl.state import Fragment

StateRow = Mapping[str, Mapping[str, Any]]
"""``{"key": {…}, "state": {…}}``"""


def spelled_rows(operator: str, fragments: Sequence[Fragment]) -> Iterator[StateRow]:
    """A row for each key, with values as JSON has them: exact decimals and times as text."""
    # Imported here: the list of operators is shown without NumPy.
    from msgspec import to_builtins

    from etl.operators.keyed.reading import rows_of_state

    for batch in rows_of_state(operator, fragments):
        for row in _printable(batch).to_pylist():
            parts: dict[str, dict[str, Any]] = {"key": {}, "state": {}}
            for name, value in row.items():
                part, _, column = name.partition(":")
                parts[part][column] = _spelled(to_builtins(value))
            yield parts


def _printable(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Dates and times as text: Python's own end with the year 9999."""
    columns = [column.cast(pa.string()) if pa.types.is_temporal(column.type) else column for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def to_json(value: Any, indent: int | None = None) -> str:
    """Not as ``write_json``, which blackens what looks like a password: these are the user's data, exactly."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)


def _spelled(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become what PostgreSQL calls them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _spelled(one) for name, one in value.items()}
    return [_spelled(one) for one in value] if isinstance(value, list) else value
