"""``etl db``: the schema ``etl`` of the store and of the target databases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from etl.cli.connecting import STORE, load_settings, store_url
from etl.cli.output import write_out
from etl.settings import Settings
from etl.store import migrations
from etl.store.database import Database

_database_option = click.option(
    "--database", "name", metavar="NAME", default=STORE, help="A database of etl.toml; by default the store."
)


@click.group()
def db() -> None:
    """Create, upgrade and inspect the schema etl of a database."""


@db.command()
@_database_option
def upgrade(name: str) -> None:
    """Bring the schema etl to the revision this version needs, creating it when absent."""
    settings = load_settings()
    with _url_of(settings, name) as url:
        before = migrations.current(url, name)
        migrations.upgrade(url, name)
        where = Database(url, name).safe_url
    if before == migrations.HEAD:
        write_out(f"schema etl of database {name} is at revision {before} already ({where})")
    else:
        write_out(f"schema etl of database {name}: {before or 'absent'} -> {migrations.HEAD} ({where})")


@db.command()
@_database_option
@click.pass_context
def current(context: click.Context, name: str) -> None:
    """Print the revision of the schema etl; exit code 2 when it is not the one this version needs."""
    settings = load_settings()
    with _url_of(settings, name) as url:
        revision = migrations.current(url, name)
    write_out(revision or "absent")
    if revision != migrations.HEAD:
        context.exit(2)


@contextmanager
def _url_of(settings: Settings, name: str) -> Iterator[str]:
    if name == STORE:
        with store_url(settings) as where:
            yield where.url
        return
    yield settings.database_url(name)
