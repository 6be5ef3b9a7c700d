"""Stored state without the operator that keeps it: for people who want to look at it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from etl.operators.keyed.columns import state_column
from etl.operators.keyed.state import KEY_PREFIX, REMOVED, STATE_PREFIX, KeyedState
from etl.state import Fragment

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
    for fragment in fragments:
        state = state or _state_like(uid, fragment.rows.schema)
        state.restore(fragment)
    if state is None:
        return
    ids = state.live_ids()
    for first in range(0, len(ids), ROWS_MAX):
        yield state.rows(ids[first : first + ROWS_MAX])


def _state_like(uid: str, schema: pa.Schema) -> KeyedState:
    columns = [field for field in schema if field.name != REMOVED]
    keys = {one.name.removeprefix(KEY_PREFIX): one.type for one in columns if one.name.startswith(KEY_PREFIX)}
    kept = {one.name.removeprefix(STATE_PREFIX): one.type for one in columns if one.name.startswith(STATE_PREFIX)}
    return KeyedState(uid, keys, {name: state_column(arrow) for name, arrow in kept.items()})
