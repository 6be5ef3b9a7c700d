"""A table's definition in a scratch place, for crash tests: the real table is looked at and never touched."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

import psycopg
from psycopg import sql

from etl.errors import ConfigurationError, Finding
from etl.schema import IDENTIFIER_BYTES_MAX
from etl.sink import Connection, PreflightContext, Scratch
from etl.sqlstate import translate
from etl.transaction import transaction
from sinks.catalog import read_table
from sinks.postgres_preflight import create_statement
from sinks.postgres_table import PostgresTable

_LITERAL = r"'(?:[^']|'')*'"
_NEXTVAL = re.compile(rf"nextval\((?:{_LITERAL}|[^()']|\((?:{_LITERAL}|[^()'])*\))*\)")
"""A call of nextval as the server prints it: ``nextval('s'::regclass)`` or ``nextval(('s'::text)::regclass)``."""


def table_in(scratch: Scratch, table: PostgresTable) -> PostgresTable:
    """The declaration of a table's copy. Tables of the same name in different schemas have different copies."""
    name = f"{table.schema}.{table.name}"
    if len(name.encode()) > IDENTIFIER_BYTES_MAX or "." in table.schema:
        name = hashlib.sha256(f"{len(table.schema)}:{name}".encode()).hexdigest()[:32]
    return PostgresTable(
        name,
        schema=scratch.schema,
        key=table.key,
        version=table.version,
        create=table.create,
        database=table.database,
    )


def copy_definition(context: PreflightContext, table: PostgresTable, copy: PostgresTable) -> None:
    """Columns, defaults, checks and indexes; without rows, foreign keys and triggers.

    Raises:
        ConfigurationError: The table does not exist and is not declared to be created, or may not be copied.
    """
    connection = context.connect("scratch")
    try:
        if read_table(connection, table) is not None:
            with transaction(connection):
                _copy(connection, table, copy)
        elif not table.create:
            statement = create_statement(table, context.schema).as_string(None)
            finding = Finding(f"table {table}", "it does not exist", f"{statement}; or declare create=True")
            raise ConfigurationError.from_findings(f'sink "{context.uid}"', [finding])
    except psycopg.Error as error:
        raise translate(error, f'sink "{context.uid}", copying the definition of table {table}') from error
    finally:
        connection.close()


def _copy(connection: Connection, table: PostgresTable, copy: PostgresTable) -> None:
    # Nothing but pg_catalog in the path: the server then prints every name in a default with its schema.
    connection.execute("SET LOCAL search_path = pg_catalog")
    statement = sql.SQL("CREATE TABLE IF NOT EXISTS {} (LIKE {} INCLUDING ALL)")
    connection.execute(statement.format(copy.identifier, table.identifier))
    for number, (column, expression) in enumerate(_defaults_with_sequences(connection, copy)):
        # LIKE copies a serial column's default as it is: the copy would take numbers from the real table's sequence.
        sequence = sql.Identifier(copy.schema, f"{hashlib.sha256(copy.name.encode()).hexdigest()[:16]}_{number}")
        connection.execute(sql.SQL("CREATE SEQUENCE IF NOT EXISTS {}").format(sequence))
        own = _with_sequence(expression, sequence, f'table {table}, column "{column}"')
        alter = sql.SQL("ALTER TABLE {} ALTER COLUMN {} SET DEFAULT {}")
        # The expression is the server's own spelling of what stands in its catalog.
        connection.execute(alter.format(copy.identifier, sql.Identifier(column), sql.SQL(own)))


def _with_sequence(expression: str, sequence: sql.Identifier, subject: str) -> str:
    """A default that takes its numbers from another sequence."""
    call = f"nextval({sql.Literal(sequence.as_string(None)).as_string(None)}::regclass)"
    replaced, count = _NEXTVAL.subn(lambda _call: call, expression)
    if count != expression.count("nextval("):
        problem = f"its default {expression} takes numbers from a sequence in a way that cannot be turned to another"
        raise ConfigurationError.from_findings(
            "a copy for the crash test", [Finding(subject, problem, "simplify the default")]
        )
    return replaced


def _defaults_with_sequences(connection: Connection, table: PostgresTable) -> Iterator[tuple[str, str]]:
    rows = connection.execute(
        "SELECT a.attname, pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef d"
        " JOIN pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum"
        " JOIN pg_class c ON c.oid = d.adrelid JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = %s AND a.attgenerated = '' ORDER BY a.attnum",
        [table.schema, table.name],
    ).fetchall()
    return ((column, expression) for column, expression in rows if "nextval(" in expression)
