"""Which error of ours stands for whatever was raised: what is done with it is decided by its class alone."""

from __future__ import annotations

import psycopg

from etl.errors import EtlError, InternalError, TransientError
from etl.sqlstate import translate


def classify(error: BaseException) -> EtlError:
    """The member of our error tree that stands for whatever an attempt raised."""
    if isinstance(error, EtlError):
        return error
    if isinstance(error, psycopg.Error):
        return translate(error, "database")
    if isinstance(error, OSError):
        return TransientError(f"{type(error).__name__}: {error}")
    if isinstance(error, MemoryError):
        return InternalError("out of memory; lower batch sizes or give the process more")
    return InternalError(f"{type(error).__name__}: {error}")
