from __future__ import annotations

import pytest

from etl.errors import ConfigurationError
from sinks import PostgresTable


@pytest.mark.parametrize(
    ("table", "schema", "name", "quoted"),
    [
        (PostgresTable("orders"), "public", "orders", '"public"."orders"'),
        (PostgresTable("mart.Orders"), "mart", "Orders", '"mart"."Orders"'),
        (PostgresTable("a.b", schema="x.y"), "x.y", "a.b", '"x.y"."a.b"'),
        (PostgresTable('o"dd'), "public", 'o"dd', '"public"."o""dd"'),
    ],
)
def test_name_is_split_and_quoted(table: PostgresTable, schema: str, name: str, quoted: str) -> None:
    assert (table.schema, table.name, table.quoted()) == (schema, name, quoted)


def test_key_may_be_one_name_or_several() -> None:
    assert PostgresTable("t", key="id").key == ("id",)
    assert PostgresTable("t", key=["a", "b"]).key == ("a", "b")
    assert PostgresTable("t").key == ()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.b.c", {}, "more than one dot"),
        ("", {}, "has 0 bytes"),
        (".t", {}, "has 0 bytes"),
        ("ü" * 32, {}, "has 64 bytes"),
        ("a\0b", {}, "without NUL"),
        ("t", {"key": ["id", "id"]}, "named twice"),
        ("t", {"version": "v"}, "no key"),
        ("t", {"key": ["id"], "version": "id"}, "is a key column"),
    ],
)
def test_bad_declaration_is_refused_at_once(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PostgresTable(name, **options)  # type: ignore[arg-type]


def test_all_findings_of_a_declaration_come_together() -> None:
    with pytest.raises(ConfigurationError) as caught:
        PostgresTable("", key=["", ""], version="")
    assert len(caught.value.findings) == 5


def test_tables_are_values() -> None:
    assert PostgresTable("t", key="id") == PostgresTable("public.t", key=["id"])
    assert PostgresTable("t", key="id", version="v", database="mart").describe() == (
        "table public.t, upsert by id, guarded by version v, database mart"
    )
