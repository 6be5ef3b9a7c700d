from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from etl.errors import ConfigurationError, RecordError
from etl.source import Progress
from etl.sources import CsvFiles
from tests.unit.sources.conftest import Inbox

SCHEMA = {"id": "int4", "name": "text"}


def orders(**options: Any) -> CsvFiles:
    return CsvFiles("*.csv", SCHEMA, **options)


def refusal(inbox: Inbox, source: CsvFiles, *, follow: bool = False) -> str:
    with pytest.raises(RecordError) as caught:
        inbox.batches(source, follow=follow)
    assert caught.value.uid == "orders"
    assert caught.value.split == "orders.csv"
    return str(caught.value)


# --- declaration


def test_declaration_tells_all_findings_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        CsvFiles([""], {"a": "hstore"}, null=["", ","], timezone="Europe/Nowhere", batch_rows=0, block_bytes=True)
    subjects = [finding.subject for finding in caught.value.findings]
    assert subjects == ["pattern", "null", "batch_rows", "block_bytes", "timezone", 'column "a"']


@pytest.mark.parametrize("zone", ["/etc/localtime", "../zone", "Europe", "", "no\0zone"])
def test_zone_that_is_no_name_is_a_finding(zone: str) -> None:
    with pytest.raises(ConfigurationError, match="timezone: time zone"):
        CsvFiles("*.csv", SCHEMA, timezone=zone)


def test_description_names_the_patterns() -> None:
    assert CsvFiles(["a/*.csv", "b.csv"], SCHEMA).describe() == "CsvFiles('a/*.csv', 'b.csv')"


def test_preflight_finds_bad_headers_and_unreadable_files(inbox: Inbox) -> None:
    inbox.write(b"id,nam\n", "1.csv")
    inbox.write(b"name,id\n", "2.csv")
    inbox.write(b"", "3.csv")
    findings = orders().preflight(inbox.context())
    assert [str(finding) for finding in findings] == [
        '1.csv: the header does not fit the declared columns (missing: "name"; not declared: "nam"); '
        "correct the header, or the schema of CsvFiles"
    ]


# --- headers


@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf", b"\n\r\n"])
def test_header_is_matched_by_name(inbox: Inbox, prefix: bytes) -> None:
    inbox.write(prefix + b'name,"id"\nx,1\n')
    assert inbox.rows(orders()) == [(1, "x")]


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"id", 'missing: "name"'),
        (b"id,name,more", 'not declared: "more"'),
        (b"id,name,id", 'duplicate: "id"'),
        (b"id,name,,", "without a name: number 3, 4"),
        (b"ID,name", 'missing: "id"; not declared: "ID"'),
        (b"id, name", 'missing: "name"; not declared: " name"'),
    ],
)
def test_header_that_does_not_fit_is_refused(inbox: Inbox, header: bytes, problem: str) -> None:
    inbox.write(header + b"\n1,x\n")
    assert refusal(inbox, orders()) == (
        f"orders.csv: the header does not fit the declared columns ({problem}); "
        "correct the header, or the schema of CsvFiles"
    )


def test_header_that_is_not_utf8_is_refused(inbox: Inbox) -> None:
    inbox.write("id,name\n".encode("utf-16"))
    assert refusal(inbox, orders()) == "orders.csv: the header is not UTF-8; convert the file to UTF-8"


def test_header_longer_than_the_first_read_is_read(inbox: Inbox) -> None:
    schema = {f"{'c' * 50}{number}": "int2" for number in range(2000)}
    inbox.write(",".join(schema).encode() + b"\n" + b",".join([b"7"] * 2000) + b"\n")
    source = CsvFiles("*.csv", schema)
    assert inbox.rows(source) == [(7,) * 2000]
    inbox.append(b",".join([b"8"] * 2000) + b"\n")
    assert inbox.rows(source) == [(8,) * 2000]


@pytest.mark.parametrize("data", [b"", b"\n\n", b"id,name", b"id,name\n", b"id,name\n\n\r\n"])
def test_file_without_records_gives_no_rows(inbox: Inbox, data: bytes) -> None:
    inbox.write(data)
    assert inbox.rows(orders()) == []
    inbox.write(data if data.rstrip() else b"id,name")
    inbox.append(b"\n1,x\n")
    assert inbox.rows(orders()) == [(1, "x")]


