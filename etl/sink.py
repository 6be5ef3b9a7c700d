"""Contract of a sink: rows are staged until a checkpoint completes, then made visible, exactly once.

A sink *declares*; a **writer** stages the rows of one checkpoint after another; a **committer** makes what was
staged visible after the checkpoint has been recorded in the store. A sink supports exactly-once for appended rows if
and only if it takes part in the store's transaction or supports a committer.

Life of a writer, all in one thread::

    write … write → prepare_commit(7) → write … write → prepare_commit(8) → … → close

``prepare_commit(n)`` stages everything written since the previous call, durably, and returns a handle of it. The
runtime sends the handle with its acknowledgement; one store transaction records the handles of all sinks together
with the sources' positions: that completes checkpoint *n*. Only then :meth:`Committer.commit` is called.

What a crash means: before the handle is recorded, the next run rolls back what was staged and reads the same records
again; after it, the next run commits what was staged before it reads anything. ``commit`` may therefore be called
again for the same handle and must be idempotent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol

import psycopg
import pyarrow as pa

from etl.errors import Finding
from etl.schema import Schema

Connection = psycopg.Connection[Any]
Emit = Callable[..., None]
"""``emit("sink.prepared", uid=…, checkpoint=…)``: announces a protocol step as it happens (see docs/telemetry.md)."""


class Delivery(StrEnum):
    """How a sink's rows become visible; decides the guarantee that ``etl explain`` prints."""

    TRANSACTIONAL = "transactional"
    TWO_PHASE = "two-phase commit"
    WRITE_AHEAD = "write-ahead log"
    WRITE_AHEAD_AT_LEAST_ONCE = "write-ahead log, target without transactions"
    IDEMPOTENT = "idempotent upsert"
    DIRECT = "direct"


class CheckpointMode(StrEnum):
    """What a job promises about each record after a failure."""

    EXACTLY_ONCE = "exactly-once"
    AT_LEAST_ONCE = "at-least-once"
    AT_MOST_ONCE = "at-most-once"


@dataclass(frozen=True, slots=True)
class Committable:
    """Handle of what one sink subtask staged for one checkpoint.

    Attributes:
        uid: The sink.
        subtask: Which of its parallel instances, from 0.
        checkpoint_id: The checkpoint whose rows these are.
        epoch: Fencing token of the attempt that staged them; part of every external id, so ids are never reused.
        rows: How many rows become visible by the commit.
        payload: What the committer needs to find the staged rows; a small JSON object without secrets.
    """

    uid: str
    subtask: int
    checkpoint_id: int
    epoch: int
    rows: int
    payload: Mapping[str, Any]


class Ledger(Protocol):
    """The target's own record of what was committed, and the fence against outdated runs.

    Both live in schema ``etl`` of the target database. Every method takes a connection to that database; those that
    say so must be called inside the transaction that writes the rows.
    """

    def fence(self, connection: Connection) -> None:
        """Outdate all former epochs of this job in this database. Own short transaction; idempotent.

        Raises:
            FencedError: A newer epoch is already there.
            FenceBlockedError: A transaction of a former epoch still holds the row.
        """

    def hold_fence(self, connection: Connection) -> None:
        """Inside the writing transaction, before the first row: keep the fence row locked (FOR SHARE) at this epoch.

        The lock lives as long as the transaction, also while it is prepared: a newer run cannot fence before this
        transaction is resolved.

        Raises:
            FencedError: The fence has moved on.
        """

    def record(self, connection: Connection, committable: Committable) -> None:
        """Inside the writing transaction, after the last row: write the ledger row of this unit."""

    def is_recorded(self, connection: Connection, committable: Committable) -> bool:
        """Whether the ledger row of exactly this unit (epoch included) is committed."""

    def newest(self, connection: Connection) -> int:
        """The newest checkpoint of which a unit of this sink is recorded, 0 when there is none."""

    def prune(self, connection: Connection, checkpoint_id: int) -> None:
        """Delete ledger rows of this sink that are old enough never to be asked for again; never the newest ones."""


