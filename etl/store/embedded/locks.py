"""File locks that the kernel frees with their last holder, however that one ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etl.errors import ConfigurationError

if sys.platform == "win32":
    raise ConfigurationError("the embedded server needs Linux or macOS; on Windows set ETL_DATABASE_URL")

import fcntl


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock for the block; waits for it."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def try_exclusive(path: Path) -> int | None:
    """Take the lock without waiting.

    Returns:
        A descriptor that holds the lock until it is closed here and in all that inherited it; None if others hold it.
    """
    return try_lock(_open(path))


def try_lock(descriptor: int) -> int | None:
    """The same of a file or directory that is open already; closes it when others hold the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def shared(path: Path) -> int:
    """A descriptor that shares the lock with other holders of this kind."""
    descriptor = _open(path)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def is_held(path: Path) -> bool:
    """Whether anybody holds the lock now."""
    descriptor = try_exclusive(path)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
