"""A reader that looks at a job's targets all the time while its runs die, and finds whatever no reader may see.

:func:`tests.faults.oracle.check_interrupted` looks once, when a run is dead; this one looks every few milliseconds from
sessions of its own, in snapshots (REPEATABLE READ) and statement by statement (READ COMMITTED). Each look says:

* a target shows exactly the rows of whole checkpoints: nothing twice, nothing missing, no checkpoint in part;
* it is at the head, or one checkpoint behind it where rows show late; where they show early it is at most one ahead;
* it never goes back: no row that was there is gone, no key is, and no version is followed by a lower one;
* neither do the head and the epoch, and where a checkpoint ended is never said otherwise later.

::

    with Reader(request) as reader:       # the request of a run in mode exactly-once, of an arena's new case
        arena.run(killed)
        reader.look_again()               # both ways of looking have begun and ended since
        arena.finish(request)
    # leaving the block raises AssertionError if anything was wrong; reader.check() does so at once
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

import psycopg
from psycopg import sql

from etl.sink import CheckpointMode
from tests.faults.fault import RunRequest
from tests.faults.jobs import BATCH_ROWS, FILES, KINDS, UPSERT_TABLE, Kind, Row, Rows, Target, rows_before
from tests.support.databases import one_snapshot

Connection = psycopg.Connection[Any]
Offsets = dict[str, dict[str, int]]
"""Byte offsets by source uid and split."""

PAUSE_S = 0.004
LOOK_TIMEOUT_S = 60.0
_NAME = "reader"


class Isolation(StrEnum):
    """How a look is taken."""

    SNAPSHOT = "REPEATABLE READ"
    STATEMENTS = "READ COMMITTED"


class Reader:
    """Looks at one job's targets, in a thread and with sessions of its own, from entering the block to leaving it.

    Args:
        request: Names the job and the databases; nothing of the case may have run yet.
        pause_s: Between looks.
        server_may_stop: Whether lost connections are made anew instead of being an error.
        cuts_vary: Whether runs differ in the rows of a checkpoint (the request then names the most). While rows are
            written again, an upsert without a guard may then show values of two runs at once.
        judge: Who looks, where the job is none of the fixed kinds.

    Attributes:
        looks: How many looks were taken, each in both ways.
        reconnects: How often the connections were lost.
    """

    def __init__(
        self,
        request: RunRequest,
        *,
        pause_s: float = PAUSE_S,
        server_may_stop: bool = False,
        cuts_vary: bool = False,
        judge: Judge | None = None,
    ) -> None:
        assert request.mode is CheckpointMode.EXACTLY_ONCE, "readers of other modes may see rows twice or miss them"
        self.looks = 0
        self.reconnects = 0
        self._judge = Judge(request, cuts_vary) if judge is None else judge
        self._urls = (request.store_url, request.other_url)
        self._pause_s = pause_s
        self._server_may_stop = server_may_stop
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._watch, name="reader", daemon=True)

    @property
    def states(self) -> Mapping[str, Sequence[Rows]]:
        """By sink, the different contents that were seen, in order."""
        return {uid: tuple(seen) for uid, seen in self._judge.states.items()}

    def __enter__(self) -> Self:
        self._thread.start()
        self.look_again()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop.set()
        self._thread.join(LOOK_TIMEOUT_S)
        assert not self._thread.is_alive(), "the reader does not end"
        if self._failure is None:
            return
        if error is None:
            raise self._failure
        error.add_note(f"and the reader: {self._failure}")

    def check(self) -> None:
        """Look at what was found so far.

        Raises:
            AssertionError: It saw something that no reader may see.
        """
        if self._failure is not None:
            raise self._failure

    def look_again(self) -> None:
        """Wait until a whole look has begun and ended since the call.

        Raises:
            AssertionError: It saw something that no reader may see.
        """
        with self._changed:
            # The look that is under way may have begun before.
            enough = self.looks + 2
            done = self._changed.wait_for(lambda: self._failure is not None or self.looks >= enough, LOOK_TIMEOUT_S)
        self.check()
        assert done, "the reader does not come to its end"

    def _watch(self) -> None:
        try:
            while True:
                # Read before the look: the last one sees what was there when the block was left.
                last = self._stop.is_set()
                if self._look_while_connected(last=last) or last:
                    return
        except BaseException as failure:  # noqa: BLE001 - raised again in the thread that asks
            self._failure = failure
        finally:
            with self._changed:
                self._changed.notify_all()

    def _look_while_connected(self, *, last: bool) -> bool:
        """Look until the connections are lost; True when the last look was taken."""
        try:
            with ExitStack() as stack:
                store, other = (
                    stack.enter_context(psycopg.connect(url, autocommit=True, application_name=_NAME))
                    for url in self._urls
                )
                while True:
                    for isolation in Isolation:
                        self._judge.look(store, other, isolation)
                    with self._changed:
                        self.looks += 1
                        self._changed.notify_all()
                    if last:
                        return True
                    last = self._stop.wait(self._pause_s)
        except psycopg.OperationalError:
            if not self._server_may_stop:
                raise
            self.reconnects += 1
            self._stop.wait(self._pause_s)
            return False


@dataclass(frozen=True, slots=True)
class Head:
    """A job's head row: zeros before the job is registered."""

    epoch: int = 0
    checkpoint: int = 0


