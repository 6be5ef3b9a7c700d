"""Contract of a lookup: a table elsewhere that is asked for rows by key while a job runs.

A lookup *declares*; a **reader** asks, one question for all the keys of a batch that are not remembered. What it finds
is what is there at that moment: a replay after a failure may find something else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from etl.clock import Clock
from etl.errors import Finding
from etl.schema import Schema
from etl.sink import Connect

Found: TypeAlias = tuple[int, tuple[Any, ...]]
"""Place of a key among those asked for, and the values of its row: exact Python values, None for NULL."""


@dataclass(frozen=True, slots=True)
class LookupContext:
    """What a lookup is given, before a run and for an attempt.

    Attributes:
        uid: The operator that asks.
        connect: Opens a connection to the lookup's database.
        clock: Time.
    """

    uid: str
    connect: Connect
    clock: Clock


Lookups: TypeAlias = Callable[[str, str | None], LookupContext]
"""From the uid of an operator and the name of a database to what its lookup is given."""


class LookupReader(ABC):
    """Asks, in one thread; lives for one attempt."""

    @abstractmethod
    def find(self, keys: pa.RecordBatch) -> Sequence[Found]:
        """The rows with these keys, at most one for each.

        Args:
            keys: Columns of the key in the lookup's order, without NULLs; all differ.

        Returns:
            Values in the order of the lookup's columns, without the key.

        Raises:
            TransientError: The question may be answered in another attempt.
            RecordError: A value cannot be carried exactly, or a key has several rows.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections; called exactly once, also after errors."""


class Lookup(ABC):
    """A declaration of where rows are looked up; immutable, made by the user."""

    @property
    @abstractmethod
    def schema(self) -> Schema:
        """The columns of the key and those that are looked up, in the order of declaration."""

    @property
    @abstractmethod
    def key(self) -> tuple[str, ...]:
        """The columns that identify a row."""

    @property
    def database(self) -> str | None:
        """Name of the configured database that is asked; None is the store database."""
        return None

    @abstractmethod
    def preflight(self, context: LookupContext) -> Sequence[Finding]:
        """Everything that would stop this lookup, found before any work starts; all findings at once."""

    def describe(self) -> str:
        """A few words for ``etl explain``."""
        return type(self).__name__

    @abstractmethod
    def create_reader(self, context: LookupContext) -> LookupReader:
        """A new reader for one attempt. Connects when it is first asked."""
