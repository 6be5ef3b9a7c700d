"""A table of a PostgreSQL that is asked for its rows by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import psycopg
import pyarrow as pa
from psycopg import sql

from etl.errors import ConfigurationError, Finding, RecordError
from etl.lookup import Found, Lookup, LookupContext, LookupReader
from etl.schema import PostgresType, Schema
from etl.sink import Connection
from etl.sqlstate import translate
from sinks.catalog import TargetColumn, TargetTable, read_table
from sinks.postgres_table import PostgresTable

_TEXTS = ("text", "varchar")
_AS_TEXT = ("uuid", "json", "jsonb", *_TEXTS)
"""Types that batches carry as text: the server spells them out, also what it has under names of its own."""


@dataclass(frozen=True, slots=True, init=False)
class PostgresLookup(Lookup):
    """A table that is asked for rows by key, and never written to.

    Args:
        name: ``"table"`` or ``"schema.table"``, as for :class:`~sinks.postgres_table.PostgresTable`.
        key: Columns that identify a row; the table needs a unique index on these, or on some of them.
        columns: Types of the key's columns and of those that are looked up, by name, exactly as the table has them.
        schema: The schema, for names that contain a dot themselves; ``name`` is then not split.
        database: Name of a configured database; None is the store database.

    Raises:
        ConfigurationError: Lists everything that is wrong with the declaration.
    """

    table: PostgresTable
    columns: Schema

    def __init__(
        self,
        name: str,
        *,
        key: Sequence[str] | str,
        columns: Mapping[str, str],
        schema: str | None = None,
        database: str | None = None,
    ) -> None:
        object.__setattr__(self, "table", PostgresTable(name, schema=schema, key=key, database=database))
        object.__setattr__(self, "columns", Schema.declare(columns))
        if findings := list(self._findings()):
            raise ConfigurationError.from_findings(f'lookup in table "{self.table}"', findings)

    def _findings(self) -> Iterator[Finding]:
        if not self.key:
            yield Finding("key", "it names no column", 'e.g. key="id"')
        for name in self.key:
            if name not in self.columns:
                problem, cure = f'"{name}" is not among the columns', "give its type in columns={…}"
                yield Finding("key", problem, cure)
            elif self.columns[name].is_array or self.columns[name].base in ("json", "jsonb"):
                problem = f'"{name}" is {self.columns[name]}, whose values have no equality here'
                yield Finding("key", problem, "choose another column")

    @property
    def schema(self) -> Schema:
        """See :attr:`etl.lookup.Lookup.schema`."""
        return self.columns

    @property
    def key(self) -> tuple[str, ...]:
        """See :attr:`etl.lookup.Lookup.key`."""
        return self.table.key

    @property
    def database(self) -> str | None:
        """See :attr:`etl.lookup.Lookup.database`."""
        return self.table.database

    def describe(self) -> str:
        """Table and database."""
        where = "" if self.database is None else f", database {self.database}"
        return f"table {self.table}{where}"

    def preflight(self, context: LookupContext) -> Sequence[Finding]:
        """Look at table, columns, types, privileges, and whether the key is unique."""
        connection = context.connect("preflight")
        try:
            return list(self._table_findings(connection))
        except psycopg.Error as error:
            raise translate(error, f'preflight of lookup join "{context.uid}"') from error
        finally:
            connection.close()

    def create_reader(self, context: LookupContext) -> LookupReader:
        """See :meth:`etl.lookup.Lookup.create_reader`."""
        return _Reader(self, context)

    def _table_findings(self, connection: Connection) -> Iterator[Finding]:
        target, subject = read_table(connection, self.table), f"table {self.table}"
        if target is None:
            yield Finding(subject, "it does not exist", "correct its name; a lookup creates nothing")
            return
        role = connection.execute("SELECT quote_ident(current_user)").fetchone()
        assert role is not None
        if not target.can_use_schema:
            cure = f"GRANT USAGE ON SCHEMA {sql.Identifier(self.table.schema).as_string(None)} TO {role[0]};"
            yield Finding(subject, f'the role may not use schema "{self.table.schema}"', cure)
        if target.row_security:
            problem = "row level security is in force for the role: rows could be hidden"
            yield Finding(subject, problem, f"ALTER ROLE {role[0]} BYPASSRLS; or ask as the owner of the table")
        for field in self.columns:
            yield from _column_findings(self.table, target.column(field.name), field.name, field.type, role[0])
        unique = [index.columns for index in target.indexes if index.valid and not index.partial]
        if not any(_identifies(columns, self.key) for columns in unique):
            yield Finding(subject, *self._no_index(target))

    def _no_index(self, target: TargetTable) -> tuple[str, str]:
        columns = ", ".join(sql.Identifier(name).as_string(None) for name in self.key)
        problem = f"no unique index says that the key ({', '.join(self.key)}) identifies a row"
        if target.kind == "v":
            return problem, "a view has no index: name the table, or a materialized view with a unique index"
        return problem, f"CREATE UNIQUE INDEX ON {self.table.quoted()} ({columns});"


def _identifies(index: Sequence[str | None], key: Sequence[str]) -> bool:
    return None not in index and set(index) <= set(key)


def _column_findings(
    table: PostgresTable, column: TargetColumn | None, name: str, declared: PostgresType, role: str
) -> Iterator[Finding]:
    subject = f'table {table} column "{name}"'
    if column is None:
        yield Finding(subject, "the table has no such column", "correct the columns of the lookup")
        return
    if not column.can_select:
        quoted = sql.Identifier(name).as_string(None)
        yield Finding(subject, "the role may not read it", f"GRANT SELECT ({quoted}) ON {table.quoted()} TO {role};")
    if not _is_like(column, declared):
        yield Finding(subject, f"it is {column.type.shown}, not {declared}", "declare it as it is")


def _is_like(column: TargetColumn, declared: PostgresType) -> bool:
    """Whether a column has the declared type; what a text or a numeric must not exceed is seen at each value."""
    actual = column.type
    if actual.is_array != declared.is_array:
        return False
    if declared.base in _TEXTS:
        return actual.is_enum or actual.name in (*_TEXTS, "citext")
    return actual.is_builtin and actual.name == declared.base


class _Reader(LookupReader):
    """Asks over a session of its own, which is opened with the first question."""

    def __init__(self, lookup: PostgresLookup, context: LookupContext) -> None:
        self._lookup = lookup
        self._context = context
        self._connection: Connection | None = None

    def find(self, keys: pa.RecordBatch) -> Sequence[Found]:
        """See :meth:`etl.lookup.LookupReader.find`."""
        asked = f'lookup join "{self._context.uid}" in table {self._lookup.table}'
        try:
            if self._connection is None:
                self._connection = self._context.connect("lookup")
            # In binary form: the text of a float4 is not its value. Raw: names may have percent signs.
            with psycopg.RawCursor(self._connection) as cursor:
                cursor.execute(self._question, [column.to_pylist() for column in keys.columns], binary=True)
                rows = cursor.fetchall()
        except psycopg.DataError as error:
            if error.sqlstate is None:
                # What Python's types cannot hold: infinity, or years beyond 9999.
                raise RecordError(f"{asked}: {error}") from error
            raise translate(error, asked) from error
        except psycopg.Error as error:
            raise translate(error, asked) from error
        found = [(place - 1, tuple(values)) for place, *values in rows]
        if len({place for place, _ in found}) < len(found):
            raise RecordError(f"{asked}: a key has several rows, though it had a unique index when the run began")
        return found

    def close(self) -> None:
        """See :meth:`etl.lookup.LookupReader.close`."""
        if self._connection is not None:
            self._connection.close()

    @cached_property
    def _question(self) -> sql.Composed:
        """All keys as arrays, one for each column, and their places with the rows that are there."""
        lookup = self._lookup
        values = [field for field in lookup.columns if field.name not in lookup.key]
        places = range(1, len(lookup.key) + 1)
        arrays = [
            sql.SQL("{}::{}[]").format(sql.SQL(f"${place}"), sql.SQL(lookup.columns[name].base))
            for place, name in zip(places, lookup.key, strict=True)
        ]
        pairs = [
            sql.SQL("t.{} = {}").format(sql.Identifier(name), sql.Identifier("asked", f"key_{place}"))
            for place, name in zip(places, lookup.key, strict=True)
        ]
        return sql.SQL(
            "SELECT asked.place{} FROM unnest({}) WITH ORDINALITY AS asked ({}, place) JOIN {} AS t ON {}"
        ).format(
            sql.Composed([_selected(field.name, field.type) for field in values]),
            sql.SQL(", ").join(arrays),
            sql.SQL(", ").join(sql.Identifier(f"key_{place}") for place in places),
            lookup.table.identifier,
            sql.SQL(" AND ").join(pairs),
        )


def _selected(name: str, type_: PostgresType) -> sql.Composed:
    cast = f"::text{'[]' if type_.is_array else ''}" if type_.base in _AS_TEXT else ""
    return sql.SQL(", t.{}{}").format(sql.Identifier(name), sql.SQL(cast))
