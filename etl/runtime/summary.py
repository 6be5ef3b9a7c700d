"""What came of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from etl.errors import EtlError
from etl.store.tables import RunStatus


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The truth about a run, in exact counts.

    Attributes:
        job: Name of the job.
        status: How it ended.
        rows_read: Records of the checkpoints that this run completed.
        rows_written: Rows of these checkpoints by sink uid; visible when the exit code is 0. Every checkpoint counts in
            exactly one run: the one that completed it, even when a later run had to make it visible.
        rows_rejected: Records set aside.
        checkpoint: Last completed checkpoint of the job.
        restarts: Attempts beyond the first.
        duration_s: From start to end, in seconds.
        exit_code: See docs/cli.md; 0 means done and visible.
        error: One line when it did not end well.
        cause: The error itself, for a traceback when somebody asks for one.
    """

    job: str
    status: RunStatus
    rows_read: int = 0
    rows_written: dict[str, int] = field(default_factory=dict)
    rows_rejected: int = 0
    checkpoint: int = 0
    restarts: int = 0
    duration_s: float = 0.0
    exit_code: int = 0
    error: str | None = None
    cause: EtlError | None = None

    def to_json(self) -> str:
        """The object that ``--json`` prints."""
        return json.dumps(
            {
                "job": self.job,
                "status": str(self.status),
                "rows_read": self.rows_read,
                "rows_written": self.rows_written,
                "rows_rejected": self.rows_rejected,
                "checkpoint": self.checkpoint,
                "restarts": self.restarts,
                "duration_s": round(self.duration_s, 3),
            },
            ensure_ascii=False,
        )
