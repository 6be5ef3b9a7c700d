"""Stored state without the operator that keeps it: for people who want to look at it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from etl.operators.keyed.columns import StateColumn, state_column
from etl.operators.keyed.state import KeyedState
from etl.operators.keyed.table import DECLARED, KEY_PREFIX, STATE_PREFIX
from etl.state import Fragment, ranks

ROWS_MAX = 65_536


def rows_of_state(uid: str, fragments: Iterable[Fragment]) -> Iterator[pa.RecordBatch]:
    """One row a key, as of the last fragment: the columns of a fragment but the first.

    Args:
        uid: The operator.
        fragments: All chains, each in its order.

    Raises:
        StateError: The fragments differ in their columns.
    """
    state: KeyedState | None = None
    for rank in ranks(fragments):
        state = state or _state_like(uid, rank[0].rows.schema)
        state.restore(rank)
    if state is None:
        return
    ids = state.live_ids()
    for first in range(0, len(ids), ROWS_MAX):
        yield state.rows(ids[first : first + ROWS_MAX])


def _state_like(uid: str, schema: pa.Schema) -> KeyedState:
    keys = {one.name.removeprefix(KEY_PREFIX): one.type for one in schema if one.name.startswith(KEY_PREFIX)}
    columns: dict[str, StateColumn] = {}
    for field in schema:
        if field.name.startswith(STATE_PREFIX):
            column = columns[field.name.removeprefix(STATE_PREFIX)] = state_column(field.type)
            column.declared = (field.metadata or {}).get(DECLARED.encode(), b"").decode()
    return KeyedState(uid, keys, columns)
