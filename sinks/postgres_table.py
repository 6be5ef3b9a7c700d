"""What a PostgreSQL sink writes to and what its rows mean; how they become visible is the sink's business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psycopg import sql

from etl.errors import ConfigurationError, Finding
from etl.schema import IDENTIFIER_BYTES_MAX

DEFAULT_SCHEMA = "public"


@dataclass(frozen=True, slots=True, init=False)
class PostgresTable:
    """A table as the target of a stream.

    Without ``key`` every row is appended. With ``key`` a row replaces the one with the same key (upsert); only the
    columns of the stream are written, others keep their values.

    Args:
        name: ``"table"`` or ``"schema.table"``, split at the first dot; exactly as the catalog spells it (no quotes,
            no case folding). A name without a schema means schema ``public``, whatever the ``search_path``.
        schema: The schema, for names that contain a dot themselves; ``name`` is then not split.
        key: Columns that identify a row; the table needs a unique index on exactly these.
        version: Column that orders the versions of a row: a stored row is replaced only by the same or a higher
            version, so that no reader sees a row go back while a failure is replayed. Needs ``key``.
        create: Create the table before the first run when it does not exist, with the stream's types and ``key`` as
            its primary key. Nothing is ever dropped or altered.
        database: Name of a configured database; None is the store database.

    Raises:
        ConfigurationError: Lists everything that is wrong with the declaration.
    """

    name: str
    schema: str
    key: tuple[str, ...]
    version: str | None
    create: bool
    database: str | None

    def __init__(
        self,
        name: str,
        *,
        schema: str | None = None,
        key: Sequence[str] | str | None = None,
        version: str | None = None,
        create: bool = False,
        database: str | None = None,
    ) -> None:
        if schema is None:
            schema, dot, rest = name.partition(".")
            schema, name = (schema, rest) if dot else (DEFAULT_SCHEMA, name)
            if "." in name:
                raise ConfigurationError(f'table "{schema}.{name}" has more than one dot; give schema= and name apart')
        keys = (key,) if isinstance(key, str) else tuple(key or ())
        values = {"name": name, "schema": schema, "key": keys, "version": version, "create": create}
        for attribute, value in {**values, "database": database}.items():
            object.__setattr__(self, attribute, value)
        if findings := self._findings():
            raise ConfigurationError.from_findings(f'table "{self}"', findings)

    def _findings(self) -> list[Finding]:
        findings = [
            _bad_name(what, name)
            for what, name in [("schema", self.schema), ("table", self.name), *(("key", name) for name in self.key)]
            if not 1 <= len(name.encode()) <= IDENTIFIER_BYTES_MAX or "\0" in name
        ]
        if len(set(self.key)) < len(self.key):
            findings.append(Finding("key", f"a column is named twice in {list(self.key)}", "name each column once"))
        if self.version is not None and not self.key:
            findings.append(Finding("version", "there is no key whose rows have versions", "give key=[…] as well"))
        if self.version is not None and self.version in self.key:
            findings.append(Finding("version", f'"{self.version}" is a key column', "name a column outside the key"))
        return findings

    @property
    def identifier(self) -> sql.Identifier:
        """The quoted, qualified name for statements."""
        return sql.Identifier(self.schema, self.name)

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"

    def describe(self) -> str:
        """One line for ``etl explain``."""
        parts = [f"table {self}", f"upsert by {', '.join(self.key)}" if self.key else "append"]
        if self.version is not None:
            parts.append(f"guarded by version {self.version}")
        if self.database is not None:
            parts.append(f"database {self.database}")
        return ", ".join(parts)

    def quoted(self) -> str:
        """The quoted, qualified name as text, for statements that a person pastes."""
        return self.identifier.as_string(None)


def _bad_name(what: str, name: str) -> Finding:
    problem = f"{name!r} has {len(name.encode())} bytes; 1 to {IDENTIFIER_BYTES_MAX} without NUL are allowed"
    return Finding(what, problem, "give the name as the catalog spells it")
