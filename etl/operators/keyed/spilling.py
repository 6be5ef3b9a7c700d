"""State of which a bounded number of keys is in memory, and the others on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from etl.keyed import Stateful
from etl.operators.keyed.columns import Ids, StateColumn
from etl.operators.keyed.evolution import Evolution
from etl.operators.keyed.key_index import Numbered
from etl.operators.keyed.spill import SpilledRows
from etl.operators.keyed.state import KeyedState
from etl.state import Fragment, StateCut

_KEPT_SHARE = 0.75
"""Of the bound, when room is made: else every cut would move a few keys."""


def state_of(
    transformation: Stateful,
    keys: Mapping[str, pa.DataType],
    columns: Mapping[str, StateColumn],
    evolution: Evolution | None = None,
) -> KeyedState:
    """The state of an operator, within the bound that was declared."""
    if transformation.keys_in_memory is None:
        return KeyedState(transformation.uid, keys, columns, evolution=evolution)
    return SpillingState(transformation.uid, keys, columns, transformation.keys_in_memory, evolution)


class SpillingState(KeyedState):
    """Keys that were not used for longest move to disk when there are too many, and come back when they are.

    They move at a cut, when everything in memory is stored: what was changed since the last one is always in memory.
    An id is good until the next cut.

    Args:
        uid: See :class:`KeyedState`.
        keys: See there.
        columns: See there.
        keys_in_memory: How many keys stay in memory at a cut.
        evolution: See :class:`KeyedState`.
    """

    def __init__(
        self,
        uid: str,
        keys: Mapping[str, pa.DataType],
        columns: Mapping[str, StateColumn],
        keys_in_memory: int,
        evolution: Evolution | None = None,
    ) -> None:
        super().__init__(uid, keys, columns, evolution=evolution)
        self._keys_in_memory = keys_in_memory
        self._spilled = SpilledRows(pa.schema(self.fields()))
        self._cuts = 0
        self._used_at: Ids = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return super().__len__() + len(self._spilled)

    @property
    def keys_on_disk(self) -> int:
        """How many keys are not in memory."""
        return len(self._spilled)

    def add(self, keys: Sequence[pa.Array]) -> Numbered:
        """See :meth:`KeyedState.add`."""
        self._bring_back(keys)
        numbered = super().add(keys)
        self._use(numbered.ids)
        return numbered

    def find(self, keys: Sequence[pa.Array]) -> Ids:
        """See :meth:`KeyedState.find`."""
        self._bring_back(keys)
        ids = super().find(keys)
        self._use(ids[ids >= 0])
        return ids

    def restore(self, fragments: Sequence[Fragment]) -> None:
        """See :meth:`etl.state.StatefulOperator.restore`."""
        super().restore(fragments)
        self._make_room()

    def close(self) -> None:
        """Give the space on disk back."""
        self._spilled.close()

    def cut(self, watermark: int | None = None, late_rows: int = 0) -> StateCut:
        """See :meth:`KeyedState.cut`."""
        cut = super().cut(watermark, late_rows)
        fragments = [self._completed(one) if one.sequence == 0 else one for one in cut.fragments]
        self._cuts += 1
        self._make_room()
        return replace(cut, fragments=fragments)

    def _completed(self, full: Fragment) -> Fragment:
        """A full snapshot of a key group, with the rows on disk."""
        rows = self._spilled.of_group(full.key_group)
        if not rows.num_rows:
            return full
        flags = pa.array(np.zeros(rows.num_rows, dtype=np.bool_))
        here = pa.RecordBatch.from_arrays([flags, *rows.columns], schema=full.rows.schema)
        everything = pa.concat_batches([full.rows, here])
        order = np.argsort(self._index.hash(everything.columns[1 : 1 + len(self._keys)]), kind="stable")
        self._stored_as.rebase(full.key_group, everything.num_rows)
        return Fragment(full.key_group, 0, everything.take(pa.array(order)))

    def _bring_back(self, keys: Sequence[pa.Array]) -> None:
        rows = self._spilled.take(self._index.hash(keys)) if len(self._spilled) else None
        if rows is not None:
            ids = super().add(rows.columns[: len(self._keys)]).ids
            for column, values in zip(self._columns.values(), rows.columns[len(self._keys) :], strict=True):
                column.put(ids, values)
            self._stored[ids] = True
            self._use(ids)

    def _use(self, ids: Ids) -> None:
        if self.ids_end > len(self._used_at):
            grown = np.zeros(max(self.ids_end, 2 * len(self._used_at)), dtype=np.int64)
            grown[: len(self._used_at)] = self._used_at
            self._used_at = grown
        self._used_at[ids] = self._cuts

    def _make_room(self) -> None:
        ids = self.live_ids()
        if len(ids) <= self._keys_in_memory:
            return
        surplus = len(ids) - int(self._keys_in_memory * _KEPT_SHARE)
        ids = ids[self._stored[ids]]
        ids = ids[np.argsort(self._used_at[ids], kind="stable")[:surplus]]
        hashes = self._index.hashes(ids)
        order = np.argsort(hashes, kind="stable")
        ids, hashes = ids[order], hashes[order]
        self._spilled.write(hashes, self.rows(ids))
        self._forget(ids)
