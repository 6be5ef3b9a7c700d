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
class StateSummary:
    """The state of an operator, or of one subtask of it, in a few figures.

    Attributes:
        chunks: How many a restore reads.
        watermark: Up to where everything is closed, None where nothing is. It comes back in
            :meth:`StatefulOperator.resume`.
        late_rows: How many rows came too late since the last cut.
        forgotten: What ended up to this moment is remembered no more, None where that follows from the watermark. It
            comes back in :meth:`StatefulOperator.resume` as well.
    """

    chunks: int
    watermark: int | None = None
    late_rows: int = 0
    forgotten: int | None = None

    def plus(self, other: StateSummary) -> StateSummary:
        """With that of another subtask of the same operator."""
        return StateSummary(
            self.chunks + other.chunks,
            _latest(self.watermark, other.watermark),
            self.late_rows + other.late_rows,
            _latest(self.forgotten, other.forgotten),
        )


def _latest(*moments: int | None) -> int | None:
    return max((moment for moment in moments if moment is not None), default=None)


@dataclass(frozen=True, slots=True)
class StateCut:
    """The state of one operator subtask at a barrier, as far as it has changed since the last one.

    Attributes:
        uid: The operator.
        fragments: At most one a key group.
        summary: Of all of its state, the new fragments included.
    """

    uid: str
    fragments: Sequence[Fragment]
    summary: StateSummary


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


@dataclass(frozen=True, slots=True)
class RestoredState:
    """What an operator gets back, all of its subtasks together.

    Attributes:
        fragments: All chains, each in its order.
        watermark: See :class:`StateSummary`.
        forgotten: See there.
    """

    fragments: Sequence[Fragment]
    watermark: int | None
    forgotten: int | None = None


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

    def resume(self, watermark: int) -> None:
        """Event time had come to this watermark at the restored cut: what it closed stays closed.

        Called after :meth:`restore`, before any row; nothing is emitted.
        """

    def resume_forgotten(self, forgotten: int) -> None:
        """What ended up to this moment was remembered no more at the restored cut; called after :meth:`resume`."""

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
