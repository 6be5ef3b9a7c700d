"""Lookups against a real table: exact values, findings, and what a job makes of them over runs."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from etl import CheckpointPolicy, Job, RestartPolicy
from etl.clock import SystemClock
from etl.errors import ConfigurationError, DatabaseUnreachableError, RecordError
from etl.lookup import LookupContext
from etl.runtime.run import RunOptions, run_job
from etl.runtime.stop import StopSignal
from etl.runtime.summary import RunSummary
from etl.runtime.telemetry import Event, Telemetry
from etl.schema import PostgresType
from etl.sink import Connection
from etl.sources import CsvFiles
from etl.store.database import Database
from sinks import PostgresLookup, PostgresTable, TwoPhaseCommitSink

EVERY_TYPE: dict[str, Any] = {
    "int2": [1, -(1 << 15)],
    "int4": [1, -(1 << 31)],
    "int8": [1, (1 << 63) - 1],
    "float4": [0.5, 3.4028234663852886e38],
    "float8": [0.1, -1e300],
    "numeric(12,2)": [Decimal("1.50"), Decimal("-9999999999.99")],
    "bool": [True, False],
    "text": ["", "ü\n'\"%s{}"],
    "varchar(3)": ["abc", "ü"],
    "date": [dt.date(2024, 2, 29), dt.date(1, 1, 1)],
    "time": [dt.time(23, 59, 59, 999999), dt.time(0)],
    "timestamp": [dt.datetime(2024, 2, 29, 1, 2, 3, 4), dt.datetime(1, 1, 1)],
    "timestamptz": [dt.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=dt.UTC), dt.datetime(9999, 12, 31, tzinfo=dt.UTC)],
    "uuid": ["00000000-0000-0000-0000-00000000000a", "ffffffff-ffff-ffff-ffff-ffffffffffff"],
    "bytea": [b"\x00\xff", b""],
}
NO_KEYS: dict[str, Any] = {
    "jsonb": ['{"a": [1, null]}', "1"],
    "text[]": [["a", None], []],
    "numeric(5,1)[]": [[Decimal("1.5")], []],
}


@pytest.fixture
def server(store_url: str) -> Iterator[Connection]:
    with closing(psycopg.connect(store_url, autocommit=True)) as connection:
        yield connection


def context(url: str) -> LookupContext:
    return LookupContext("named", lambda role: Database(url, "store").connect(f"etl:{role}"), SystemClock())


def find(url: str, lookup: PostgresLookup, *keys: Any) -> list[Any]:
    """What is found, in the order of the places."""
    fields = [lookup.schema[name] for name in lookup.key]
    columns = [pa.array(values, field.arrow) for values, field in zip(zip(*keys, strict=True), fields, strict=True)]
    with closing(lookup.create_reader(context(url))) as reader:
        return sorted(reader.find(pa.RecordBatch.from_arrays(columns, list(lookup.key))))


def problems(url: str, lookup: PostgresLookup) -> list[str]:
    return [str(finding) for finding in lookup.preflight(context(url))]


@pytest.mark.parametrize("name", EVERY_TYPE)
def test_every_type_is_a_key(store_url: str, server: Connection, name: str) -> None:
    server.execute(f"CREATE TABLE things (k {name} PRIMARY KEY, n int4)".encode())
    for number, value in enumerate(EVERY_TYPE[name]):
        server.execute(f"INSERT INTO things VALUES (%s::{name}, %s)".encode(), [value, number])
    lookup = PostgresLookup("things", key="k", columns={"k": name, "n": "int4"})
    assert problems(store_url, lookup) == []
    assert find(store_url, lookup, *((value,) for value in reversed(EVERY_TYPE[name]))) == [(0, (1,)), (1, (0,))]


@pytest.mark.parametrize("name", [*EVERY_TYPE, *NO_KEYS])
def test_every_type_is_found_exactly(store_url: str, server: Connection, name: str) -> None:
    server.execute(f"CREATE TABLE things (k int8 PRIMARY KEY, v {name})".encode())
    values = [*(EVERY_TYPE | NO_KEYS)[name], None]
    for number, value in enumerate(values):
        server.execute(f"INSERT INTO things VALUES (%s, %s::{name})".encode(), [number, value])
    lookup = PostgresLookup("things", key="k", columns={"k": "int8", "v": name})
    assert problems(store_url, lookup) == []
    found = find(store_url, lookup, *((number,) for number in (7, *range(len(values)))))
    assert found == [(number + 1, (value,)) for number, value in enumerate(values)]
    pa.array([value for _, (value,) in found], PostgresType.parse(name).arrow)


def test_key_may_have_several_columns_and_any_names(store_url: str, server: Connection) -> None:
    server.execute('CREATE TABLE "od%s.d" ("a%b" int4, "place" text, "key_1" int8, UNIQUE ("a%b", place))')
    server.execute("""INSERT INTO "od%s.d" VALUES (1, 'x', 10), (1, 'y', 20), (2, 'x', 30)""")
    columns = {"place": "text", "key_1": "int8", "a%b": "int4"}
    lookup = PostgresLookup("od%s.d", schema="public", key=["a%b", "place"], columns=columns)
    assert problems(store_url, lookup) == []
    assert find(store_url, lookup, (2, "x"), (2, "y"), (1, "y")) == [(0, (30,)), (2, (20,))]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("", ["table public.things: it does not exist; correct its name; a lookup creates nothing"]),
        ("CREATE TABLE things (id int8, name text)",
         ["table public.things: no unique index says that the key (id) identifies a row;"
          ' CREATE UNIQUE INDEX ON "public"."things" ("id");']),
        ("CREATE TABLE things (id int4 PRIMARY KEY)",
         ['table public.things column "id": it is integer, not int8; declare it as it is',
          'table public.things column "name": the table has no such column; correct the columns of the lookup']),
        ("CREATE TABLE things (id int8 PRIMARY KEY, name text[])",
         ['table public.things column "name": it is text[], not text; declare it as it is']),
        ("CREATE TABLE things (id int8, name text); CREATE UNIQUE INDEX ON things (id) WHERE id > 0",
         ["table public.things: no unique index says that the key (id) identifies a row;"
          ' CREATE UNIQUE INDEX ON "public"."things" ("id");']),
        ("CREATE VIEW things AS SELECT 1::int8 AS id, 'x'::text AS name",
         ["table public.things: no unique index says that the key (id) identifies a row;"
          " a view has no index: name the table, or a materialized view with a unique index"]),
        ("CREATE MATERIALIZED VIEW things AS SELECT 1::int8 AS id, 'x'::text AS name;"
         " CREATE UNIQUE INDEX ON things (id)", []),
    ],
)  # fmt: skip
def test_what_stands_against_a_lookup_is_found_before(
    store_url: str, server: Connection, statement: str, expected: list[str]
) -> None:
    server.execute(statement.encode())
    assert problems(store_url, PostgresLookup("things", key="id", columns={"id": "int8", "name": "text"})) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"key": "no"}, 'key: "no" is not among the columns'),
        ({"key": []}, "key: it names no column"),
        ({"columns": {"id": "jsonb"}}, 'key: "id" is jsonb, whose values have no equality here'),
        ({"columns": {"id": "money"}}, 'column type "money" is not supported'),
    ],
)
def test_wrong_declaration_is_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PostgresLookup("things", **{"key": "id", "columns": {"id": "int8"}, **given})
    assert expected in str(caught.value)


def test_value_that_python_cannot_hold_is_a_records_fault(store_url: str, server: Connection) -> None:
    server.execute("CREATE TABLE things (id int8 PRIMARY KEY, at timestamptz)")
    server.execute("INSERT INTO things VALUES (1, 'infinity')")
    lookup = PostgresLookup("things", key="id", columns={"id": "int8", "at": "timestamptz"})
    with pytest.raises(RecordError, match=r'lookup join "named" in table public.things: timestamp too large'):
        find(store_url, lookup, (1,))


def test_ended_session_is_worth_another_attempt(store_url: str, server: Connection) -> None:
    server.execute("CREATE TABLE things (id int8 PRIMARY KEY)")
    lookup = PostgresLookup("things", key="id", columns={"id": "int8"})
    keys = pa.record_batch({"id": pa.array([1])})
    with closing(lookup.create_reader(context(store_url))) as reader:
        assert reader.find(keys) == []
        end_lookups(server)
        with pytest.raises(DatabaseUnreachableError, match=r'lookup join "named" in table public.things'):
            reader.find(keys)


def end_lookups(server: Connection) -> int:
    ended = server.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
        " WHERE application_name LIKE 'etl:%lookup' AND datname = current_database()"
    ).fetchall()
    return len(ended)


CUSTOMERS = PostgresLookup("customers", key="id", columns={"id": "int8", "name": "text", "since": "date"})


def shop(orders: Path, lookup: PostgresLookup = CUSTOMERS, **changed: Any) -> Job:
    job = Job("shop", checkpoint=CheckpointPolicy(rows=4), restart=RestartPolicy(delay_s=0.01))
    source = CsvFiles(f"{orders}/*.csv", {"n": "int4", "customer": "int8"}, batch_rows=2)
    named = job.read("orders", source).lookup_join("named", lookup, on="customer", **changed)
    named.write("out", TwoPhaseCommitSink(PostgresTable("named", create=True)))
    return job


def run(url: str, job: Job, listen: Callable[[Event], None] = lambda _event: None) -> RunSummary:
    telemetry = Telemetry()
    telemetry.subscribe(listen)
    return run_job(job, Database(url, "store"), {}, RunOptions(warn=print), telemetry, StopSignal())


@pytest.fixture
def customers(server: Connection) -> None:
    server.execute("CREATE TABLE customers (id int8 PRIMARY KEY, name text NOT NULL, since date, other text)")
    server.execute("INSERT INTO customers VALUES (1, 'Ada', '2020-01-01'), (2, 'Bob', NULL)")


@pytest.mark.usefixtures("customers")
def test_rows_get_what_the_table_has_in_each_run(store_url: str, server: Connection, tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("n,customer\n" + "".join(f"{n},{n % 4 or ''}\n" for n in range(9)))
    assert run(store_url, shop(tmp_path)).exit_code == 0
    ada, bob = ("Ada", dt.date(2020, 1, 1)), ("Bob", None)
    names = {0: (None, None), 1: ada, 2: bob, 3: (None, None)}
    first = [(n, n % 4 or None, *names[n % 4]) for n in range(9)]
    assert server.execute("SELECT * FROM named ORDER BY n").fetchall() == first

    server.execute("UPDATE customers SET name = 'Eve' WHERE id = 1; INSERT INTO customers VALUES (3, 'Cyd')")
    (tmp_path / "2.csv").write_text("n,customer\n9,1\n10,3\n11,2\n")
    assert run(store_url, shop(tmp_path)).exit_code == 0
    second = [(9, 1, "Eve", dt.date(2020, 1, 1)), (10, 3, "Cyd", None), (11, 2, *bob)]
    assert server.execute("SELECT * FROM named ORDER BY n").fetchall() == [*first, *second]


@pytest.mark.usefixtures("customers")
def test_inner_lookup_leaves_out_what_is_not_there(store_url: str, server: Connection, tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("n,customer\n1,1\n2,7\n3,\n4,2\n")
    assert run(store_url, shop(tmp_path, how="inner")).exit_code == 0
    assert server.execute("SELECT n, name FROM named ORDER BY n").fetchall() == [(1, "Ada"), (4, "Bob")]


@pytest.mark.usefixtures("customers")
def test_session_that_is_cut_in_the_middle_costs_an_attempt_and_no_row(
    store_url: str, server: Connection, tmp_path: Path
) -> None:
    count = 200
    (tmp_path / "1.csv").write_text("n,customer\n" + "".join(f"{n},{n}\n" for n in range(count)))
    server.execute(f"INSERT INTO customers SELECT n, 'c' || n FROM generate_series(3, {count}) n".encode())
    ended: list[int] = []

    def cut(event: Event) -> None:
        if event.name == "checkpoint.completed" and not ended:
            ended.append(end_lookups(server))

    summary = run(store_url, shop(tmp_path), cut)
    assert (summary.exit_code, summary.restarts, ended) == (0, 1, [1])
    expected = [(0, None), (1, "Ada"), (2, "Bob"), *((n, f"c{n}") for n in range(3, count))]
    assert server.execute("SELECT n, name FROM named ORDER BY n").fetchall() == expected


def test_lookup_that_cannot_work_stops_the_run_before_it_starts(store_url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"table public.customers: it does not exist"):
        run(store_url, shop(tmp_path))


def test_table_may_lie_in_another_database_that_knows_nothing_of_jobs(
    store_url: str, database_url: str, server: Connection, tmp_path: Path
) -> None:
    with closing(psycopg.connect(database_url, autocommit=True)) as other:
        other.execute("CREATE TABLE customers (id int8 PRIMARY KEY, name text)")
        other.execute("INSERT INTO customers VALUES (1, 'Ada')")
    (tmp_path / "1.csv").write_text("n,customer\n1,1\n2,2\n")
    lookup = PostgresLookup("customers", key="id", columns={"id": "int8", "name": "text"}, database="crm")
    with pytest.raises(ConfigurationError, match='lookup join named: database "crm" is not configured'):
        run(store_url, shop(tmp_path, lookup))

    store, databases = Database(store_url, "store"), {"crm": Database(database_url, "crm")}
    job = shop(tmp_path, lookup)
    assert run_job(job, store, databases, RunOptions(warn=print), Telemetry(), StopSignal()).exit_code == 0
    assert server.execute("SELECT * FROM named ORDER BY n").fetchall() == [(1, 1, "Ada"), (2, 2, None)]
