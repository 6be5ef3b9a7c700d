"""Where the server listens: a private socket directory and a port on the loopback interface."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from pathlib import Path

from etl.errors import ConfigurationError
from etl.store.embedded.account import Account

# Of the 103 (macOS) to 107 (Linux) bytes that the path of a socket may have.
_SOCKET_PATH_BYTES_MAX = 100


class Port:
    """The port, kept from start to start so that URLs somebody noted down stay right."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def choose(self) -> int:
        """The port of the last start if it is free, else any free one."""
        port = self._stored()
        if port is None or not _is_free(port):
            port = _any_free()
            self._file.write_text(str(port), encoding="ascii")
        return port

    def is_free(self) -> bool:
        """Whether the chosen port could be bound now."""
        port = self._stored()
        return port is not None and _is_free(port)

    def _stored(self) -> int | None:
        text = self._file.read_text(encoding="ascii") if self._file.exists() else ""
        # A crash of the machine may have left the file empty.
        return int(text) if text.isdigit() else None


def socket_directory(parent: Path, account: Account) -> Path:
    """Make or check ``parent``/run, or a directory in /tmp where that path is too long for sockets."""
    directory = parent / "run"
    # libpq takes a comma for the border between two hosts.
    if len(os.fsencode(directory / ".s.PGSQL.65535")) > _SOCKET_PATH_BYTES_MAX or "," in str(directory):
        name = hashlib.sha256(os.fsencode(parent)).hexdigest()[:12]
        directory = Path(f"/tmp/etl-{account.uid}-{name}")  # noqa: S108 - has to be short; its owner is checked
    make_private(directory, account)
    return directory


def make_private(directory: Path, account: Account) -> None:
    """Make a directory that only ``account`` may enter, or check that it is one.

    Raises:
        ConfigurationError: Something else is there already.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
        # Made by this process, or by one that was killed before it could give the directory away.
        account.own(directory)
        status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != account.uid or status.st_mode & 0o077:
        raise ConfigurationError(f"{directory} is not a directory of user id {account.uid} with mode 0700")


def _any_free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server does: connections of a former server that are still in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
