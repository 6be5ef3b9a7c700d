"""What came of a crash test, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from etl.testing.chaos.comparison import Difference
from etl.testing.chaos.process import Kill

EXIT_OK = 0
EXIT_NOT_OK = 1


class ChaosStatus(StrEnum):
    """What a crash test has shown."""

    OK = "ok"
    DIFFERENT = "different"
    NONDETERMINISTIC = "nondeterministic"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class Trial:
    """A run that was killed, and the run after it.

    Attributes:
        kill: Where it was to be killed.
        reached: Whether it was: the number of batches and checkpoints may change from run to run.
        failure: Why the run after it did not end well, empty when it did.
        differences: By sink uid, what its target shows compared with the undisturbed run.
    """

    kill: Kill
    reached: bool
    failure: str = ""
    differences: Mapping[str, Difference] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cell:
    """What the kills at one step did to one sink: the worst of each kind.

    Attributes:
        kills: How many there were.
        failures: After how many of them the next run did not end well.
        untried: How many there was no time for.
        difference: Rows lost and so on, at most.
    """

    kills: int
    failures: int
    untried: int
    difference: Difference

    @property
    def is_ok(self) -> bool:
        """Whether something was tried, all of it, and nothing is wrong."""
        return self.kills > 0 and not self.failures and not self.untried and not self.difference

    def __str__(self) -> str:
        if self.failures:
            return "the run after it fails" + (f"; {self.difference}" if self.difference else "")
        if self.difference or self.is_ok:
            return str(self.difference)
        return "not tried" if self.untried else "not reached"


@dataclass(frozen=True, slots=True)
class NonDeterminism:
    """Two undisturbed runs that did not yield the same.

    Attributes:
        sink: Its uid.
        rows: How many rows the first run wrote.
        difference: How the second one's target differs.
        suspects: What may be the reason.
    """

    sink: str
    rows: int
    difference: Difference
    suspects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """What came of a crash test.

    Attributes:
        job: Name of the job.
        sinks: Rows that an undisturbed run writes, by sink uid.
        promises: What ``etl explain`` promises, by sink uid.
        rows_read: Rows that an undisturbed run reads.
        checkpoints: Checkpoints that it takes.
        sample_rows: Rows of each source at most, None when all were read.
        trials: Every kill, in the order of the steps.
        untried: Kills that there was no time for.
        nondeterminism: Sinks where the undisturbed runs differ; then nothing was killed.
        duration_s: How long it took.
    """

    job: str
    sinks: Mapping[str, int]
    promises: Mapping[str, str]
    rows_read: int
    checkpoints: int
    sample_rows: int | None
    trials: Sequence[Trial] = ()
    untried: Sequence[Kill] = ()
    nondeterminism: Sequence[NonDeterminism] = ()
    duration_s: float = 0.0

    @property
    def kills(self) -> int:
        """How many runs were killed."""
        return sum(trial.reached for trial in self.trials)

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the steps, in the order of an undisturbed run."""
        return tuple(dict.fromkeys([*(trial.kill.step for trial in self.trials), *(one.step for one in self.untried)]))

    @property
    def status(self) -> ChaosStatus:
        """What it has shown."""
        if self.nondeterminism:
            return ChaosStatus.NONDETERMINISTIC
        cells = [self.cell(step, uid) for step in self.steps for uid in self.sinks]
        if any(cell.failures or cell.difference for cell in cells):
            return ChaosStatus.DIFFERENT
        return ChaosStatus.OK if cells and all(cell.is_ok for cell in cells) else ChaosStatus.INCOMPLETE

    @property
    def exit_code(self) -> int:
        """0 only if every cell is ok."""
        return EXIT_OK if self.status is ChaosStatus.OK else EXIT_NOT_OK

    def cell(self, step: str, uid: str) -> Cell:
        """What the kills at a step did to a sink."""
        trials = [trial for trial in self.trials if trial.kill.step == step]
        differences = [trial.differences.get(uid, Difference()) for trial in trials]
        worst = Difference(
            lost=max((one.lost for one in differences), default=0),
            duplicated=max((one.duplicated for one in differences), default=0),
            unexpected=max((one.unexpected for one in differences), default=0),
        )
        kills = sum(trial.reached for trial in trials)
        failures = sum(bool(trial.failure) for trial in trials)
        return Cell(kills, failures, sum(kill.step == step for kill in self.untried), worst)

    def assert_exact(self) -> None:
        """Nothing was lost, nothing came twice, nothing is left untried.

        Raises:
            AssertionError: Shows the table.
        """
        __tracebackhide__ = True
        if self.status is not ChaosStatus.OK:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The report for people, the summary last."""
        if self.nondeterminism:
            yield from self._nondeterminism_lines()
        else:
            yield from self._table()
            yield from self._failure_lines()
            yield from self._notes()
        yield self.summary()

    def _table(self) -> Iterator[str]:
        rows = [["STEP", "KILLS", *self.sinks]]
        for step in self.steps:
            found = [self.cell(step, uid) for uid in self.sinks]
            rows.append([step, str(found[0].kills), *map(str, found)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for step, kills, *cells in rows:
            shown = [step.ljust(widths[0]), kills.rjust(widths[1])]
            shown += [cell.ljust(width) for cell, width in zip(cells, widths[2:], strict=True)]
            yield "  ".join(shown).rstrip()

    def _failure_lines(self) -> Iterator[str]:
        for trial in self.trials:
            if trial.failure:
                yield f"killed at {trial.kill}: {trial.failure}"
            for uid, difference in trial.differences.items():
                if difference:
                    yield f"killed at {trial.kill}: {uid}: {_told(difference)}"

    def _notes(self) -> Iterator[str]:
        for uid, rows in self.sinks.items():
            if rows == 0:
                yield f"note: {uid} gets no row from this input, so nothing is shown about it"
            if not self.promises[uid].startswith("exactly-once"):
                yield f"note: {uid} is promised {self.promises[uid]} (see etl explain)"
        if self.checkpoints < 2:
            yield "note: this input makes one checkpoint only; with --rows its batches are cut smaller"

    def _nondeterminism_lines(self) -> Iterator[str]:
        for one in self.nondeterminism:
            yield f"{one.sink}: two undisturbed runs differ: {one.rows} rows, {_told(one.difference)}"
            for suspect in one.suspects:
                yield f"  suspect: {suspect}"

    def summary(self) -> str:
        """One line."""
        if self.nondeterminism:
            sinks = ", ".join(one.sink for one in self.nondeterminism)
            return f"{self.job}: not deterministic ({sinks}); nothing was killed"
        cells = [self.cell(step, uid) for step in self.steps for uid in self.sinks]
        wrong = sum(bool(cell.failures or cell.difference) for cell in cells)
        untried = sum(not cell.is_ok for cell in cells) - wrong
        told = f"{self.job}: {self.kills} kills at {len(self.steps)} steps, {self.rows_read} rows"
        parts = [f"{wrong} cells of {len(cells)} are wrong"] if wrong else []
        parts += [f"{untried} cells of {len(cells)} are not tried in full"] if untried else []
        return f"{told}: {', '.join(parts) or 'every target is as after an undisturbed run'}"

    def to_json(self) -> str:
        """One object on one line."""
        return json.dumps(
            {
                "job": self.job,
                "status": str(self.status),
                "rows_read": self.rows_read,
                "sample_rows": self.sample_rows,
                "checkpoints": self.checkpoints,
                "kills": self.kills,
                "untried": len(self.untried),
                "sinks": {uid: {"rows": rows, "promised": self.promises[uid]} for uid, rows in self.sinks.items()},
                "steps": [self._step_document(step) for step in self.steps],
                "wrong": [_trial_document(trial) for trial in self.trials if trial.failure or _wrong(trial)],
                "nondeterministic": [
                    {"sink": one.sink, "rows": one.rows, **_document(one.difference), "suspects": list(one.suspects)}
                    for one in self.nondeterminism
                ],
                "duration_s": round(self.duration_s, 3),
            },
            ensure_ascii=False,
        )

    def _step_document(self, step: str) -> dict[str, Any]:
        cells = {uid: self.cell(step, uid) for uid in self.sinks}
        return {
            "step": step,
            "kills": next(iter(cells.values())).kills,
            "sinks": {
                uid: {
                    "result": str(cell),
                    "lost": cell.difference.lost,
                    "duplicated": cell.difference.duplicated,
                    "unexpected": cell.difference.unexpected,
                }
                for uid, cell in cells.items()
            },
        }


def _wrong(trial: Trial) -> dict[str, Difference]:
    return {uid: difference for uid, difference in trial.differences.items() if difference}


def _trial_document(trial: Trial) -> dict[str, Any]:
    return {
        "step": trial.kill.step,
        "uid": trial.kill.uid,
        "occurrence": trial.kill.occurrence,
        "failure": trial.failure or None,
        "sinks": {uid: _document(difference) for uid, difference in _wrong(trial).items()},
    }


def _document(difference: Difference) -> dict[str, Any]:
    found: dict[str, Any] = {
        "lost": difference.lost,
        "duplicated": difference.duplicated,
        "unexpected": difference.unexpected,
        "columns": list(difference.columns),
    }
    return {**found, "example": dict(difference.example)} if difference.example else found


def _told(difference: Difference) -> str:
    parts = [str(difference)]
    if difference.columns:
        parts.append(f"in {', '.join(difference.columns)}")
    if difference.example:
        parts.append("for example " + ", ".join(f"{name}={value}" for name, value in difference.example.items()))
    return ", ".join(parts)
