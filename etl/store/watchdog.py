"""Cuts connections on which no answer will come.

A peer that is gone is noticed by the kernel: nothing is confirmed, and the connection ends. Behind a proxy, a middlebox
or a frozen server everything may be confirmed and nothing answered. So the server is asked, over another connection,
about a session that has waited for long: one that is at work there (a long statement, a lock, a standby that has not
confirmed yet) may go on; one of which the server thinks that it waits for *us* will never hear anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

import psycopg

from etl.store.session import Session

LOOK_INTERVAL_S = 1.0
"""Between two looks; a session is cut when two of them in a row find it waiting in vain."""

AskServer = Callable[[Collection[Session]], set[Session]]
"""Which of some sessions of one database are at work there."""


@dataclass(slots=True)
class _Watched:
    """What is known of one session.

    Attributes:
        name: For messages.
        ask: Asks its server about it.
        waiting_since_s: The wait that the rest is about.
        look_at_s: When to ask the server.
        suspected: Whether the last look found it waiting in vain.
    """

    name: str
    ask: AskServer
    waiting_since_s: float | None = None
    look_at_s: float = 0.0
    suspected: bool = False


class Watchdog:
    """A thread that looks after all sessions of a run.

    Args:
        patience_s: How long a session may wait before the server is asked about it.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._lock = Lock()
        self._watched: WeakKeyDictionary[Session, _Watched] = WeakKeyDictionary()
        self._ended = Event()
        self._thread = Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not joined: it may be asking a server that does not answer, and there is nothing more to look after.
        self._ended.set()

    def watch(self, session: Session, name: str, ask: AskServer) -> None:
        """Look after a session until it is closed.

        Args:
            session: Just opened.
            name: For messages.
            ask: Asks its server.
        """
        with self._lock:
            self._watched[session] = _Watched(name, ask)

    def _run(self) -> None:
        while not self._ended.wait(min(LOOK_INTERVAL_S, self._patience_s)):
            overdue = self._overdue(time.monotonic())
            for ask in {watched.ask for _, watched in overdue}:
                self._judge(ask, [(session, watched) for session, watched in overdue if watched.ask == ask])

    def _overdue(self, now_s: float) -> list[tuple[Session, _Watched]]:
        with self._lock:
            sessions = list(self._watched.items())
        found = []
        for session, watched in sessions:
            since_s = session.waiting_since_s
            if since_s != watched.waiting_since_s:
                watched.waiting_since_s, watched.suspected = since_s, False
                watched.look_at_s = (since_s or 0.0) + self._patience_s
            if since_s is not None and now_s >= watched.look_at_s:
                found.append((session, watched))
        return found

    def _judge(self, ask: AskServer, overdue: Iterable[tuple[Session, _Watched]]) -> None:
        try:
            at_work = ask([session for session, _ in overdue])
        except psycopg.Error:
            for session, watched in overdue:
                self._cut(session, watched, "it does not answer new connections either")
            return
        for session, watched in overdue:
            if session in at_work:
                watched.look_at_s, watched.suspected = time.monotonic() + self._patience_s, False
            elif watched.suspected:
                self._cut(session, watched, "it is not at work on it: something was lost on the way")
            else:
                # Its answer may have come this moment.
                watched.suspected = True

    def _cut(self, session: Session, watched: _Watched, why: str) -> None:
        since_s = watched.waiting_since_s
        if since_s is not None and session.waiting_since_s == since_s:
            waited_s = time.monotonic() - since_s
            session.cut(f"no answer from the server to session {watched.name} for {waited_s:.0f} s, and {why}")
