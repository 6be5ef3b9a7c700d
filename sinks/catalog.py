"""What the server's catalog says about a target table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etl.sink import Connection
from sinks.postgres_table import PostgresTable


@dataclass(frozen=True, slots=True)
class TargetType:
    """A column's type with domains resolved.

    Attributes:
        name: Catalog name of the scalar (element) type, e.g. ``int4``.
        oid: Its OID.
        modifier: Type modifier, -1 for none.
        is_array: Whether the column is an array of it.
        is_enum: Whether it is an enumeration.
        is_builtin: Whether it lives in ``pg_catalog``.
        cast: Spelling for a cast, without modifier.
        shown: Spelling for people, with modifier.
    """

    name: str
    oid: int
    modifier: int
    is_array: bool
    is_enum: bool
    is_builtin: bool
    cast: str
    shown: str


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A column of the table."""

    name: str
    type: TargetType
    not_null: bool
    has_default: bool
    identity_always: bool
    generated: bool
    can_insert: bool
    can_select: bool
    can_update: bool


@dataclass(frozen=True, slots=True)
class UniqueIndex:
    """A unique index; ``columns`` has None for an expression."""

    name: str
    columns: tuple[str | None, ...]
    partial: bool
    deferrable: bool
    valid: bool
    nulls_not_distinct: bool


@dataclass(frozen=True, slots=True)
class TargetTable:
    """A table as the catalog has it; ``row_triggers`` are those that may drop or change a row before it is written."""

    oid: int
    kind: str
    persistence: str
    row_security: bool
    can_use_schema: bool
    row_triggers: tuple[str, ...]
    columns: tuple[TargetColumn, ...]
    indexes: tuple[UniqueIndex, ...]

    def column(self, name: str) -> TargetColumn | None:
        """The column of that name."""
        return next((column for column in self.columns if column.name == name), None)

    def conflict_index(self, key: Sequence[str]) -> UniqueIndex | None:
        """The unique index that ``ON CONFLICT (key)`` can use."""
        return next((index for index in self.candidates(key) if is_usable(index)), None)

    def candidates(self, key: Sequence[str]) -> list[UniqueIndex]:
        """Unique indexes on exactly these columns, usable or not."""
        return [index for index in self.indexes if None not in index.columns and set(index.columns) == set(key)]


def is_usable(index: UniqueIndex) -> bool:
    """Whether ``ON CONFLICT`` infers this index from its columns."""
    return index.valid and not index.partial and not index.deferrable


_TABLE = """
SELECT c.oid, c.relkind, c.relpersistence, row_security_active(c.oid), has_schema_privilege(n.oid, 'USAGE'),
       -- tgtype: 1 is ROW, 2 is BEFORE, 4 is INSERT, 16 is UPDATE
       ARRAY(SELECT t.tgname::text FROM pg_trigger t WHERE t.tgrelid = c.oid AND NOT t.tgisinternal
             AND t.tgenabled IN ('O', 'A') AND t.tgtype & 3 = 3 AND t.tgtype & 20 <> 0 ORDER BY 1)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = %s AND c.relkind <> ALL ('{i,I,t,c,S}')
"""

_COLUMNS = """
WITH RECURSIVE base AS (
    SELECT a.attnum, a.atttypid AS oid, a.atttypmod AS modifier, a.attnotnull AS not_null
    FROM pg_attribute a WHERE a.attrelid = %(table)s AND a.attnum > 0 AND NOT a.attisdropped
  UNION ALL
    SELECT b.attnum, t.typbasetype, CASE WHEN b.modifier = -1 THEN t.typtypmod ELSE b.modifier END,
           b.not_null OR t.typnotnull
    FROM base b JOIN pg_type t ON t.oid = b.oid WHERE t.typtype = 'd'
)
SELECT a.attname, COALESCE(e.typname, t.typname), COALESCE(e.oid, t.oid), b.modifier, e.oid IS NOT NULL,
       COALESCE(e.typtype, t.typtype) = 'e', COALESCE(e.typnamespace, t.typnamespace) = 'pg_catalog'::regnamespace,
       format_type(b.oid, NULL), format_type(a.atttypid, a.atttypmod),
       b.not_null, a.atthasdef OR a.attidentity <> '', a.attidentity = 'a', a.attgenerated <> '',
       has_column_privilege(a.attrelid, a.attnum, 'INSERT'), has_column_privilege(a.attrelid, a.attnum, 'SELECT'),
       has_column_privilege(a.attrelid, a.attnum, 'UPDATE')
FROM base b
JOIN pg_type t ON t.oid = b.oid AND t.typtype <> 'd'
JOIN pg_attribute a ON a.attrelid = %(table)s AND a.attnum = b.attnum
LEFT JOIN pg_type e ON e.oid = t.typelem AND t.typcategory = 'A'
ORDER BY a.attnum
"""

_INDEXES = """
SELECT c.relname,
       ARRAY(SELECT a.attname::text FROM unnest(i.indkey[0:i.indnkeyatts - 1]) WITH ORDINALITY AS k(attnum, position)
             LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum AND k.attnum > 0
             ORDER BY k.position),
       i.indpred IS NOT NULL, NOT i.indimmediate, i.indisvalid,
       COALESCE((to_jsonb(i) ->> 'indnullsnotdistinct')::boolean, false)
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = %s AND i.indisunique
ORDER BY i.indisprimary DESC, c.relname
"""


def read_table(connection: Connection, table: PostgresTable) -> TargetTable | None:
    """Look a table up; None when there is none of that name."""
    with connection.cursor() as cursor:
        found = cursor.execute(_TABLE, [table.schema, table.name]).fetchone()
        if found is None:
            return None
        columns = cursor.execute(_COLUMNS, {"table": found[0]}).fetchall()
        indexes = cursor.execute(_INDEXES, [found[0]]).fetchall()
    oid, kind, persistence, row_security, can_use_schema, row_triggers = found
    return TargetTable(
        oid,
        kind,
        persistence,
        row_security,
        can_use_schema,
        tuple(row_triggers),
        tuple(TargetColumn(row[0], TargetType(*row[1:9]), *row[9:]) for row in columns),
        tuple(UniqueIndex(name, tuple(names), *rest) for name, names, *rest in indexes),
    )
