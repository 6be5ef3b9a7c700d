"""``etl state diff``: what operators have learned and forgotten between two checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import click

from etl.cli.connecting import load_settings, open_store
from etl.cli.output import format_table, write_line, write_out
from etl.cli.state_rows import StateRow, spelled_rows, to_json
from etl.cli.status import unknown_job
from etl.errors import ConfigurationError
from etl.settings import Settings
from etl.store import savepoints
from etl.store.database import Connection
from etl.store.savepoints import Cut
from etl.store.state import require_counted, restore_group
from etl.transaction import transaction

_HEADERS = ("OPERATOR", "KEYS ADDED", "REMOVED", "CHANGED", "UNCHANGED")


class Change(StrEnum):
    """What has become of a key from one checkpoint to the other."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class _Difference:
    operator: str
    change: Change
    key: Mapping[str, Any]
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None


@click.command()
@click.argument("job")
@click.argument("before")
@click.argument("after")
@click.argument("operator", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON Lines, one for each key that differs.")
def diff(job: str, before: str, after: str, operator: str | None, as_json: bool) -> None:
    """Compare what the operators of JOB (its name) remember BEFORE and AFTER.

    BEFORE and AFTER are names of savepoints, or numbers of checkpoints that are still kept. With OPERATOR
    (its uid) that one alone.
    """
    settings = load_settings()
    counts: dict[str, Counter[Change]] = {}
    for one in _differences(settings, job, (before, after), operator):
        counts.setdefault(one.operator, Counter())[one.change] += 1
        if as_json and one.change is not Change.UNCHANGED:
            write_out(
                to_json(
                    {
                        "operator": one.operator,
                        "change": str(one.change),
                        "key": one.key,
                        "before": one.before,
                        "after": one.after,
                    }
                )
            )
    if as_json:
        return
    if counts:
        rows = [(uid, *(counted[change] for change in Change)) for uid, counted in sorted(counts.items())]
        write_out(format_table(_HEADERS, rows, numeric=_HEADERS[1:]))
    else:
        write_line("no operator remembers anything, before or after")


def _differences(settings: Settings, job: str, names: tuple[str, str], operator: str | None) -> Iterator[_Difference]:
    with ExitStack() as stack:
        store = stack.enter_context(open_store(settings))
        connection = stack.enter_context(store.database.connect("etl:cli"))
        # One snapshot: a run may complete the next checkpoint and prune meanwhile.
        stack.enter_context(transaction(connection))
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        found = connection.execute("SELECT job_id FROM etl.job WHERE name = %s", [job]).fetchone()
        if found is None:
            raise unknown_job(settings, job)
        before, after = (savepoints.find(connection, found[0], name) for name in names)
        known = sorted(before.states.keys() | after.states.keys())
        if operator is not None and operator not in known:
            raise ConfigurationError(
                f'operator "{operator}" of job "{job}" has no state, before or after; those that have:'
                f" {', '.join(known) or 'none'}"
            )
        for uid in known if operator is None else [operator]:
            yield from _of_operator(connection, before, after, uid)


def _of_operator(connection: Connection, before: Cut, after: Cut, uid: str) -> Iterator[_Difference]:
    """Key group by key group: no more than that is in memory."""
    from etl.key_group import KEY_GROUPS

    sides = [_Side(connection, cut, uid) for cut in (before, after)]
    for key_group in range(KEY_GROUPS):
        yield from _of_group(uid, *(side.rows(key_group) for side in sides))
    for side in sides:
        side.require_whole()


class _Side:
    """What an operator remembers at one of the checkpoints."""

    def __init__(self, connection: Connection, cut: Cut, uid: str) -> None:
        self._connection = connection
        self._cut = cut
        self._uid = uid
        self._state = cut.states.get(uid)
        self._chunks = 0

    def rows(self, key_group: int) -> dict[str, StateRow]:
        """Of a key group, by key."""
        if self._state is None:
            return {}
        fragments = restore_group(self._connection, self._cut, self._uid, self._state, key_group)
        self._chunks += len(fragments)
        return {to_json(row["key"]): row for row in spelled_rows(self._uid, fragments)}

    def require_whole(self) -> None:
        """After all key groups: none of them lacks anything."""
        if self._state is not None:
            require_counted(self._cut, {self._uid: self._state}, {self._uid: self._chunks})


def _of_group(uid: str, before: Mapping[str, StateRow], after: Mapping[str, StateRow]) -> Iterator[_Difference]:
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        row = old or new
        assert row is not None
        if old is None or new is None:
            change = Change.ADDED if old is None else Change.REMOVED
        else:
            change = Change.UNCHANGED if to_json(old["state"]) == to_json(new["state"]) else Change.CHANGED
        yield _Difference(
            uid, change, row["key"], None if old is None else old["state"], None if new is None else new["state"]
        )
