"""Making a data directory: whole or not at all."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from etl.errors import ConfigurationError
from etl.store.embedded.account import Account
from etl.store.embedded.binaries import Programs
from etl.store.embedded.place import make_private

ROLE = "postgres"  # not "etl": a role named like our schema would have it first in its search_path
_INCLUDE = "\ninclude = '../../server.conf'\n"


def create_password(file: Path) -> None:
    """Write a random password, once; a data directory made with half of one could never be opened again."""
    if file.exists():
        return
    making = file.with_name(f".{file.name}")
    making.unlink(missing_ok=True)
    _write_private(making, secrets.token_urlsafe(32))
    making.replace(file)


def create_data(data: Path, password: str, account: Account, programs: Programs, settings: Mapping[str, str]) -> None:
    """Run ``initdb`` beside ``data`` and move the result there: a kill leaves no half-made data directory.

    With a setting ``fsync = off`` the new files are not forced to disk either.

    Raises:
        ConfigurationError: The account cannot own one, or ``initdb`` failed.
    """
    _check_entry(account)
    directory = data.parent
    make_private(directory, account)
    for old in directory.glob(".init-*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    making, password_file = directory / ".init-data", directory / ".init-password"
    _write_private(password_file, password)
    account.own(password_file)
    failure = programs.run("initdb", "-D", making, "--pwfile", password_file, *_options(programs.major, settings))
    password_file.unlink()
    if failure is not None:
        raise ConfigurationError(failure)
    with (making / "postgresql.conf").open("a", encoding="utf-8") as file:
        file.write(_INCLUDE)
    making.rename(data)


def _options(major: int, settings: Mapping[str, str]) -> list[str]:
    options = ["-U", ROLE, "-E", "UTF8", "--locale=C", "--auth=scram-sha-256", "--data-checksums"]
    if settings.get("fsync") == "off":
        options += ["--no-sync"]
    if major >= 16:
        # The password is random and long: iterating its hash would add milliseconds to each connection, not safety.
        options += ["--set", "scram_iterations=1"]
    if major >= 17:
        options += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    return options


def _check_entry(account: Account) -> None:
    try:
        pwd.getpwuid(account.uid)
    except KeyError:
        raise ConfigurationError(
            f"user id {account.uid} has no entry in the user database, which initdb needs; "
            "run under a named account or set ETL_DATABASE_URL"
        ) from None


def _write_private(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(descriptor)
