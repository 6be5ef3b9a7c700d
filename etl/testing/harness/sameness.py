"""That the result of a job depends on its input alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from etl.errors import EtlError
from etl.graph import JobGraph
from etl.job import Job
from etl.testing.harness.clock import clock_begins
from etl.testing.harness.marks import Checkpoint, Mark
from etl.testing.harness.player import play_script
from etl.testing.harness.script import read_script
from etl.testing.harness.variation import Piece, Rows, Variation, simpler, variations

VARIATIONS = 30
"""How many are played unless another number is given."""

SHRINKING_MAX = 200
"""Plays that look for a smaller variation."""

SHOWN_ROWS_MAX = 3

Outcome = Mapping[str, Counter[str]]
"""By uid of a sink its rows, spelled out."""


def assert_same_result(
    job: Job, script: Sequence[Mark], *, number: int = VARIATIONS, seed: int = 0, now: datetime | None = None
) -> None:
    """Play the rows of a script in many ways, and require that the sinks always get the same.

    Batches are cut elsewhere, checkpoints are taken and crashes happen at other places, the parallelism changes:
    nothing of that may be seen in what is committed. Of a sink with a key the last rows of each key are compared, of
    others all rows, in no order. Checkpoints and crashes of the script itself are left out.

    Args:
        job: The job.
        script: See :func:`~etl.testing.play`.
        number: How many variations are played.
        seed: Decides which ones; the same seed plays the same.
        now: See :func:`~etl.testing.play`; the same in all plays.

    Raises:
        AssertionError: Something else came out; shows the smallest variation that was found.
        ConfigurationError: The job or the script is wrong.
        EtlError: What the job raises when nothing is varied.
    """
    graph = job.graph()
    rows = Rows(read_script(graph, script))
    check = _Check(job, graph, rows, clock_begins(now))
    for variation in variations(rows, job.parallelism, number, seed):
        outcome = check.deviation(variation)
        if outcome is not None:
            raise AssertionError(check.report(*check.smallest(variation, outcome)))


class _Check:
    """Compares plays with the one that is written."""

    def __init__(self, job: Job, graph: JobGraph, rows: Rows, now: datetime) -> None:
        self._now = now
        self._job = job
        self._graph = graph
        self._rows = rows
        self._written = Variation(job.parallelism, rows.written)
        self._expected = self._played(self._written)

    def _played(self, variation: Variation) -> Outcome:
        script = self._rows.script(variation)
        result = play_script(self._job, self._graph, script, variation.parallelism, self._now)
        return {
            node.uid: Counter(
                map(repr, result.table(node.uid).values() if node.sink.upsert else result.output[node.uid])
            )
            for node in self._graph.sinks
        }

    def deviation(self, variation: Variation) -> Outcome | str | None:
        """What comes of a variation, or what it raises, where that is something else."""
        try:
            outcome = self._played(variation)
        except EtlError as error:
            return f"{type(error).__name__}: {error}"
        return outcome if outcome != self._expected else None

    def smallest(self, variation: Variation, outcome: Outcome | str) -> tuple[Variation, Outcome | str]:
        """Take away what makes no difference, until nothing can be."""
        left = SHRINKING_MAX
        untried = simpler(variation, self._rows, self._job.parallelism)
        while left and (simple := next(untried, None)) is not None:
            left -= 1
            found = self.deviation(simple)
            if found is not None:
                variation, outcome = simple, found
                untried = simpler(variation, self._rows, self._job.parallelism)
        return variation, outcome

    def report(self, variation: Variation, outcome: Outcome | str) -> str:
        """For people."""
        so = "once more" if variation == self._written else "so"
        lines = [f'job "{self._job.name}" yields something else when its input is played {so}:', ""]
        lines += [f"    {line}" for line in self._shown(variation)]
        if isinstance(outcome, str):
            return "\n".join([*lines, "", f"It raises {outcome}"])
        for uid, expected in self._expected.items():
            if outcome[uid] != expected:
                lines += ["", f'sink "{uid}":', *_shown("only as written", expected - outcome[uid])]
                lines += _shown("only played so", outcome[uid] - expected)
        return "\n".join(lines)

    def _shown(self, variation: Variation) -> Iterator[str]:
        if variation.parallelism != self._job.parallelism:
            yield f"parallelism={variation.parallelism}"
        for part in self._rows.parts(variation):
            if isinstance(part, Piece):
                last = part.first + part.rows
                which = f"row {last}" if part.rows == 1 else f"rows {part.first + 1} to {last}"
                yield f'rows("{part.source}", …)  # {which}'
            else:
                yield str(part)
        yield str(Checkpoint())


def _shown(what: str, rows: Counter[str]) -> list[str]:
    shown = [f"    {what}: {row}" for row in itertools.islice(rows.elements(), SHOWN_ROWS_MAX)]
    left = rows.total() - len(shown)
    return [*shown, f"    {what}: {left} more row(s)"] if left else shown
