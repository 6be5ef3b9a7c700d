"""Contract of a source: what is read, how it is split, and where the next read starts.

A source is *replayable* when reading from a stored position yields the same records again. Positions are plain
JSON objects; they are stored in the checkpoint that covers everything read before them. A position names the
**next** read, never the last one.

Life of a reader, all in one thread: ``assign`` (once or more) → ``read_batch`` … → ``snapshot_positions`` (at each
barrier) → ``close``. A crash at any moment loses nothing: the next run starts from the positions of the last
completed checkpoint.

A source that is read in parallel has one enumerator and as many readers as subtasks. Each reader is assigned one split
at a time, and the next one when ``read_batch`` has returned None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from etl.errors import Finding, InternalError
from etl.schema import Schema

Position = Mapping[str, Any]
"""A JSON object that tells one split's reader where the next read starts."""


@dataclass(frozen=True, slots=True)
class Split:
    """A unit of parallel reading with a lasting id.

    Attributes:
        id: Stable across runs; positions are stored under it.
        position: Where to start, None at the very beginning.
        size_bytes: How much there is to read, 0 when unknown: in parallel the largest are read first.
    """

    id: str
    position: Position | None = None
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a source is given at run time.

    Attributes:
        uid: The source's uid in the job.
        base_dir: Directory against which relative paths of the declaration are resolved.
        follow: True when the run goes on for new data; False when it reads what is there and ends.
        warn: Tells the user something that does not stop the run; one line.
    """

    uid: str
    base_dir: Path
    follow: bool = False
    warn: Callable[[str], None] = field(default=lambda _message: None)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a reader is, for people. Zero totals mean unknown."""

    done_bytes: int = 0
    total_bytes: int = 0


class SplitEnumerator(ABC):
    """Finds the splits of a source; one for all of its subtasks. Runs in one of them, in one thread at a time."""

    @abstractmethod
    def discover(self, known: Mapping[str, Position]) -> Sequence[Split]:
        """List the splits that have something to read, in reading order.

        Called at the start of an attempt with all stored positions, and with ``follow`` again whenever a reader ran
        dry. A split that was read to its end and has not grown need not be listed. Those that somebody is reading, or
        that wait for it, may be listed again: they are passed over.

        Args:
            known: Latest position of every split read so far, by split id, but for those that are being read.

        Returns:
            Splits to assign, each with the position to start from (taken from ``known`` where it is there).

        Raises:
            StateError: What is stored contradicts what is there (a file was rewritten or truncated).
        """


class SourceReader(ABC):
    """Reads the assigned splits, one after the other, in one thread."""

    @abstractmethod
    def assign(self, splits: Sequence[Split]) -> None:
        """Take over splits, to be read in the given order after those already assigned.

        A split may come again when it has grown; its position counts then, for another reader may have read on in it.
        """

    @abstractmethod
    def read_batch(self) -> pa.RecordBatch | None:
        """Read the next batch of bounded size (at least one row), or None when nothing is there *now*.

        The columns are those of :attr:`Source.schema`, in order, with its Arrow types.

        Raises:
            RecordError: A record cannot be carried exactly; names file, line, byte, column, value and cure.
            StateError: The split is not what the position was taken from.
        """

    @property
    def split_id(self) -> str:
        """The split of which the last batch was; needed where the source declares event time."""
        raise InternalError(f"{type(self).__name__} does not tell of which split a batch is: give it split_id")

    @abstractmethod
    def snapshot_positions(self) -> Mapping[str, Position]:
        """Positions after the last batch returned, of every split that moved since the previous call."""

    def progress(self) -> Progress:
        """How far reading is. May be called from another thread."""
        return Progress()

    @abstractmethod
    def close(self) -> None:
        """Release files and connections; called exactly once, also after errors."""


class Source(ABC):
    """A declaration of what to read; immutable, made by the user."""

    replayable: ClassVar[bool] = True
    """False when a position cannot bring the records back (standard input): the guarantee is then at-most-once."""

    @property
    @abstractmethod
    def schema(self) -> Schema:
        """The columns of the stream, known before the run."""

    def preflight(self, context: SourceContext) -> Sequence[Finding]:
        """Everything that would stop this source from being read, found before any work starts."""
        return ()

    def describe(self) -> str:
        """One line for ``etl explain``."""
        return type(self).__name__

    @abstractmethod
    def create_enumerator(self, context: SourceContext) -> SplitEnumerator:
        """A new enumerator for one attempt."""

    @abstractmethod
    def create_reader(self, context: SourceContext) -> SourceReader:
        """A new reader for one attempt."""
