"""A stage for sinks: contexts over the real store objects, without a runtime."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from etl.runtime.transactions import StoreTransactions
from etl.schema import Schema
from etl.sink import Connection, PreflightContext, SinkContext
from etl.store.database import Database
from etl.store.lease import application_name
from etl.store.ledger import DatabaseLedger
from etl.store.write_ahead_log import DatabaseWriteAheadLog
from etl.testing.sink_contract import CONTRACT_SCHEMA
from etl.transaction import commit


class Stage:
    """Everything a sink's context needs, in one database that is both store and target."""

    def __init__(self, url: str, schema: Schema = CONTRACT_SCHEMA, uid: str = "out", sink_id: int = 1) -> None:
        self.database = Database(url, "store")
        self.schema = schema
        self.uid = uid
        self.sink_id = sink_id
        # Sessions of former epochs are ended by the job's id on the whole server, which other tests share.
        self.job_id = secrets.token_hex(8)
        self.role: str | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.admin: Connection = psycopg.connect(url, autocommit=True, prepare_threshold=None)
        self.admin.execute("INSERT INTO etl.job (job_id, name) VALUES (%s, %s)", [self.job_id, self.job_id])
        self._open: list[Any] = []

    @property
    def event_names(self) -> list[str]:
        return [name for name, _ in self.events]

    def ledger(self, epoch: int) -> DatabaseLedger:
        return DatabaseLedger(self.job_id, 1, epoch, self.sink_id, keep=10)

    def context(self, epoch: int = 1, checkpoint_id: int = 0, subtask: int = 0) -> SinkContext:
        def connect(role: str) -> Connection:
            return self.database.connect(application_name(self.job_id, epoch, f"{self.uid}:{role}"))

        log = DatabaseWriteAheadLog(
            lambda: connect("log"), self.ledger(epoch), self.uid, self.job_id, 1, epoch, self.sink_id, subtask
        )
        transactions = StoreTransactions(lambda: self.database.open("store"), self.ledger(epoch), self.emit)
        self._open += [log, transactions]
        return SinkContext(
            job_id=self.job_id,
            uid=self.uid,
            sink_id=self.sink_id,
            subtask=subtask,
            epoch=epoch,
            checkpoint_id=checkpoint_id,
            schema=self.schema,
            connect=connect,
            ledger=self.ledger(epoch),
            log=log,
            transactions=transactions,
            base_dir=Path("/nowhere"),
            unit_time_s=60.0,
            emit=self.emit,
        )

    def preflight_context(self, unit_time_s: float = 60.0, *, target_is_store: bool = True) -> PreflightContext:
        def connect(role: str) -> Connection:
            connection = self.database.connect(role)
            if self.role is not None:
                connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(self.role)))
            return connection

        return PreflightContext(
            uid=self.uid,
            schema=self.schema,
            connect=connect,
            target_is_store=target_is_store,
            base_dir=Path("/nowhere"),
            unit_time_s=unit_time_s,
        )

    def emit(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def complete(self, context: SinkContext, checkpoint_id: int) -> None:
        """Commit the checkpoint's transaction, as the coordinator would."""
        assert isinstance(context.transactions, StoreTransactions)
        with context.transactions.completing(checkpoint_id) as session:
            commit(session.driver)

    def fetch(self, query: str) -> list[tuple[Any, ...]]:
        return self.admin.execute(query).fetchall()

    def scalars(self, query: str) -> list[Any]:
        return [row[0] for row in self.fetch(query)]

    def gids(self) -> list[str]:
        return self.scalars("SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY gid")

    def close(self) -> None:
        for one in self._open:
            with suppress(psycopg.OperationalError):
                one.close()
        self.admin.close()
