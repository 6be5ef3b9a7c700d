"""The same input, played in another way: other batch borders, checkpoints, crashes, another parallelism."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from etl.testing.harness.marks import Checkpoint, Crash, Drain, Rescale, Wait
from etl.testing.harness.script import AdvanceTo, Read, Script, Step
from etl.transformation import Location

MARKS_MAX = 8
"""Marks of a variation; each crash costs a restart."""

BORDERS_MAX = 100
"""Batch borders of a variation; a large table is not cut into single rows."""

PARALLELISMS = (1, 2, 3)

_NOWHERE = Location("", 0)

Disturbance = Checkpoint | Crash | Rescale
Undivided = AdvanceTo | Drain | Wait | Disturbance


@dataclass(frozen=True, slots=True)
class Variation:
    """One way to play the rows of a script.

    Places are numbers of rows read before, of all sources together, in the order of the script.

    Attributes:
        parallelism: At the beginning.
        borders: Places where a batch ends; it also ends where there are marks, and with the rows of a source.
        marks: By place what happens there.
    """

    parallelism: int
    borders: frozenset[int]
    marks: Mapping[int, tuple[Disturbance, ...]] = field(default_factory=dict)


class Rows:
    """The rows of a script, one after the other.

    Attributes:
        written: Places of the batch borders as the script has them.
    """

    def __init__(self, script: Script) -> None:
        read = dict.fromkeys(script.batches, 0)
        self._sources: list[str] = []
        self._fixed: dict[int, list[AdvanceTo | Drain | Wait]] = {}
        self.written: frozenset[int] = frozenset()
        for step in script.steps:
            match step:
                case Read():
                    self._sources += [step.source] * script.batches[step.source][read[step.source]].num_rows
                    read[step.source] += 1
                    self.written |= {len(self._sources)}
                case AdvanceTo() | Drain() | Wait():
                    self._fixed.setdefault(len(self._sources), []).append(step)
                case _:
                    continue
        self._rows = {uid: pa.concat_batches(batches) for uid, batches in script.batches.items() if batches}
        self._uids = tuple(script.batches)

    def __len__(self) -> int:
        return len(self._sources)

    def script(self, variation: Variation) -> Script:
        """The rows as a variation plays them, and the time that passes in between.

        The checkpoints of the script itself are left out, and its crashes.
        """
        steps: list[Step] = []
        batches: dict[str, list[pa.RecordBatch]] = {uid: [] for uid in self._uids}
        for part in self.parts(variation):
            if isinstance(part, Piece):
                steps.append(Read(part.source))
                batches[part.source].append(self._rows[part.source].slice(part.first, part.rows))
            else:
                steps.append(part)
        return Script(steps, batches)

    def parts(self, variation: Variation) -> Iterator[Piece | Undivided]:
        """What a variation plays, in order."""
        read = dict.fromkeys(self._uids, 0)
        yield from self._at(0, variation)
        first = 0
        for place in range(1, len(self) + 1):
            source = self._sources[place - 1]
            goes_on = place < len(self) and self._sources[place] == source
            if goes_on and place not in variation.borders and not [*self._at(place, variation)]:
                continue
            yield Piece(source, read[source], place - first)
            read[source] += place - first
            first = place
            yield from self._at(place, variation)

    def _at(self, place: int, variation: Variation) -> Iterator[Undivided]:
        yield from self._fixed.get(place, ())
        yield from variation.marks.get(place, ())


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a source that are read as one batch.

    Attributes:
        source: The uid.
        first: How many of its rows were read before.
        rows: How many.
    """

    source: str
    first: int
    rows: int


def variations(rows: Rows, parallelism: int, number: int, seed: int) -> Iterator[Variation]:
    """At most so many, the same for the same seed: first those that find most, then any.

    Args:
        rows: What is played.
        parallelism: The job's.
        number: How many. The first is the script as it is written, played once more.
        seed: Of the random ones.
    """
    chance = random.Random(seed)
    everywhere = _some(range(1, len(rows) + 1), BORDERS_MAX, chance)
    places = _some(sorted(everywhere), MARKS_MAX, chance)
    written = Variation(parallelism, rows.written)
    typical = [
        written,
        replace(written, borders=everywhere),
        replace(written, borders=frozenset()),
        replace(written, marks=dict.fromkeys(places, (Checkpoint(),))),
        replace(written, borders=everywhere, marks=dict.fromkeys(places, (Crash(), Checkpoint()))),
        *(replace(written, parallelism=other) for other in PARALLELISMS if other != parallelism),
    ]
    for turn in range(number):
        yield typical[turn] if turn < len(typical) else _any(rows, chance)


def _any(rows: Rows, chance: random.Random) -> Variation:
    places = range(len(rows) + 1)
    borders = _some(places, chance.randint(0, BORDERS_MAX), chance)
    marks: dict[int, tuple[Disturbance, ...]] = {}
    for place in sorted(_some(places, chance.randint(0, MARKS_MAX), chance)):
        rescale = Rescale(chance.choice(PARALLELISMS), _NOWHERE)
        marks[place] = (chance.choice((Checkpoint(), Crash(), rescale)),)
    return Variation(chance.choice(PARALLELISMS), borders, marks)


def _some(places: Sequence[int], most: int, chance: random.Random) -> frozenset[int]:
    return frozenset(chance.sample(places, min(most, len(places))))


def simpler(variation: Variation, rows: Rows, parallelism: int) -> Iterator[Variation]:
    """The same with one thing less in which it differs from the script as it is written, the largest steps first."""
    if variation.parallelism != parallelism:
        yield replace(variation, parallelism=parallelism)
    for place, marks in sorted(variation.marks.items()):
        others = {other: those for other, those in variation.marks.items() if other != place}
        for left in _one_less(marks):
            yield replace(variation, marks={**others, place: left} if left else others)
    moved = sorted(variation.borders ^ rows.written)
    some = len(moved)
    while some:
        for first in range(0, len(moved), some):
            yield replace(variation, borders=variation.borders ^ frozenset(moved[first : first + some]))
        some //= 2


def _one_less(marks: Sequence[Disturbance]) -> Iterable[tuple[Disturbance, ...]]:
    return (tuple(one for other, one in enumerate(marks) if other != number) for number in range(len(marks)))