@dataclass(slots=True)
class Judge:
    """What one look after the other may show.

    Attributes:
        request: The job.
        cuts_vary: See :class:`Reader`.
        states: By sink, the different contents that were seen, in order.
    """

    request: RunRequest
    cuts_vary: bool = False
    states: dict[str, list[Rows]] = field(default_factory=dict)
    _head: Head = Head()
    _offsets: list[Offsets] = field(default_factory=lambda: [{}])
    _reached: dict[str, int] = field(default_factory=dict)

    @property
    def _kind(self) -> Kind:
        return KINDS[self.request.kind]

    def look(self, store: Connection, other: Connection, isolation: Isolation) -> None:
        """Look once.

        Raises:
            AssertionError: Something is there that no reader may see.
        """
        targets = self._kind.targets
        before = self._head_of(store)
        elsewhere = {one: _rows_of(other, one) for one in targets if one.other}
        if isolation is Isolation.SNAPSHOT:
            with one_snapshot(store):
                after = self._head_of(store)
                self._learn(store, after)
                here = {one: (_rows_of(store, one), after) for one in targets if not one.other}
        else:
            seen = {one: _rows_of(store, one) for one in targets if not one.other}
            after = self._head_of(store)
            self._learn(store, after)
            here = {one: (rows, before) for one, rows in seen.items()}
        for target, rows in elsewhere.items():
            self._judge(target, rows, before, after, isolation)
        for target, (rows, low) in here.items():
            self._judge(target, rows, low, after, isolation)

    # --- the head and where checkpoints end -------------------------------------------------------------------------

    def _head_of(self, store: Connection) -> Head:
        query = "SELECT epoch, checkpoint_id FROM etl.head JOIN etl.job USING (job_id) WHERE name = %s"
        found = Head(*(store.execute(query, [self.request.job]).fetchone() or (0, 0)))
        former, self._head = self._head, found
        assert found.epoch >= former.epoch, f"the epoch went back: {found} after {former}"
        assert found.checkpoint >= former.checkpoint, f"the head went back: {found} after {former}"
        return found

    def _learn(self, store: Connection, head: Head) -> None:
        """Read where the checkpoints end, all of them each time: what was recorded once must stay."""
        moved = store.execute(
            "SELECT checkpoint_id, uid, split_id, position->>'offset' FROM etl.position JOIN etl.job USING (job_id)"
            " WHERE name = %s AND checkpoint_id <= %s ORDER BY checkpoint_id",
            [self.request.job, head.checkpoint],
        ).fetchall()
        offsets: list[Offsets] = [{}]
        for number in range(1, head.checkpoint + 1):
            latest = {uid: dict(splits) for uid, splits in offsets[-1].items()}
            for _, uid, split, offset in (row for row in moved if row[0] == number):
                latest.setdefault(uid, {})["/".join(split.rsplit("/", 2)[-2:])] = int(offset)
            offsets.append(latest)
        known = self._offsets
        assert offsets[: len(known)] == known, f"the ends of checkpoints were {known} and are {offsets} now"
        self._offsets = offsets

    def _rows_at(self, checkpoint: int) -> list[Row]:
        offsets = self._offsets[checkpoint]
        return [row for uid in self._kind.sources for row in rows_before(uid, offsets.get(uid, {}))]

    # --- a target ---------------------------------------------------------------------------------------------------

    def _judge(self, target: Target, rows: Rows, low: Head, high: Head, isolation: Isolation) -> None:
        """The target was looked at after the head was ``low`` and before it was ``high``."""
        between = f"between checkpoints {low.checkpoint} and {high.checkpoint} ({isolation})"
        allowed = self._allowed(target, low.checkpoint, high.checkpoint)
        places = [place for place, whole in allowed.items() if whole == rows]
        if not places and not self._is_mixture(target, rows, allowed):
            raise AssertionError(f"{target.uid} shows no whole checkpoints {between}: {_differences(rows, allowed)}")
        seen = self.states.setdefault(target.uid, [])
        former = seen[-1] if seen else Rows()
        if rows != former or not seen:
            seen.append(rows)
        gone = _gone(target, former, rows)
        assert not gone, f"{target.uid} had {gone}, which {between} are not there"
        if not self._may_go_back(target):
            onward = [place for place in places if place >= self._reached.get(target.uid, 0)]
            assert onward, f"{target.uid} went back {between} from {sorted(former)} to {sorted(rows)}"
            self._reached[target.uid] = min(onward)

    def _allowed(self, target: Target, low: int, high: int) -> dict[int, Rows]:
        """Contents that the target may have, by the number of rows read for them."""
        cuts = [self._rows_at(number) for number in range(max(0, low - int(target.late)), high + 1)]
        if target.early:
            (uid,) = self._kind.sources
            everything = [row for rows in FILES[uid].values() for row in rows]
            # Where the next checkpoint will end is not known yet: with the batch that makes it full at the latest.
            furthest = min(len(cuts[-1]) + self.request.rows + BATCH_ROWS - 1, len(everything))
            cuts += [everything[:count] for count in range(len(cuts[-1]) + 1, furthest + 1)]
        return {len(rows): target.expected(rows) for rows in cuts}

    def _may_go_back(self, target: Target) -> bool:
        return target.early and self.cuts_vary and not self.request.guarded

    def _is_mixture(self, target: Target, rows: Rows, allowed: Mapping[int, Rows]) -> bool:
        """Whether each key has a value between its first and its last allowed one."""
        if not self._may_go_back(target):
            return False
        oldest = {key: number for number, key, _ in allowed[min(allowed)]}
        possible = {row for whole in allowed.values() for row in whole}
        return set(rows) <= possible and all(number >= oldest.get(key, 0) for number, key, _ in rows)


def _gone(target: Target, former: Rows, rows: Rows) -> list[Any]:
    """What was there and is no more: rows, or keys where a row replaces another one."""
    if target.table == UPSERT_TABLE:
        return sorted({row[1] for row in former} - {row[1] for row in rows})
    return sorted((former - rows).elements())


def _differences(rows: Rows, allowed: Mapping[int, Rows]) -> str:
    told = []
    for place, whole in allowed.items():
        excess, missing = sorted((rows - whole).elements()), sorted((whole - rows).elements())
        told.append(f"{excess} too much and {missing} missing for the first {place} rows read")
    return "; ".join(told)


def _rows_of(connection: Connection, target: Target) -> Rows:
    query = sql.SQL("SELECT id, key, amount FROM {}").format(sql.Identifier(target.table))
    return Rows(connection.execute(query).fetchall())