class WriteAheadLog(Protocol):
    """Durable log in the store of rows that were staged but not yet delivered."""

    def append(self, checkpoint_id: int, batch: pa.RecordBatch) -> None:
        """Add rows of a checkpoint; durable only after :meth:`seal`."""

    def seal(self, checkpoint_id: int) -> int:
        """Commit what was appended for the checkpoint; returns its number of rows (0: nothing was appended)."""

    def read(self, committable: Committable) -> AbstractContextManager[Iterator[pa.RecordBatch]]:
        """The logged batches of one unit, in order, in bounded memory."""

    def prune(self, committable: Committable) -> None:
        """Drop the unit from the log after it was delivered; idempotent."""

    def discard_unfinished(self, completed: Sequence[Committable]) -> None:
        """Recovery: drop units of former epochs that no completed checkpoint recorded."""

    def pending(self, completed: Sequence[Committable]) -> Sequence[Committable]:
        """Recovery: recorded units still in the log, oldest first."""

    def close(self) -> None:
        """Release the log's connection; what was not sealed is gone."""


class CheckpointTransaction(Protocol):
    """The one store transaction in which a checkpoint completes, shared by all transactional sinks of the job."""

    def use(self) -> AbstractContextManager[Connection]:
        """Exclusive use of the transaction's connection for a few statements. Never commit or roll back in it."""


class CheckpointTransactions(Protocol):
    """Hands out the transaction of the checkpoint that is being filled."""

    def of(self, checkpoint_id: int) -> CheckpointTransaction:
        """The open transaction of this checkpoint; begun, with the fence held, by the first caller."""

    @property
    def exclusive(self) -> bool:
        """Whether one sink alone writes in them; it may leave a COPY open between uses, until it has prepared."""


class Connect(Protocol):
    """Opens a connection to the sink's database."""

    def __call__(self, role: str) -> Connection:
        """Open an autocommit connection with the framework's settings (durability, keepalives, timeouts).

        Args:
            role: What it is for, shown in ``pg_stat_activity.application_name``.
        """


@dataclass(frozen=True, slots=True)
class PreflightContext:
    """What a sink may look at before any work starts.

    Attributes:
        uid: The sink's uid.
        schema: Columns it will be given.
        connect: Opens a connection to its target database.
        target_is_store: Whether the target database is the store database.
        base_dir: Directory for relative paths.
        unit_time_s: Longest time a unit may stay open: checkpoint interval + timeout; server timeouts exceed it.
    """

    uid: str
    schema: Schema
    connect: Connect
    target_is_store: bool
    base_dir: Path
    unit_time_s: float


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a writer and a committer are given for one attempt.

    Attributes:
        job_id: Random id of the job, safe in public identifiers such as gids.
        uid: The sink's uid.
        sink_id: Small number of the sink within the job, for identifiers.
        subtask: Which parallel instance this is, from 0.
        epoch: Fencing token of this attempt.
        checkpoint_id: Last completed checkpoint; the first unit written belongs to the next one.
        schema: Columns of every batch.
        connect: Opens a connection to the target database.
        ledger: The target's ledger and fence.
        log: The store's write-ahead log for this sink subtask.
        transactions: The store's transaction of each checkpoint.
        base_dir: Directory for relative paths.
        unit_time_s: Longest time a unit may stay open, in seconds.
        emit: Announces protocol steps.
    """

    job_id: str
    uid: str
    sink_id: int
    subtask: int
    epoch: int
    checkpoint_id: int
    schema: Schema
    connect: Connect
    ledger: Ledger
    log: WriteAheadLog
    transactions: CheckpointTransactions
    base_dir: Path
    unit_time_s: float
    emit: Emit


@dataclass(frozen=True, slots=True)
class Upsert:
    """By what a row replaces an earlier one.

    Attributes:
        key: Columns that identify a row.
        version: Column that orders the versions of a row: only the same or a higher one replaces what is there.
    """

    key: tuple[str, ...]
    version: str | None = None


class SinkWriter(ABC):
    """Stages rows, unit by unit, in one thread; lives for one attempt."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Take a batch into the current unit. Nothing of it may become visible to readers before its checkpoint
        (an idempotent sink may show it from ``prepare_commit`` on).

        Raises:
            RecordError: A value does not fit the target.
            FencedError: A newer run owns the job.
        """

    @abstractmethod
    def prepare_commit(self, checkpoint_id: int) -> Committable | None:
        """Stage everything written since the last call, durably, and close the unit.

        Returns:
            The handle, or None when there is nothing to commit later (no rows came, or they are already in place). An
            empty unit must leave nothing behind.
        """

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows written since the writer was made; read by the runtime at each barrier after ``prepare_commit``."""

    @abstractmethod
    def close(self) -> None:
        """Abandon the open unit and release connections; called exactly once, also after errors."""


