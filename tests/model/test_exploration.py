"""The protocol holds in every state that can be reached, and every mutant of it is caught."""

from __future__ import annotations

import os

import pytest

from tests.model.exploration import Exploration, explore
from tests.model.mutants import CAUGHT, Mutant
from tests.model.protocol import Protocol
from tests.model.world import KINDS

THOROUGH = bool(os.environ.get("ETL_MODEL_THOROUGH"))
"""Four checkpoints and four runs instead of three; takes an hour and much memory."""

SIZE = 4 if THOROUGH else 3
BORDERS = (1, 2)
"""A replayed checkpoint may end elsewhere than it did at first."""


def _explored(
    kind: str, *mutants: Mutant, spans: tuple[int, ...] = (1,), runs: int = SIZE, meddling: bool = False
) -> Exploration:
    return explore(Protocol(KINDS[kind], SIZE, spans, runs, frozenset(mutants), meddling))


@pytest.mark.parametrize("kind", KINDS)
def test_protocol_holds_at_every_crash_and_in_every_order(kind: str) -> None:
    # Two sinks and movable borders together would be several million states.
    found = _explored(kind, spans=(1,) if kind == "united" else BORDERS)

    assert found.wrong is None, str(found)
    assert found.states > 10_000
    print(f"{kind}: {found}")


@pytest.mark.parametrize("kind", ["two-phase", "united"])
def test_prepared_transaction_rolled_back_by_hand_is_never_taken_for_success(kind: str) -> None:
    found = _explored(kind, runs=2, meddling=True)

    assert found.wrong is None, str(found)


@pytest.mark.parametrize(("mutant", "kind"), [(mutant, kind) for mutant, kinds in CAUGHT.items() for kind in kinds])
def test_mutant_is_caught(mutant: Mutant, kind: str) -> None:
    meddling = mutant is Mutant.ABSENT_IS_DONE

    found = _explored(kind, mutant, spans=BORDERS if mutant is Mutant.SKIP_REPLAY else (1,), meddling=meddling)

    assert found.wrong is not None, f"{mutant}: nothing is wrong with {found}"
    assert found.path, "the way to it is told"


def test_every_mutant_is_caught_somewhere() -> None:
    assert set(CAUGHT) == set(Mutant)
    assert all(CAUGHT.values())
