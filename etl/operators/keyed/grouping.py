"""Rows of a batch by key.

polars sees numbered columns only: to it some names that users choose are patterns.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pyarrow as pa

from etl.operators.exact import array_of_series, frame_of
from etl.schema import Field

ROW = "row"
_KEY = "key_{}"


def key_frame(batch: pa.RecordBatch, keys: Sequence[Field]) -> pl.DataFrame:
    """The key's columns of a batch, as a frame with names of its own, see :func:`key_names`.

    Raises:
        RecordError: A time of 24:00:00, which polars would turn into NULL.
    """
    frame = frame_of(batch.select([field.name for field in keys]))
    frame.columns = key_names(keys)
    return frame


def key_names(keys: Sequence[Field]) -> list[str]:
    """What the key's columns are called there."""
    return [_KEY.format(number) for number in range(len(keys))]


def key_arrays(frame: pl.DataFrame, keys: Sequence[Field]) -> list[pa.Array]:
    """The key's columns of such a frame in their Arrow types."""
    return [array_of_series(frame[name], field.type) for name, field in zip(key_names(keys), keys, strict=True)]


def first_rows(frame: pl.DataFrame) -> pl.DataFrame:
    """Of each key in such a frame the number of its first row, as column ``row``, in the order of the rows."""
    return frame.with_row_index(ROW).unique(frame.columns, keep="first", maintain_order=True)