class Committer(ABC):
    """Makes staged rows visible and cleans up after former runs; lives for one attempt, in the coordinator's thread."""

    @abstractmethod
    def recover(self, completed: Sequence[Committable]) -> int:
        """Settle everything that former epochs left: commit what is in ``completed``, roll back the rest.

        Called before anything is read, possibly again after a blocked fence. Must never touch anything whose epoch is
        not below :attr:`SinkContext.epoch`: a newer run may already be at work.

        Args:
            completed: This sink's handles recorded in the last completed checkpoint.

        Returns:
            Rows made visible by this call.
        """

    def verify(self, completed: Sequence[Committable]) -> None:
        """After fencing: assert that everything in ``completed`` is visible.

        Raises:
            StateError: Something is lost; says what, and that absence is never taken for success.
        """

    @abstractmethod
    def commit(self, committable: Committable) -> None:
        """Make one unit visible. Idempotent; called in checkpoint order, only after the checkpoint has completed.

        Raises:
            StateError: The unit is gone without having been committed.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections; called exactly once, also after errors."""


class Sink(ABC):
    """A declaration of where rows go and how they become visible; immutable, made by the user."""

    delivery: ClassVar[Delivery]

    @property
    def database(self) -> str | None:
        """Name of the configured database it writes to; None is the store database."""

    @property
    def target_name(self) -> str:
        """What it writes to, in a few words. A run warns when that has changed: rows from before are not moved."""
        return self.describe()

    @property
    def exclusive_target(self) -> str | None:
        """A name of the thing written to when only one sink of a job may write to it, else None."""

    @property
    def monotone(self) -> bool:
        """For idempotent sinks: whether no reader ever sees a row go back to an older value during a replay."""
        return False

    @property
    def upsert(self) -> Upsert | None:
        """By what its rows replace earlier ones, None where every row is added."""

    def preflight(self, context: PreflightContext) -> Sequence[Finding]:
        """Everything that would stop this sink, found before any work starts; all findings at once."""
        return ()

    def prepare_target(self, context: PreflightContext) -> None:
        """Create what the declaration asks to be created (``create=True``). Called after preflight, idempotent."""

    def describe(self) -> str:
        """One line for ``etl explain``."""
        return type(self).__name__

    def fence(self, context: SinkContext) -> None:
        """Outdate former runs at the target. Called after every committer has recovered, before anything is read.

        Raises:
            FencedError: A newer run has been here.
            FenceBlockedError: Something of a former run is still open there; recovery runs again.
        """

    @abstractmethod
    def create_writer(self, context: SinkContext) -> SinkWriter:
        """A new writer for one attempt."""


class SupportsCommitter(ABC):
    """Capability of a sink whose rows become visible by a commit after the checkpoint."""

    @abstractmethod
    def create_committer(self, context: SinkContext) -> Committer:
        """A new committer for one attempt."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """A place of its own for one trial of a crash test, empty at first and removed as a whole afterwards.

    Attributes:
        schema: A PostgreSQL schema; it exists in the store and in every database that a sink of the job names.
        directory: A directory.
    """

    schema: str
    directory: Path


@dataclass(frozen=True, slots=True)
class ScratchTable:
    """A table of the sink's database that holds what a sink has written to a scratch place."""

    schema: str
    name: str


class SupportsScratch(ABC):
    """Capability of a sink that can write to another place for a while, so that a crash test leaves the target alone.

    Of each trial, ``etl chaos`` calls :meth:`copy_target` once; then :meth:`aimed_at` in every process, whose run works
    with what that returns and with nothing else of this sink; and at last, when no run is under way,
    :meth:`visible_rows` of the sink that was aimed.
    """

    @abstractmethod
    def aimed_at(self, scratch: Scratch) -> Sink:
        """This sink, writing to the scratch place and nowhere else. Opens nothing.

        For the same place it must always name the same target, in every process.
        """

    def copy_target(self, context: PreflightContext, scratch: Scratch) -> None:
        """Make an empty target in the scratch place as the real one is. The default leaves that to the run.

        Called for the sink as it was declared. The real target is only looked at.

        Raises:
            ConfigurationError: There is no target to copy.
        """

    @abstractmethod
    def visible_rows(self, context: PreflightContext) -> ScratchTable | Iterable[pa.RecordBatch]:
        """All rows that readers of the target see now, each as often as it is there.

        Called for a sink that was aimed. A table is compared where it is, by its server; batches are kept in memory.
        """


def rows_of(batches: Iterable[pa.RecordBatch]) -> int:
    """Total number of rows."""
    return sum(batch.num_rows for batch in batches)
