"""Contract of keyed state: what an operator remembers, and how a checkpoint gets hold of it.

State is stored in **chunks**. Those of one operator and key group form a **chain**: a full snapshot, number 0, then
what changed from checkpoint to checkpoint, numbered on. When the changes outgrow what they change, the next chunk is
a full snapshot again and begins a new chain. Restoring reads each chain once, in order; a later row of a key
replaces an earlier one.

::

    barrier → Operator.flush → StatefulOperator.cut → encoded apart → recorded with the checkpoint
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from etl.operator import Operator


@dataclass(frozen=True, slots=True)
class Fragment:
    """What one chunk will hold: rows of one key group, a snapshot of them that nothing changes any more.

    Attributes:
        key_group: The key group.
        sequence: Place in the chain; 0 for a full snapshot.
        rows: Whether the key was removed, the columns of the key, then those of the state; one row a key, ordered by
            the key's hash.
    """

    key_group: int
    sequence: int
    rows: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class StateCut:
    """The state of one operator subtask at a barrier, as far as it has changed since the last one.

    Attributes:
        uid: The operator.
        fragments: At most one a key group.
        chunks: How many chunks a restore of this state reads, the new ones included.
    """

    uid: str
    fragments: Sequence[Fragment]
    chunks: int


@dataclass(frozen=True, slots=True)
class StateChunk:
    """A stored fragment.

    Attributes:
        uid: The operator.
        key_group: The key group.
        sequence: Place in the chain.
        rows: Number of rows.
        content: See :mod:`etl.codec`.
        content_digest: SHA-256 of it.
    """

    uid: str
    key_group: int
    sequence: int
    rows: int
    content: bytes
    content_digest: bytes


def ranks(fragments: Iterable[Fragment]) -> list[list[Fragment]]:
    """Chains cut across: all fragments with sequence 0, then those with 1, and so on, one a key group at most."""
    found: dict[int, list[Fragment]] = {}
    for fragment in fragments:
        found.setdefault(fragment.sequence, []).append(fragment)
    return [found[sequence] for sequence in sorted(found)]


class StatefulOperator(Operator):
    """An operator that remembers; called from a single thread like every operator.

    Attributes:
        uid: Names its state.
    """

    uid: str

    @abstractmethod
    def restore(self, fragments: Sequence[Fragment]) -> None:
        """Take in fragments of earlier cuts: before any row, each chain in its order.

        Args:
            fragments: At most one a key group.

        Raises:
            StateError: It has other columns than this operator keeps; the message says which.
        """

    @abstractmethod
    def cut(self) -> StateCut:
        """What has changed since the last cut; called when a barrier has passed, after :meth:`Operator.flush`.

        Must be quick: the rows of the next checkpoint wait.
        """
