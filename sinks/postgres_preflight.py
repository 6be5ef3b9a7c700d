"""Everything that would stop a PostgreSQL sink, found before any work starts, each with its cure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psycopg
from psycopg import sql

from etl.errors import Finding
from etl.pooling import is_transaction_pooled
from etl.schema import Schema
from etl.sink import Connection, Delivery, PreflightContext
from etl.sqlstate import translate
from etl.transaction import transaction
from sinks.catalog import TargetColumn, TargetTable, UniqueIndex, is_usable, read_table
from sinks.columns import Carrier, carrier_for
from sinks.postgres_table import PostgresTable
from sinks.two_phase import PREFIX

_TIMEOUTS = ("idle_in_transaction_session_timeout", "transaction_timeout", "statement_timeout")
_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}


def inspect(context: PreflightContext, table: PostgresTable, delivery: Delivery) -> list[Finding]:
    """All findings about a table as the target of a stream.

    Raises:
        EtlError: The database cannot be asked (unreachable, or the role may not read the catalog).
    """
    connection = context.connect("preflight")
    try:
        return [
            *_stream_findings(table, context.schema),
            *_server_findings(connection, context),
            *(_two_phase_findings(connection) if delivery is Delivery.TWO_PHASE else ()),
            *_table_findings(connection, context, table),
        ]
    except psycopg.Error as error:
        raise translate(error, f'preflight of sink "{context.uid}"') from error
    finally:
        connection.close()


def create_table(context: PreflightContext, table: PostgresTable) -> None:
    """Create the table when it does not exist; safe when several first runs do so at the same time."""
    connection = context.connect("preflight")
    try:
        # A role that may write to the table need not be one that may create tables.
        if read_table(connection, table) is not None:
            return
        with transaction(connection):
            # CREATE TABLE IF NOT EXISTS alone fails with 23505 or 42P07 when two sessions race.
            connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"etl create {table}"])
            connection.execute(create_statement(table, context.schema))
    finally:
        connection.close()


def create_statement(table: PostgresTable, schema: Schema) -> sql.Composed:
    """The statement that ``create=True`` runs."""
    # Type names come from etl.schema's own parser, which knows a closed set of spellings.
    lines = [sql.SQL("{} {}").format(sql.Identifier(field.name), sql.SQL(field.type.name)) for field in schema]
    if table.key:
        key = sql.SQL(", ").join(sql.Identifier(name) for name in table.key)
        lines.append(sql.SQL("PRIMARY KEY ({})").format(key))
    return sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(table.identifier, sql.SQL(", ").join(lines))


def _stream_findings(table: PostgresTable, schema: Schema) -> Iterator[Finding]:
    wanted = [("key", name) for name in table.key] + [("version", name) for name in [table.version] if name]
    for what, name in wanted:
        if name not in schema:
            problem = f'{what} column "{name}" is not in the stream ({", ".join(schema.names)})'
            yield Finding(f"table {table}", problem, f"add it to the stream or change {what}=")


def _server_findings(connection: Connection, context: PreflightContext) -> Iterator[Finding]:
    row = connection.execute(
        "SELECT pg_is_in_recovery(), current_setting('default_transaction_read_only')::boolean"
    ).fetchone()
    assert row is not None
    standby, read_only = row
    if is_transaction_pooled(connection, lambda: context.connect("probe")):
        problem = "a transaction pooler stands in front of the server; settings and sessions do not survive in it"
        yield Finding("database", problem, "connect to the server directly, or through a pool in session mode")
    if standby:
        yield Finding("database", "the server is a standby: it takes no writes", "connect to the primary")
    if read_only:
        cure = sql.SQL("ALTER ROLE {} SET default_transaction_read_only = off;").format(_role(connection))
        yield Finding("database", "default_transaction_read_only is on", cure.as_string(None))
    yield from _timeout_findings(connection, context.unit_time_s)


def _timeout_findings(connection: Connection, unit_time_s: float) -> Iterator[Finding]:
    # The effective values on the very kind of connection that will write; what connect() sets counts.
    rows = connection.execute(
        "SELECT name, setting::bigint FROM pg_settings WHERE name = ANY (%s) ORDER BY name", [list(_TIMEOUTS)]
    ).fetchall()
    for name, limit_ms in rows:
        if 0 < limit_ms <= unit_time_s * 1000:
            problem = f"{name} is {limit_ms / 1000:g} s, but a checkpoint may keep a transaction open {unit_time_s:g} s"
            cure = sql.SQL("ALTER ROLE {} SET {} = {};").format(
                _role(connection), sql.Identifier(name), sql.Literal(f"{int(unit_time_s * 2)}s")
            )
            yield Finding("database", problem, f"{cure.as_string(None)} or take checkpoints more often")


def _role(connection: Connection) -> sql.Identifier:
    row = connection.execute("SELECT current_user").fetchone()
    assert row is not None
    return sql.Identifier(row[0])


def _two_phase_findings(connection: Connection) -> Iterator[Finding]:
    row = connection.execute(
        # Our own leftovers do not count: recovery finishes them before anything new is prepared.
        "SELECT current_setting('max_prepared_transactions')::int, (SELECT count(*) FROM pg_prepared_xacts"
        " WHERE NOT (starts_with(gid, %s) AND database = current_database()))",
        [f"{PREFIX}:"],
    ).fetchone()
    assert row is not None
    allowed, used = row
    if allowed == 0:
        problem = "max_prepared_transactions is 0, the server's default: two-phase commit is off"
        cure = "ALTER SYSTEM SET max_prepared_transactions = 64; then restart the server, or use WriteAheadSink"
        yield Finding("database", problem, cure)
    elif used >= allowed:
        problem = f"all {allowed} prepared transactions are in use (see pg_prepared_xacts)"
        cure = f"finish the abandoned ones, or ALTER SYSTEM SET max_prepared_transactions = {allowed * 2}; and restart"
        yield Finding("database", problem, cure)


def _table_findings(connection: Connection, context: PreflightContext, table: PostgresTable) -> list[Finding]:
    target = read_table(connection, table)
    if target is None:
        return _missing_findings(connection, context.schema, table)
    findings = [*kind_findings(table, target), *_partition_findings(connection, table, target)]
    if target.kind in _KINDS:
        return findings
    _, columns = column_findings(table, target, context.schema)
    return [
        *findings,
        *_access_findings(connection, table, target, context.schema),
        *columns,
        *_unsupplied_findings(table, target, context.schema),
        *key_findings(table, target),
        *_trigger_findings(table, target, context.schema),
    ]


def _missing_findings(connection: Connection, schema: Schema, table: PostgresTable) -> list[Finding]:
    row = connection.execute(
        "SELECT has_schema_privilege(oid, 'CREATE') FROM pg_namespace WHERE nspname = %s", [table.schema]
    ).fetchone()
    subject, namespace = f"table {table}", sql.Identifier(table.schema)
    if row is None:
        return [
            Finding(subject, f'schema "{table.schema}" does not exist', f"CREATE SCHEMA {namespace.as_string(None)};")
        ]
    if not table.create:
        statement = create_statement(table, schema).as_string(None).replace("IF NOT EXISTS ", "")
        return [Finding(subject, "it does not exist", f"{statement}; or declare create=True")]
    if not row[0]:
        grant = sql.SQL("GRANT CREATE ON SCHEMA {} TO {};").format(namespace, _role(connection))
        return [Finding(subject, f'the role may not create tables in schema "{table.schema}"', grant.as_string(None))]
    return []


def kind_findings(table: PostgresTable, target: TargetTable) -> Iterator[Finding]:
    """What is no table whose rows outlive a crash."""
    subject = f"table {table}"
    if target.kind in _KINDS:
        yield Finding(subject, f"it is {_KINDS[target.kind]}; rows go into tables only", "name the table itself")
    if target.persistence == "t":
        yield Finding(subject, "it is a temporary table of one session", "name an ordinary table")
    if target.persistence == "u":
        problem = "it is unlogged: a crash of the server empties it while the checkpoint survives"
        yield Finding(subject, problem, f"ALTER TABLE {table.quoted()} SET LOGGED;")


def _partition_findings(connection: Connection, table: PostgresTable, target: TargetTable) -> Iterator[Finding]:
    if target.kind != "p":
        return
    rows = connection.execute(
        "SELECT c.oid::regclass::text, c.relkind"
        " FROM pg_partition_tree(%s::oid::regclass) p JOIN pg_class c ON c.oid = p.relid"
        " WHERE p.isleaf AND (c.relkind = 'f' OR c.relpersistence <> 'p')",
        [target.oid],
    ).fetchall()
    for name, kind in rows:
        what = "a foreign table" if kind == "f" else "unlogged"
        problem = f"its partition {name} is {what}: its rows are not safely part of a transaction"
        cure = f"ALTER TABLE {table.quoted()} DETACH PARTITION {name};"
        yield Finding(f"table {table}", problem, cure)


def _access_findings(
    connection: Connection, table: PostgresTable, target: TargetTable, schema: Schema
) -> Iterator[Finding]:
    role = _role(connection).as_string(None)
    if not target.can_use_schema:
        namespace = sql.Identifier(table.schema).as_string(None)
        cure = f"GRANT USAGE ON SCHEMA {namespace} TO {role};"
        yield Finding(f"table {table}", f'the role may not use schema "{table.schema}"', cure)
    for privilege, lacking in _lacking(table, target, schema):
        cure = f"GRANT {privilege} ON {table.quoted()} TO {role};"
        yield Finding(f"table {table}", f"the role has no {privilege} privilege on {', '.join(lacking)}", cure)
    if target.row_security:
        problem = "row level security is in force for the role: rows could be refused or hidden"
        yield Finding(f"table {table}", problem, f"ALTER ROLE {role} BYPASSRLS; or write as the owner of the table")


def _lacking(table: PostgresTable, target: TargetTable, schema: Schema) -> Iterator[tuple[str, list[str]]]:
    written = [column for column in target.columns if column.name in schema]
    lacking = {"INSERT": [column.name for column in written if not column.can_insert]}
    if table.key:
        # ON CONFLICT reads the key, the guard, and every EXCLUDED column: all of them need SELECT.
        lacking["SELECT"] = [column.name for column in written if not column.can_select]
        changed = [column for column in written if column.name not in table.key]
        lacking["UPDATE"] = [column.name for column in changed if not column.can_update]
    return ((privilege, names) for privilege, names in lacking.items() if names)


def column_findings(table: PostgresTable, target: TargetTable, schema: Schema) -> tuple[list[Carrier], list[Finding]]:
    """How each column of the stream travels, and what stands against it."""
    carriers: list[Carrier] = []
    findings: list[Finding] = []
    for field in schema:
        subject = f'table {table} column "{field.name}"'
        column = target.column(field.name)
        if column is None:
            add = sql.SQL("ALTER TABLE {} ADD COLUMN {} {};").format(
                table.identifier, sql.Identifier(field.name), sql.SQL(field.type.name)
            )
            findings.append(Finding(subject, "the table has no such column", add.as_string(None)))
            continue
        findings += _forbidden_findings(subject, table, column)
        carrier = carrier_for(field.name, field.type, column)
        if isinstance(carrier, Carrier):
            carriers.append(carrier)
        else:
            findings.append(Finding(subject, carrier, _type_cure(table, field.name, field.type.name)))
    return carriers, findings


def _type_cure(table: PostgresTable, name: str, type_name: str) -> str:
    alter = sql.SQL("ALTER TABLE {} ALTER COLUMN {} TYPE {};").format(
        table.identifier, sql.Identifier(name), sql.SQL(type_name)
    )
    return f"cast the column in the job, or {alter.as_string(None)}"


def _forbidden_findings(subject: str, table: PostgresTable, column: TargetColumn) -> Iterator[Finding]:
    name = sql.Identifier(column.name).as_string(None)
    if column.generated:
        cure = f"drop it from the stream, or ALTER TABLE {table.quoted()} ALTER COLUMN {name} DROP EXPRESSION;"
        yield Finding(subject, "it is a generated column: the server computes it", cure)
    if column.identity_always:
        cure = f"drop it from the stream, or ALTER TABLE {table.quoted()} ALTER COLUMN {name} SET GENERATED BY DEFAULT;"
        yield Finding(subject, "it is GENERATED ALWAYS AS IDENTITY: the server numbers it", cure)


def _unsupplied_findings(table: PostgresTable, target: TargetTable, schema: Schema) -> Iterator[Finding]:
    for column in target.columns:
        if column.name in schema or not column.not_null or column.has_default:
            continue
        name = sql.Identifier(column.name).as_string(None)
        cure = f"add it to the stream, or ALTER TABLE {table.quoted()} ALTER COLUMN {name} SET DEFAULT …;"
        problem = "it is NOT NULL, has no default, and the stream does not supply it"
        yield Finding(f'table {table} column "{column.name}"', problem, cure)


def _trigger_findings(table: PostgresTable, target: TargetTable, schema: Schema) -> Iterator[Finding]:
    """A BEFORE trigger can drop rows without a word.

    Everywhere else the counts of rows sent and taken tell; here fewer may be taken for good reasons.
    """
    uncounted = bool(table.key) and (table.version is not None or set(table.key) == set(schema.names))
    for name in target.row_triggers if uncounted else ():
        trigger = sql.Identifier(name).as_string(None)
        why = "older versions are left out" if table.version else "rows that are there are left out"
        problem = f"trigger {trigger} could drop rows before they are written, and since {why} nobody would notice"
        yield Finding(f"table {table}", problem, f"ALTER TABLE {table.quoted()} DISABLE TRIGGER {trigger};")


def key_findings(table: PostgresTable, target: TargetTable) -> list[Finding]:
    """What keeps ``ON CONFLICT (key)`` from working."""
    if not table.key:
        return []
    index = target.conflict_index(table.key)
    if index is None:
        return [_no_index_finding(table, target.candidates(table.key))]
    nullable = [column.name for column in target.columns if column.name in table.key and not column.not_null]
    if not nullable or index.nulls_not_distinct:
        return []
    return [_nullable_finding(table, name) for name in nullable]


def _no_index_finding(table: PostgresTable, candidates: Sequence[UniqueIndex]) -> Finding:
    columns = ", ".join(sql.Identifier(name).as_string(None) for name in table.key)
    unfit = "".join(f"; {index.name} is {_flaw(index)}" for index in candidates if not is_usable(index))
    problem = f"no unique index is on exactly the key ({', '.join(table.key)}){unfit}"
    return Finding(f"table {table}", problem, f"CREATE UNIQUE INDEX ON {table.quoted()} ({columns});")


def _flaw(index: UniqueIndex) -> str:
    if index.partial:
        return "partial"
    return "deferrable" if index.deferrable else "invalid"


def _nullable_finding(table: PostgresTable, name: str) -> Finding:
    quoted = sql.Identifier(name).as_string(None)
    problem = "it is part of the key and may be NULL, which equals nothing: such rows would pile up"
    return Finding(
        f'table {table} column "{name}"', problem, f"ALTER TABLE {table.quoted()} ALTER COLUMN {quoted} SET NOT NULL;"
    )
