"""``etl server``: the embedded PostgreSQL server that runs when no database is configured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from etl import settings as settings_module
from etl.cli.output import write_out
from etl.errors import ConfigurationError

if TYPE_CHECKING:
    from etl.store.embedded import EmbeddedServer, ServerStatus

EXIT_NOT_RUNNING = 69
EXIT_IN_USE = 75


@click.group()
def server() -> None:
    """Control the embedded PostgreSQL server.

    Commands that need it start it by themselves, and the last one stops it. So this is for those who want to look
    into its tables with other programs meanwhile.
    """


@server.command()
def start() -> None:
    """Start the server and keep it running until "etl server stop", also over restarts of the machine."""
    embedded = _embedded()
    with embedded:
        embedded.keep_running()
    write_out(_describe(embedded.status()))


@server.command()
@click.option("--force", is_flag=True, help="Stop it even if commands use it: their connections break.")
@click.pass_context
def stop(context: click.Context, force: bool) -> None:
    """Stop the server; one that is in use is stopped by its last user (exit code 75)."""
    from etl.store.embedded import StopOutcome

    outcome = _embedded().stop(force=force)
    write_out(outcome.value)
    if outcome is StopOutcome.IN_USE:
        context.exit(EXIT_IN_USE)


@server.command()
@click.pass_context
def status(context: click.Context) -> None:
    """Show what the server is doing; exit code 0 when it runs, 69 when not."""
    from etl.store.embedded import ServerState

    found = _embedded().status()
    write_out(_describe(found))
    if found.state is not ServerState.RUNNING:
        context.exit(EXIT_NOT_RUNNING)


@server.command()
@click.option("--tcp", is_flag=True, help="Through TCP on 127.0.0.1, for programs that know no Unix sockets.")
def url(tcp: bool) -> None:
    """Print the URL of the running server's database: psql "$(etl server url)".

    It contains the password of this private server: that is what it is for. Keep it out of logs.
    """
    embedded = _embedded()
    write_out(embedded.tcp_url() if tcp else embedded.url())


def _embedded() -> EmbeddedServer:
    settings = settings_module.load(Path.cwd(), os.environ)
    if settings.store_url is not None:
        raise ConfigurationError("a database is configured; the embedded server is not used")
    # Imported here: it brings the database driver, and "etl --help" has no time for that.
    from etl.store.embedded import EmbeddedServer

    return EmbeddedServer(settings.state_dir)


def _describe(status: ServerStatus) -> str:
    facts = [f"{status.state.value}: {status.directory}"]
    if status.version is not None:
        facts.append(f"PostgreSQL {status.version}")
    if status.pid is not None:
        facts += [f"pid {status.pid}", f"port {status.port}"]
    facts += ["in use"] if status.in_use else []
    facts += ["kept running"] if status.kept else []
    return ", ".join(facts)
