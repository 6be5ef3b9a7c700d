"""Rows of a batch by key."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pyarrow as pa

from etl.operators.exact import array_of_series
from etl.schema import Field


def key_arrays(frame: pl.DataFrame, keys: Sequence[Field]) -> list[pa.Array]:
    """The key's columns of a frame in their Arrow types."""
    return [array_of_series(frame[field.name], field.type) for field in keys]


def first_rows(frame: pl.DataFrame, keys: Sequence[Field], row: str) -> pl.DataFrame:
    """Of each key the number of its first row, in the order of the rows: the key's columns, and ``row``."""
    numbered = frame.select(field.name for field in keys).with_row_index(row)
    return numbered.unique([field.name for field in keys], keep="first", maintain_order=True)
