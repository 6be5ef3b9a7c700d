"""The steps of each job, by name: the list against which every clean run is held.

A step that a run emits and that is not listed here fails the suite, and so does a listed one that is not seen: so no
step can be added to the engine without meeting every fault.
"""

from __future__ import annotations

from collections.abc import Mapping

_EVERY_RUN = (
    "lease.claiming",
    "lease.claimed",
    "recovery.begin",
    "recovery.sessions_ended",
    "recovery.settled",
    "recovery.fenced",
    "recovery.verified",
    "source.batch",
    "checkpoint.triggered",
    "source.barrier",
    "sink.barrier",
    "sink.written",
    "sink.prepared",
    "sink.acknowledging",
    "transaction.begun",
    "transaction.fenced",
    "checkpoint.completing",
    "checkpoint.head_advanced",
    "checkpoint.recorded",
    "checkpoint.completed",
    "commit.begin",
    "commit.end",
    "run.ending",
    "run.ended",
)
_STATE = ("state.snapshotting", "state.snapshotted")
_OWN_TRANSACTION = ("sink.begun", "sink.fenced", "sink.prepare.before")
_COMMITTING = ("recover.listed", "commit.before", "commit.after")

STEPS: Mapping[str, frozenset[str]] = {
    "transactional": frozenset(_EVERY_RUN),
    "two-phase": frozenset({*_EVERY_RUN, *_OWN_TRANSACTION, *_COMMITTING}),
    "two-phase-upsert": frozenset({*_EVERY_RUN, *_OWN_TRANSACTION, *_COMMITTING}),
    "write-ahead": frozenset({*_EVERY_RUN, *_OWN_TRANSACTION, *_COMMITTING, "commit.delivered"}),
    "upsert": frozenset({*_EVERY_RUN, *_OWN_TRANSACTION}),
    "united": frozenset({*_EVERY_RUN, *_OWN_TRANSACTION, *_COMMITTING, "commit.delivered"}),
    "keyed": frozenset({*_EVERY_RUN, *_OWN_TRANSACTION, *_COMMITTING, *_STATE}),
    "keyed-apart": frozenset({*_EVERY_RUN, *_OWN_TRANSACTION, *_COMMITTING, *_STATE, "commit.delivered"}),
    "timed-4": frozenset({*_EVERY_RUN, *_OWN_TRANSACTION, *_COMMITTING, *_STATE}),
}
"""By job: what a run emits that is not disturbed."""

SETTLING = ("recover.listed", "recover.each.before", "recover.each.after")
_DELIVERING = ("sink.begun", "sink.fenced", "sink.written", "commit.delivered")

RECOVERY_STEPS: Mapping[str, frozenset[str]] = {
    "two-phase": frozenset(SETTLING),
    "two-phase-upsert": frozenset(SETTLING),
    "write-ahead": frozenset({*SETTLING, *_DELIVERING}),
    "united": frozenset({*SETTLING, *_DELIVERING}),
    "keyed": frozenset(SETTLING),
    "keyed-apart": frozenset({*SETTLING, *_DELIVERING}),
    "timed-4": frozenset(SETTLING),
}
"""By job: what a run emits before it reads, besides the steps of every start, when the one before has left a unit."""

LEFT_BY_CHANCE = ("keyed", "keyed-apart", "timed-4")
"""Jobs with a sink that leaves a unit and one that leaves none: which of them has prepared second is chance."""

STARTING = tuple(step for step in _EVERY_RUN if step.startswith(("lease.", "recovery.")))


CASES = [(kind, step) for kind, names in STEPS.items() for step in sorted(names)]
"""Every job with each of its steps."""

RECOVERY_CASES = [(kind, step) for kind, names in RECOVERY_STEPS.items() for step in sorted({*names, *STARTING})]
"""Every job that can leave a unit behind, with each step of the recovery from it."""
