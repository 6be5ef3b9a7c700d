"""Triggers by which a real server raises any error at a chosen row: so often, and never again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from psycopg import sql

from tests.faults.arena import Arena, Connection
from tests.faults.jobs import KINDS, Target

SECRET = "secret"
"""What an error holds of rows, where no user of the command line may find it."""


class Place(StrEnum):
    """At which statement of the second checkpoint the server raises the error."""

    ROW = "a row of the target"
    COMMIT = "the end of the target's transaction"
    LEDGER = "the ledger of the target"
    STORE = "the record of the checkpoint"


def raising(sqlstate: str) -> str:
    """The body of a trigger that raises this."""
    return (
        f"RAISE EXCEPTION USING ERRCODE = '{sqlstate}', MESSAGE = E'refused on purpose\\n{SECRET}',"
        f" DETAIL = '{SECRET}', HINT = '{SECRET}';"
    )


_TRIGGERS = {
    Place.ROW: "CREATE TRIGGER refuse BEFORE INSERT ON {table} FOR EACH ROW WHEN (NEW.id IN (8, 508))",
    Place.COMMIT: "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT OR UPDATE ON {table} DEFERRABLE INITIALLY DEFERRED"
    " FOR EACH ROW WHEN (NEW.id IN (8, 508))",
    Place.LEDGER: "CREATE TRIGGER refuse BEFORE INSERT ON etl.commit_ledger FOR EACH ROW WHEN (NEW.checkpoint_id = 2)",
    Place.STORE: "CREATE TRIGGER refuse BEFORE INSERT ON etl.checkpoint FOR EACH ROW WHEN (NEW.checkpoint_id = 2)",
}
"""Row 8, or 508, comes with the second checkpoint."""


@contextmanager
def refusing(arena: Arena, target: Target, place: Place, body: str, times: int = 1) -> Iterator[Callable[[], int]]:
    """Have the server run ``body`` at that place so often; yields how often the place was come to."""
    connection = arena.other if target.other and place is not Place.STORE else arena.store
    connection.execute("CREATE SEQUENCE public.visits")
    connection.execute(
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$"
        f" BEGIN IF nextval('public.visits') <= {times} THEN {body} END IF; RETURN NEW; END $$"
    )
    trigger = sql.SQL(_TRIGGERS[place]).format(table=sql.Identifier(target.table))
    connection.execute(trigger + sql.SQL(" EXECUTE FUNCTION public.refuse()"))
    try:
        yield lambda: _visits(connection)
    except BaseException:
        # What is left, perhaps a prepared transaction, would keep the trigger from being dropped.
        arena.clean()
        raise
    finally:
        connection.execute("DROP FUNCTION public.refuse() CASCADE; DROP SEQUENCE public.visits")


def _visits(connection: Connection) -> int:
    # Sequences do not roll back: that is why one counts.
    (visits,) = connection.execute("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM visits").fetchone() or (
        0,
    )
    return int(visits)


def has(kind: str, place: Place) -> bool:
    """Whether runs of the job come to that place at all."""
    return place is not Place.LEDGER or any(target.late for target in KINDS[kind].targets)
