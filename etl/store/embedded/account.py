"""The account the server runs under: PostgreSQL refuses to run as root."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etl.errors import ConfigurationError

USER_VARIABLE = "ETL_PG_USER"
_FALLBACKS = ("postgres", "nobody")
# Nothing else of the caller's environment reaches the server: not its locale, PG* variables or secrets.
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class Output:
    """How a program ended and what it printed, both streams together."""

    returncode: int
    text: str


@dataclass(frozen=True, slots=True)
class Account:
    """A user and group; ``switched`` where it is not the one this process runs under (which is root then)."""

    uid: int
    gid: int
    switched: bool

    def own(self, path: Path) -> None:
        """Give a file or directory to the account."""
        if self.switched:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def may_reach(self, path: Path) -> bool:
        """Whether the account may pass all directories above ``path`` and execute or enter it."""
        if not self.switched:
            return True
        resolved = path.resolve()
        return all(self._may_pass(step.stat()) for step in (resolved, *resolved.parents))

    def _may_pass(self, status: os.stat_result) -> bool:
        if status.st_uid == self.uid:
            return bool(status.st_mode & stat.S_IXUSR)
        if status.st_gid == self.gid:
            return bool(status.st_mode & stat.S_IXGRP)
        return bool(status.st_mode & stat.S_IXOTH)

    def run(self, command: Sequence[str | Path], *, pass_fds: Sequence[int] = ()) -> Output:
        """Run a program under the account, in C locale, and wait for it."""
        # Never through pipes: a server started by the program inherits them, and reading to their end would hang.
        with tempfile.TemporaryFile() as output:
            completed = subprocess.run(  # noqa: PLW1510 - the caller judges the exit code
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=_environment(),
                pass_fds=pass_fds,
                user=self.uid if self.switched else None,
                group=self.gid if self.switched else None,
                extra_groups=[] if self.switched else None,
            )
            output.seek(0)
            return Output(completed.returncode, output.read().decode(errors="replace").strip())


def server_account(cluster: Path, environ: Mapping[str, str]) -> Account:
    """Who runs the server: this process' own account; for root the owner of ``cluster``, else an unprivileged one.

    Raises:
        ConfigurationError: ``cluster`` belongs to another user, or root has no unprivileged account to use.
    """
    own_uid = os.geteuid()
    owner = cluster.stat().st_uid if cluster.exists() else None
    if own_uid != 0:
        if owner not in (None, own_uid):
            raise ConfigurationError(f"{cluster} belongs to user id {owner}; set ETL_STATE_DIR to a directory of yours")
        return Account(own_uid, os.getegid(), switched=False)
    if owner:
        return Account(owner, cluster.stat().st_gid, switched=True)
    entry = _unprivileged(environ)
    return Account(entry.pw_uid, entry.pw_gid, switched=True)


def _unprivileged(environ: Mapping[str, str]) -> pwd.struct_passwd:
    explicit = environ.get(USER_VARIABLE)
    for name in (explicit,) if explicit else _FALLBACKS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return entry
    raise ConfigurationError(
        f"PostgreSQL does not run as root, and {explicit or ' and '.join(_FALLBACKS)} is no account to run it under; "
        f"set {USER_VARIABLE} to an unprivileged account"
    )


def _environment() -> dict[str, str]:
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return inherited | {"LC_ALL": "C", "LANG": "C", "TZ": "UTC"}
