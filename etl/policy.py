"""How often a job checkpoints and how it restarts: values with bounds, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

from etl.errors import ConfigurationError, Finding


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """When checkpoints are taken and how many are kept.

    Attributes:
        interval_s: Seconds from one trigger to the next. At the end of input a checkpoint is always taken.
        rows: Trigger also after this many rows were read; None for time alone.
        timeout_s: Seconds after which an unfinished checkpoint fails the attempt.
        keep: How many completed checkpoints stay in the store (savepoints are kept beside them).
    """

    interval_s: float = 10.0
    rows: int | None = None
    timeout_s: float = 600.0
    keep: int = 10

    def __post_init__(self) -> None:
        findings = [
            *_below(self.interval_s, 0.01, "CheckpointPolicy.interval_s"),
            *_below(self.timeout_s, 0.1, "CheckpointPolicy.timeout_s"),
            *_below(self.keep, 1, "CheckpointPolicy.keep"),
            *(() if self.rows is None else _below(self.rows, 1, "CheckpointPolicy.rows")),
        ]
        if findings:
            raise ConfigurationError.from_findings("checkpoint policy", findings)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often and how fast a failed attempt is repeated.

    Attributes:
        attempts: Restarts in a row without a completed checkpoint before the run gives up; 0 never restarts.
        delay_s: Seconds before the first restart; doubled each time, with jitter.
        delay_max_s: Upper bound of the delay.
    """

    attempts: int = 10
    delay_s: float = 0.5
    delay_max_s: float = 30.0

    def __post_init__(self) -> None:
        findings = [
            *_below(self.attempts, 0, "RestartPolicy.attempts"),
            *_below(self.delay_s, 0.0, "RestartPolicy.delay_s"),
            *_below(self.delay_max_s, self.delay_s, "RestartPolicy.delay_max_s"),
        ]
        if findings:
            raise ConfigurationError.from_findings("restart policy", findings)


def _below(value: float, least: float, name: str) -> list[Finding]:
    """A finding unless the value is a finite number of at least ``least`` (which NaN is not)."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < float("inf"):
        return []
    return [Finding(name, f"{value!r} is not a finite number of at least {least:g}", "choose another value")]
