"""What a driver error means for the run, by SQLSTATE and exception class, never by message text.

Source: PostgreSQL documentation, Appendix A, and behaviour seen on servers 15 and 18.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from etl.errors import (
    ConfigurationError,
    DatabaseUnreachableError,
    EtlError,
    InternalError,
    RecordError,
    StateError,
    TransientError,
)

_BY_STATE: dict[str, type[EtlError]] = {
    "25P03": DatabaseUnreachableError,  # idle_in_transaction_session_timeout: psycopg calls it InternalError
    "25P04": DatabaseUnreachableError,  # transaction_timeout
    "25006": TransientError,  # read-only: a standby after failover
    "21000": RecordError,
    "54000": RecordError,
    "55P03": TransientError,
    "55006": TransientError,
    "57014": TransientError,
    "0A000": ConfigurationError,
    "55000": ConfigurationError,  # prepared transactions are disabled, deferrable conflict key
}

_BY_CLASS: dict[str, type[EtlError]] = {
    "08": DatabaseUnreachableError,
    "22": RecordError,
    "23": RecordError,
    "28": ConfigurationError,
    "3D": ConfigurationError,
    "3F": ConfigurationError,
    "40": TransientError,
    "42": ConfigurationError,
    "44": RecordError,
    "53": TransientError,
    "57": DatabaseUnreachableError,
    "58": TransientError,
    "72": TransientError,
    "P0": RecordError,  # PL/pgSQL: a trigger refuses the row
    "XX": TransientError,
}


def error_class(error: psycopg.Error) -> type[EtlError]:
    """The class of our error tree that a driver error belongs to."""
    state = error.sqlstate
    if state is None:
        # Connection failures carry no SQLSTATE in psycopg.
        return DatabaseUnreachableError if isinstance(error, psycopg.OperationalError) else InternalError
    return _BY_STATE.get(state) or _BY_CLASS.get(state[:2]) or InternalError


def describe(error: psycopg.Error) -> str:
    """One line without row data: SQLSTATE, primary message, and the table, column or constraint it names.

    DETAIL and CONTEXT are left out: they print rows, and rows may hold secrets.
    """
    diag = error.diag
    message = (diag.message_primary or str(error)).splitlines() or [type(error).__name__]
    where = [f"{what} {name}" for what, name in _named(diag) if name]
    suffix = f" ({', '.join(where)})" if where else ""
    return f"{error.sqlstate or type(error).__name__}: {message[0]}{suffix}"


def _named(diag: psycopg.errors.Diagnostic) -> list[tuple[str, str | None]]:
    return [("table", diag.table_name), ("column", diag.column_name), ("constraint", diag.constraint_name)]


def translate(error: psycopg.Error, doing: str) -> EtlError:
    """Our error for a driver error; ``doing`` says what was under way, for the message."""
    return error_class(error)(f"{doing}: {describe(error)}")


@contextmanager
def translated_in_store(doing: str) -> Iterator[None]:
    """Driver errors of the block become ours; it writes nothing of the user's, so none of them is a record's fault."""
    try:
        yield
    except psycopg.Error as error:
        kind = error_class(error)
        raise (StateError if kind is RecordError else kind)(f"{doing}: {describe(error)}") from error