# --- records


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_line_ends_are_lf_or_crlf(inbox: Inbox, line_end: bytes, last: bool) -> None:
    inbox.write(line_end.join([b"id,name", b"1,x", b"", b"2,y"]) + line_end * last)
    assert inbox.rows(orders()) == [(1, "x"), (2, "y")]


def test_quoted_field_keeps_line_ends_commas_and_quotes(inbox: Inbox) -> None:
    inbox.write(b'id,name\n1,"a\r\nb\rc\n,""d"""\n')
    assert inbox.rows(orders()) == [(1, 'a\r\nb\rc\n,"d"')]


def test_null_and_empty_string_differ(inbox: Inbox) -> None:
    inbox.write(b'id,name\n1,""\n2,\n3,NULL\n4,"NULL"\n,NA\n')
    assert inbox.rows(orders()) == [(1, ""), (2, None), (3, "NULL"), (4, "NULL"), (None, "NA")]


def test_null_spellings_replace_the_empty_field(inbox: Inbox) -> None:
    inbox.write(b'id,name\n1,""\n2,\n3,NULL\n4,"NULL"\nNA,NA\n')
    expected = [(1, ""), (2, ""), (3, None), (4, "NULL"), (None, None)]
    assert inbox.rows(orders(null=["NULL", "NA"])) == expected


def test_byte_order_mark_inside_a_file_is_data(inbox: Inbox) -> None:
    inbox.write("name,id\nx,1\n\ufeffy,2\n".encode())
    assert inbox.batches(orders(block_bytes=5)) == [[(1, "x")], [(2, "\ufeffy")]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b'1,x"y\n',
            ':3 byte 15 column "name": a quote stands inside an unquoted value; '
            "quote the value and double the quotes inside it",
        ),
        (b'1,"x"y\n', ':3 byte 17 column "name": text follows a closing quote; double quotes inside quoted values'),
        (
            b'1,"x\ny\n',
            ':3 byte 14 column "name": the quote that opens here is not closed within the 5 bytes that follow; '
            "close it, or double the quotes inside values",
        ),
        (
            b"1,x\r2,y\r",
            ':3 byte 15 column "name": a carriage return without line feed ends no record here; '
            "write line ends as LF or CRLF",
        ),
        (
            b"1\n",
            ':3 byte 12: the record has 1 field(s), the header has 2: nothing is left for "name"; '
            "add the missing fields",
        ),
        (
            b"1,x,z\n",
            ":3 byte 12: the record has 3 field(s), the header has 2: value 'z' belongs to no column; "
            "quote values that contain commas",
        ),
        (
            b"x,1\n",
            ":3 byte 12 column \"id\": value 'x' is not a valid int4: not a whole number in decimal digits; "
            "correct the value, or declare the column as text",
        ),
        (
            b"1,a\xffb\n",
            ":3 byte 14 column \"name\": value 'a\\xffb' is not a valid text: byte 1 of it (0xff) is not UTF-8; "
            "convert the file to UTF-8",
        ),
        (
            b"1,a\0\n",
            ":3 byte 14 column \"name\": value 'a\\x00' is not a valid text: it contains a NUL character, "
            "which PostgreSQL cannot hold; remove that character",
        ),
    ],
)
def test_bad_record_is_refused_at_its_place(inbox: Inbox, body: bytes, message: str) -> None:
    inbox.write(b"id,name\n7,w\n" + body)
    assert refusal(inbox, orders()) == f"orders.csv{message}"


def test_line_number_counts_line_ends_inside_quotes_and_blank_lines(inbox: Inbox) -> None:
    inbox.write(b'id,name\n1,"a\nb\n"\n\n2,"c\nd"\nx,"y"\n')
    assert refusal(inbox, orders()).startswith('orders.csv:8 byte 26 column "id": ')


def test_line_number_is_right_after_a_resume(inbox: Inbox) -> None:
    inbox.write(b'id,name\n1,"a\nb"\n\n2,y\n3,z\nx,w\n')
    assert inbox.batches(orders(batch_rows=2, block_bytes=14), stop_after=1) == [[(1, "a\nb"), (2, "y")]]
    assert refusal(inbox, orders()).startswith('orders.csv:7 byte 25 column "id": ')


