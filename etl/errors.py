"""Every error of the framework, ordered by what the supervisor does with it.

::

    EtlError                      exit code
    ├── ConfigurationError            2      do not start; findings list everything wrong at once
    ├── AlreadyRunningError          75      a healthy run owns the job
    ├── TransientError               70      restart from the last completed checkpoint
    │   ├── DatabaseUnreachableError 69
    │   └── FenceBlockedError        70      an older transaction still holds the fence row
    ├── FencedError                  78      a newer run owns the job: stop quietly, touch nothing
    ├── StopTimeoutError            143      the user's stop came to no final checkpoint in time (130 for Ctrl-C)
    ├── StateError                   70      stored state contradicts the world: stop loudly
    │   └── LostRowsError            70      rows of a completed checkpoint are gone
    ├── RecordError                  65      a record cannot be carried exactly
    └── InternalError                70      a defect of the framework or of user code

The exit code is part of the public interface and stable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong before any work has started.

    Attributes:
        subject: What it is about, in the user's words (a uid, a table, a setting).
        problem: What is wrong, with the ids and numbers that show it.
        cure: What to do about it, preferably a statement or command to paste.
    """

    subject: str
    problem: str
    cure: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.problem}; {self.cure}"


def storable(message: str) -> str:
    """A message as another process and the store take it: lone surrogates and NUL, brought by data, are spelled out."""
    return message.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


class EtlError(Exception):
    """Base of all errors that the framework raises on purpose."""

    exit_code: ClassVar[int] = 70


class ConfigurationError(EtlError):
    """The job or its surroundings are not fit to start; nothing has been touched."""

    exit_code = 2

    def __init__(self, message: str, findings: Sequence[Finding] = ()) -> None:
        super().__init__(message)
        self.findings: tuple[Finding, ...] = tuple(findings)

    @classmethod
    def from_findings(cls, what: str, findings: Sequence[Finding]) -> ConfigurationError:
        """One error that lists every finding, one a line."""
        lines = "".join(f"\n  - {finding}" for finding in findings)
        return cls(f"{what}: {len(findings)} problem(s){lines}", findings)


class AlreadyRunningError(EtlError):
    """Another run owns the job and is alive."""

    exit_code = 75


class TransientError(EtlError):
    """The attempt failed for a reason that may pass; the supervisor restarts it."""


class DatabaseUnreachableError(TransientError):
    """A database does not answer or ended the connection."""

    exit_code = 69


class FenceBlockedError(TransientError):
    """An unfinished transaction of an older run still holds the fence row: recover again, then retry."""


class FencedError(EtlError):
    """A newer run owns the job. The holder of this error must not write anything any more."""

    exit_code = 78


class StopTimeoutError(EtlError):
    """A requested stop could not take a final checkpoint in time; nothing half-done is visible."""

    exit_code = 143


class StateError(EtlError):
    """What is stored contradicts what is found; going on could lose or repeat rows."""


class LostRowsError(StateError):
    """Rows of a completed checkpoint are neither staged nor in the target: going back to one before reads them again.

    Attributes:
        uid: The sink, where it is known.
    """

    def __init__(self, message: str, *, uid: str | None = None) -> None:
        super().__init__(message)
        self.uid = uid


class RecordError(EtlError):
    """A record cannot be carried exactly; nothing of its checkpoint becomes visible."""

    exit_code = 65

    def __init__(self, message: str, *, uid: str | None = None, split: str | None = None) -> None:
        super().__init__(message)
        self.uid = uid
        self.split = split


class InternalError(EtlError):
    """User code or the framework itself raised something unexpected."""
