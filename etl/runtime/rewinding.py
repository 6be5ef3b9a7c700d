"""Where a run begins when that is not simply the last completed checkpoint.

Somebody asks for an earlier one (``etl run --from``), or the job declares that a source or an operator has another uid
now. Both begin a new incarnation, see :mod:`etl.store.rewinding`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from etl.errors import ConfigurationError, StateError
from etl.graph import JobGraph
from etl.job import Job
from etl.runtime.environment import RunEnvironment
from etl.sink import CheckpointMode, Delivery
from etl.store import rewinding, savepoints
from etl.store.database import StoreConnection
from etl.store.lease import Lease
from etl.store.savepoints import Cut


@dataclass(frozen=True, slots=True)
class StartFrom:
    """An earlier checkpoint to start from.

    Attributes:
        name: Of a savepoint, or the number of a kept checkpoint.
        keep_written: Whether it is wanted that rows written since then stay, and are written again.
    """

    name: str
    keep_written: bool


@dataclass(frozen=True, slots=True)
class Rewind:
    """What a new incarnation begins with.

    Attributes:
        cut: The checkpoint to go back to; the last one, where only uids change.
        renamed: New uids by the former ones, of what is stored there.
    """

    cut: Cut
    renamed: Mapping[str, str]


def find_start(session: StoreConnection, lease: Lease, environment: RunEnvironment, start: StartFrom) -> Cut:
    """The checkpoint that is asked for; called by the owner, so that none completes meanwhile.

    Raises:
        ConfigurationError: There is no such checkpoint, or rows have been written since and nobody said that they may
            be written again.
        StateError: It is not the one that was written.
    """
    cut = savepoints.find(session.driver, lease.job_id, start.name)
    later = lease.checkpoint_id - cut.checkpoint_id
    if later == 0:
        return cut
    head = savepoints.find(session.driver, lease.job_id, str(lease.checkpoint_id))
    written = "; ".join(_written_since(cut, head, environment)) or "no rows"
    since = f"{later} checkpoint(s) were completed after checkpoint {cut.checkpoint_id}, with {written}"
    if not start.keep_written:
        raise ConfigurationError(
            f"{since}. From there on everything is read and written again: delete those rows first where that matters,"
            " or let them be, and say so with --keep-written"
        )
    environment.warn(f"{since}; they stay")
    return cut


def _written_since(cut: Cut, head: Cut, environment: RunEnvironment) -> Iterator[str]:
    if environment.job.mode is CheckpointMode.AT_MOST_ONCE:
        yield "rows that mode at-most-once does not count by checkpoint"
        return
    sinks = {node.uid: node.sink for node in environment.graph.sinks}
    for uid, total in sorted(head.rows_written_total.items()):
        rows = total - cut.rows_written_total.get(uid, 0)
        if not rows:
            continue
        sink = sinks.get(uid)
        if sink is None:
            yield f'{rows} row(s) of sink "{uid}", which the job no longer has'
        elif sink.upsert is not None or sink.delivery is Delivery.IDEMPOTENT:
            yield f'{rows} row(s) of sink "{uid}" ({sink.target_name}: the same rows will replace them)'
        else:
            yield f'{rows} row(s) of sink "{uid}" ({sink.target_name}: they will be there twice)'


def plan(session: StoreConnection, lease: Lease, environment: RunEnvironment, start: Cut | None) -> Rewind | None:
    """What the run has to begin with; None when that is the last completed checkpoint as it is.

    Raises:
        StateError: What is stored cannot be taken over under another uid.
    """
    job = environment.job
    if start is None and (not job.renamed or lease.checkpoint_id == 0):
        return None
    cut = start or savepoints.find(session.driver, lease.job_id, str(lease.checkpoint_id))
    renamed = _taken_over(job, environment.graph, cut, rewinding.sources_of(session.driver, cut))
    if cut.checkpoint_id == lease.checkpoint_id and not renamed:
        return None
    return Rewind(cut, renamed)


def _taken_over(job: Job, graph: JobGraph, cut: Cut, stored_sources: set[str]) -> dict[str, str]:
    """The declared changes of uids that apply to what is stored."""
    renamed: dict[str, str] = {}
    sources, operators = {node.uid for node in graph.sources}, {node.uid for node in graph.operators}
    stored = {**dict.fromkeys(cut.states, operators), **dict.fromkeys(stored_sources, sources)}
    for old, new in job.renamed.items():
        if old not in stored:
            continue
        if new in stored or new in renamed.values():
            raise StateError(
                f'Job(…, renamed=…): "{old}" is to be "{new}" now, and under "{new}" something is stored already; give'
                f' one of them up with forget=["{old}"], or choose another uid'
            )
        if new not in stored[old]:
            what = "an operator" if old in cut.states else "a source"
            raise StateError(f'Job(…, renamed=…): what is stored of "{old}" belongs to {what}, and "{new}" is none')
        renamed[old] = new
    return renamed
