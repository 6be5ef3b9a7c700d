"""Every mutant of the protocol does harm on a real server, and the oracle sees it; without it nothing is wrong.

A fault that cannot be told from its absence would prove nothing: these tests are what the others are worth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from tests.faults.arena import Arena
from tests.faults.cases import Undisturbed
from tests.faults.mutations import MUTATIONS
from tests.faults.schedules import Killed, Met, Schedule, Stage
from tests.model.mutants import Mutant


@dataclass(frozen=True, slots=True)
class Harm:
    """Where a mutant does harm.

    Attributes:
        kind: In which job.
        schedule: When what happens to its runs.
        symptom: How the oracle puts it.
    """

    kind: str
    schedule: Schedule
    symptom: str


AHEAD = "the target has rows of checkpoint 2, and the store knows none after 1"
LOG_LEFT = "rows are left in the log"
HARM: Mapping[Mutant, Harm] = {
    Mutant.NO_FENCE: Harm("write-ahead", Met(("source.batch", 4), ("run.ending", 1)), LOG_LEFT),
    Mutant.NO_COMPARE_AND_SET: Harm(
        "two-phase", Met(("checkpoint.completing", 2), ("recovery.begin", 1)), "second run exited with"
    ),
    Mutant.NO_EPOCH: Harm("two-phase", Killed([("sink.prepared", 2)]), "run after the fault exited with"),
    Mutant.STALE_READ: Harm(
        "two-phase", Met(("source.batch", 4), ("lease.claiming", 1), ("commit.end", 2)), "second run exited with 70"
    ),
    Mutant.SETTLE_ONCE: Harm(
        "write-ahead", Met(("sink.prepare.before", 2), ("recovery.settled", 1), ("sink.prepared", 2)), LOG_LEFT
    ),
    Mutant.GID_WITHOUT_EPOCH: Harm(
        "two-phase", Met(("recovery.sessions_ended", 1), ("sink.prepared", 1)), "second run exited with 70"
    ),
    Mutant.TOUCH_NEWER: Harm(
        "two-phase", Met(("recovery.sessions_ended", 1), ("sink.prepared", 1)), "second run exited with 70"
    ),
    Mutant.COMMIT_ALL: Harm("two-phase", Killed([("sink.prepared", 2)]), AHEAD),
    Mutant.ROLLBACK_ALL: Harm("two-phase", Killed([("checkpoint.completed", 2)]), "run after the fault exited with 70"),
    Mutant.ABSENT_IS_DONE: Harm(
        "two-phase", Killed([("checkpoint.completed", 2)], rolled_back=True), "rows are gone, and the run after exits"
    ),
    Mutant.COMPLETE_BEFORE_PREPARE: Harm(
        "two-phase", Killed([("checkpoint.completed", 2)]), "run after the fault exited with 70"
    ),
    Mutant.COMMIT_BEFORE_COMPLETE: Harm("two-phase", Killed([("checkpoint.completing", 2)]), AHEAD),
    Mutant.TWO_TRANSACTIONS: Harm("transactional", Killed([("checkpoint.head_advanced", 2)]), "appended has too much"),
    Mutant.LOG_WITHOUT_EPOCH: Harm(
        "write-ahead", Met(("recovery.sessions_ended", 1), ("sink.prepared", 1)), "second run exited with 70"
    ),
    Mutant.PRUNE_BEFORE_DELIVERY: Harm(
        "write-ahead", Killed([("sink.fenced", 2)]), "run after the fault exited with 70"
    ),
    Mutant.DELIVER_BLINDLY: Harm("write-ahead", Killed([("commit.delivered", 2)]), "appended has too much"),
    Mutant.SKIP_REPLAY: Harm("upsert", Killed([("sink.prepared", 2)], rows=[5, 100]), "by_key lost"),
}


@pytest.mark.parametrize("mutant", Mutant, ids=lambda mutant: str(mutant.name))
def test_mutant_does_harm_that_is_seen(arena: Arena, undisturbed: Undisturbed, stranger: str, mutant: Mutant) -> None:
    harm = HARM[mutant]
    expected = undisturbed.state(harm.kind)
    Stage(arena, stranger).play(harm.schedule, harm.kind, expected)
    arena.clean()

    with pytest.raises(AssertionError) as caught:
        Stage(arena, stranger, {"mutant": mutant}).play(harm.schedule, harm.kind, expected)

    assert re.search(harm.symptom, str(caught.value)), str(caught.value)


def test_every_mutant_of_the_model_is_tried_on_a_server() -> None:
    assert set(MUTATIONS) == set(HARM) == set(Mutant)