def test_long_value_is_shortened_in_the_error(inbox: Inbox) -> None:
    inbox.write(b"id,name\n" + b"9" * 500 + b",x\n")
    assert f"value '{'9' * 80}… (500 characters)' is not" in refusal(inbox, orders())


def test_record_over_the_limit_is_refused(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etl.sources.csv_reader.RECORD_BYTES_MAX", 100)
    inbox.write(b"id,name\n1,x\n2," + b"y" * 97 + b"\n3," + b"z" * 98 + b"\n4,w\n")
    message = refusal(inbox, orders())
    where = "orders.csv:4 byte 112: the record that starts here is longer than 100 bytes"
    assert message == f"{where}; close its quotes, or make it shorter"
    assert refusal(inbox, orders(block_bytes=16)) == message


def test_quote_that_is_never_closed_stops_at_the_limit(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etl.sources.csv_reader.RECORD_BYTES_MAX", 100)
    inbox.write(b'id,name\n1,x\n2,"' + b"y,\n" * 1000)
    assert refusal(inbox, orders(block_bytes=16)).startswith(
        'orders.csv:3 byte 14 column "name": the quote that opens here is not closed'
    )


# --- batches, splits and progress


@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
def test_batches_have_exactly_batch_rows_except_the_last(inbox: Inbox, block_bytes: int) -> None:
    inbox.write(b"id,name\n" + b"".join(b"%d,x\n" % number for number in range(100)))
    sizes = [len(batch) for batch in inbox.batches(orders(batch_rows=3, block_bytes=block_bytes))]
    assert sizes == [3] * 33 + [1]


def test_files_are_read_in_natural_order(inbox: Inbox) -> None:
    for number in (10, 9, 1):
        inbox.write(b"id,name\n%d,x\n" % number, f"{number}.csv")
    assert inbox.rows(orders()) == [(1, "x"), (9, "x"), (10, "x")]
    assert sorted(inbox.known) == ["1.csv", "10.csv", "9.csv"]


def test_snapshot_holds_only_positions_that_moved(inbox: Inbox) -> None:
    inbox.write(b"id,name\n1,x\n2,y\n", "a.csv")
    inbox.write(b"id,name\n3,z\n", "b.csv")
    source = orders(batch_rows=1)
    reader = source.create_reader(inbox.context())
    reader.assign(source.create_enumerator(inbox.context()).discover({}))
    moved = []
    while reader.read_batch() is not None:
        moved.append({split: position["offset"] for split, position in reader.snapshot_positions().items()})
    moved.append(dict(reader.snapshot_positions()))
    reader.close()
    assert moved == [{"a.csv": 12}, {"a.csv": 16}, {"b.csv": 12}, {}]


def test_progress_counts_the_bytes_of_this_run(inbox: Inbox) -> None:
    inbox.write(b"id,name\n1,x\n2,y\n")
    source = orders(batch_rows=1)
    inbox.batches(source, stop_after=1)
    reader = source.create_reader(inbox.context())
    reader.assign(source.create_enumerator(inbox.context()).discover(inbox.known))
    before = reader.progress()
    assert reader.read_batch() is not None
    after = reader.progress()
    reader.close()
    assert (before, after) == (Progress(0, 4), Progress(4, 4))


def test_pattern_without_match_is_told_once(inbox: Inbox) -> None:
    enumerator = orders().create_enumerator(inbox.context())
    assert [enumerator.discover({}), enumerator.discover({})] == [[], []]
    assert inbox.warnings == [f"*.csv: no file matches in {inbox.directory}; nothing is read"]


def test_reader_goes_on_from_what_it_returned_when_assigned_an_older_position(inbox: Inbox) -> None:
    inbox.write(b"id,name\n1,x\n")
    source = orders()
    reader = source.create_reader(inbox.context(follow=True))
    enumerator = source.create_enumerator(inbox.context(follow=True))
    reader.assign(enumerator.discover({}))
    first = reader.read_batch()
    assert reader.read_batch() is None
    inbox.append(b"2,y\n")
    reader.assign(enumerator.discover({}))
    second = reader.read_batch()
    reader.close()
    assert first is not None
    assert second is not None
    assert first.to_pylist() + second.to_pylist() == [{"id": 1, "name": "x"}, {"id": 2, "name": "y"}]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_found_before_the_run(inbox: Inbox) -> None:
    inbox.write(b"id,name\n")
    (inbox.directory / "orders.csv").chmod(0)
    findings = orders().preflight(inbox.context())
    assert [finding.problem for finding in findings] == ["the file cannot be read (Permission denied)"]


# --- values (the rules themselves are compared with PostgreSQL and with the fast path in tests/property)


def test_spellings_that_arrow_does_not_know_are_converted_by_the_rules(inbox: Inbox) -> None:
    inbox.write(b"n,d,b,t\n+1,1.500,tR,2024-01-02 03:04:05.6780000Z\n2,2.25,Yes,2024-01-02 03:04 UTC\n")
    source = CsvFiles("*.csv", {"n": "int2", "d": "numeric(6,2)", "b": "bool", "t": "timestamptz"})
    rows = [(n, d, b, t.isoformat()) for n, d, b, t in inbox.rows(source)]
    assert rows == [
        (1, Decimal("1.50"), True, "2024-01-02T03:04:05.678000+00:00"),
        (2, Decimal("2.25"), True, "2024-01-02T03:04:00+00:00"),
    ]


def test_letter_x_elsewhere_does_not_harm_integers(inbox: Inbox) -> None:
    inbox.write(b"id,name\n-1,x\n 2,0x1f\n00501,X\n,x\n")
    assert inbox.rows(orders()) == [(-1, "x"), (2, "0x1f"), (501, "X"), (None, "x")]


@pytest.mark.parametrize(
    ("text", "reason"), [("2024-10-27 02:30", "ambiguous"), ("2024-03-31 02:30", "does not exist")]
)
def test_local_time_without_one_instant_is_refused(inbox: Inbox, text: str, reason: str) -> None:
    inbox.write(f"at\n2024-07-01 12:00\n{text}\n".encode())
    source = CsvFiles("*.csv", {"at": "timestamptz"}, timezone="Europe/Berlin")
    assert reason in refusal(inbox, source)


def test_local_times_beside_a_change_of_the_clocks_are_exact(inbox: Inbox) -> None:
    instants = {
        "2024-10-27 01:59:59": "2024-10-26 23:59:59",
        "2024-10-27 03:00": "2024-10-27 02:00:00",
        "2024-10-27 02:30+02": "2024-10-27 00:30:00",
        "2024-01-01": "2023-12-31 23:00:00",
        "": None,
        "2400-07-01 12:00": "2400-07-01 10:00:00",
        "1950-01-01 00:00": "1949-12-31 23:00:00",
    }
    inbox.write("\n".join(["at,n", *[f"{text},1" for text in instants], ""]).encode())
    source = CsvFiles("*.csv", {"at": "timestamptz", "n": "int2"}, timezone="Europe/Berlin")
    found = [None if at is None else f"{at:%Y-%m-%d %H:%M:%S}" for at, _ in inbox.rows(source)]
    assert found == list(instants.values())


def test_table_with_every_type_is_read(inbox: Inbox) -> None:
    uuid = "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"
    inbox.write(f'u,j,y,a,t,v\n{uuid},"{{""a"": 1}}",\\xDEad,"{{1,NULL,""a b""}}",23:59:59.5,éé\n,,,,,\n'.encode())
    source = CsvFiles("*.csv", {"u": "uuid", "j": "jsonb", "y": "bytea", "a": "text[]", "t": "time", "v": "varchar(2)"})
    first, second = inbox.rows(source)
    assert first[:4] == (uuid.lower(), '{"a": 1}', b"\xde\xad", ["1", None, "a b"])
    assert (first[4].isoformat(), first[5]) == ("23:59:59.500000", "éé")
    assert second == (None,) * 6


def test_relative_pattern_is_resolved_against_the_base_directory(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox.write(b"id,name\n1,x\n")
    monkeypatch.chdir(Path("/"))
    assert inbox.rows(orders()) == [(1, "x")]
