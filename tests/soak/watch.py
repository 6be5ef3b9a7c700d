"""What a reader may see of a job at any time: always whole checkpoints, never something going back."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

from tests.faults.described import DescribedSink
from tests.faults.reader import Connection, Isolation, Judge
from tests.soak.oracle import Head, Reading, World, check_whole, read_head, visible_rows
from tests.soak.truth import Rows
from tests.support.databases import one_snapshot


@dataclass(slots=True)
class Watch(Judge):
    """Judges each look of a :class:`tests.faults.reader.Reader`, whose sessions and thread are its own."""

    world: World | None = None
    _former: dict[str, Rows] = field(default_factory=dict)
    _last: Head = field(default_factory=Head)

    def look(self, store: Connection, other: Connection, isolation: Isolation) -> None:
        """See :meth:`tests.faults.reader.Judge.look`."""
        world = self.world
        assert world is not None
        low = self._head_now(store)
        seen = {sink: visible_rows(other, sink) for sink in world.job.sinks if sink.other}
        with one_snapshot(store) if isolation is Isolation.SNAPSHOT else nullcontext():
            here = self._head_now(store) if isolation is Isolation.SNAPSHOT else low
            seen |= {sink: visible_rows(store, sink) for sink in world.job.sinks if not sink.other}
            high = self._head_now(store)
        reading = Reading(world.job, world.files(), high)
        for sink, rows in seen.items():
            lowest = (low if sink.other else here).checkpoint - int(sink.late)
            check_whole(sink, rows, reading, max(0, lowest), high.checkpoint)
            self._check_onward(sink, rows)

    def _head_now(self, store: Connection) -> Head:
        assert self.world is not None
        found, former = read_head(store, self.world.request.job, self.world.job.keep), self._last
        assert found.epoch >= former.epoch, f"the epoch went back from {former.epoch} to {found.epoch}"
        assert found.checkpoint >= former.checkpoint, f"the head went back from {former} to {found}"
        kept = {number: offsets for number, offsets in found.offsets.items() if number in former.offsets}
        assert kept == former.offsets, "the end of a checkpoint is another one than it was"
        self._last = found
        return found

    def _check_onward(self, sink: DescribedSink, rows: Rows) -> None:
        former = self._former.get(sink.uid, Rows())
        self._former[sink.uid] = rows
        if not sink.keyed:
            gone = former - rows
            assert not gone, f"{sink.uid} had {list(gone.elements())}, which are not there any more"
            return
        versions = {row[1]: row[2] for row in rows}
        lost = {row[1] for row in former} - versions.keys()
        assert not lost, f"{sink.uid} lost the keys {sorted(lost)}"
        if sink.versioned:
            back = [row for row in former if versions[row[1]] < row[2]]
            assert not back, f"{sink.uid} went back from {back}"
