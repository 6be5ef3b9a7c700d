"""The vectorised conversion accepts nothing that the rules refuse, and yields the same values."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.schema import Schema
from etl.sources.csv_diagnosis import BlockPlace, Diagnosis
from etl.sources.csv_invalid import InvalidValueError
from etl.sources.csv_parser import CsvParser, CsvRules, UnreadableBlockError
from etl.sources.csv_values import converter_of
from etl.sources.local_time import LocalTimes

BERLIN = LocalTimes("Europe/Berlin")
PLACE = BlockPlace("orders", "orders.csv", 0, 1)
Cell = tuple[str, bool]


def words(text: str) -> list[str]:
    return text.split()


NUMBERS = words("""
    0 1 -1 +1 -0 00501 0x1f 0X1F -0x1 0x x 1e3 1E3 1e-2 1e-3 100e-2 1e10 1e400 1e-400 -1e400 1e39 1e-50 5. .5 -.5 +.5
    . - + e5 1e 1_000 NaN nan -nan nan(x) inf -inf +Infinity infinity 1.0 1.5 1.50 1.500 1.505 0.000 12345 9999.99 10000
    99999 123456 1,5 1d 32767 32768 -32768 -32769 2147483647 2147483648 9223372036854775807 9223372036854775808
    -9223372036854775808 16777217 1.7976931348623157e308 1.7976931348623159e308 4.9e-324 2e-324 0e400 0.0e-999 1e27 1e28
    99999999999999999999999999999999999999 000000000001.5 0.00000000000000000000000000000000000000000000001
    00000000000000000000000000000000000000000000001
""")
DAYS = words("""
    2024-01-02 2024-1-2 2024-02-30 2024-02-29 2023-02-29 0000-01-01 0001-01-01 9999-12-31 10000-01-01 -0001-01-01
    20240102 2024/01/02 02/01/2024 infinity -infinity epoch now 2024-03-31 2024-10-27 1893-03-31 2150-07-01
""")
CLOCKS = words("""
    00 12 24 00:00 12:34 12:60 24:00:00 00:00:00 12:34:56 12:34:60 12:34:56. 12:34:56.5 12:34:56.123456 12:34:56.1234567
    02:30 02:30:00 12:34:56.1234560 23:59:59.999999 1:2:3 123456 1234 12:34:56,5
""")
ZONES = [
    "",
    "Z",
    "z",
    "+02",
    "+2",
    "-02",
    "+02:00",
    "+0200",
    "+02:30",
    "+15:59",
    "+16:00",
    "+23:59",
    "+24:00",
    "+02:60",
]
ODD_ZONES = ["+02:00:00", " +02", " UTC", "UTC", " Europe/Berlin", " BC"]
BOOLEANS = ["t", "f", "T", "tRue", "TRUE", "True", "false", "fa", "yes", "No", "on", "off", "of", "o", "y", "n", "ON"]
UUID = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
UUIDS = [UUID, UUID.upper(), UUID.replace("-", ""), f"{{{UUID}}}", UUID[:-1], UUID + "1"]
BYTES = ["\\x", "\\x0g", "\\x00fF", "\\X00", "\\x0", "\\x 00", "00"]
JSONS = ["{}", "null", '"a"', '{"a":1}', "[1,]", '"\\u0000"', '"\\ud800"', '"\\ud83d\\ude00"', "1e99999", "[NaN]", "01"]
ARRAYS = ["{1,NULL}", "{1, 2}", "{ }", "{1,}", "{a, }", "{a b}", '{"a","b\\"c"}', "{{1}}", "{1}x", "{1.505}", "{1.5,x}"]
TEXTS = [
    "",
    " ",
    "\t",
    "é",
    "ééé",
    "日本語x",
    "\ufeff1",
    "\u00a01",
    "1\x0b",
    "a b",
    "a\nb",
    "a\r\nb",
    'a"b',
    "NULL",
    "null",
    "x",
]

timestamps = st.builds(
    lambda day, gap, clock, zone: day + gap + clock + zone,
    st.sampled_from(DAYS),
    st.sampled_from([" ", "T", "t", "  "]),
    st.sampled_from(CLOCKS),
    st.sampled_from(ZONES + ODD_ZONES),
)
values = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(DAYS),
    st.sampled_from(CLOCKS),
    timestamps,
    st.sampled_from(BOOLEANS + UUIDS + BYTES + JSONS + ARRAYS + TEXTS),
    st.text(st.sampled_from("0123456789+-.eExX:T Z{},\\"), max_size=12),
)
blanks = st.sampled_from(["", "", "", " ", "\t"])
cells = st.tuples(st.builds(lambda left, text, right: left + text + right, blanks, values, blanks), st.booleans())

TYPES = [
    *(
        "int2",
        "int4",
        "int8",
        "float4",
        "float8",
        "numeric(6,2)",
        "numeric(38,10)",
        "numeric(5,0)",
        "bool",
        "text",
        "varchar(3)",
    ),
    *("date", "time", "timestamp", "timestamptz", "uuid", "bytea", "json", "jsonb"),
    *("int4[]", "text[]", "numeric(6,2)[]", "timestamptz[]", "bool[]"),
]


def written(cell: Cell) -> str:
    text, quoted = cell
    if quoted or any(character in text for character in ',"\r\n'):
        doubled = text.replace('"', '""')
        return f'"{doubled}"'
    return text


def ruled(cell: Cell, type_: str, nulls: tuple[str, ...], zone: LocalTimes | None) -> Any:
    if not written(cell).startswith('"') and cell[0] in nulls:
        return None
    return converter_of(Schema.declare({"c": type_})["c"], zone)(cell[0])


def same_bits(left: pa.Array, right: pa.Array) -> bool:
    if not pa.types.is_floating(left.type):
        return bool(left.type == right.type and left.to_pylist() == right.to_pylist())
    as_bytes = [
        [value if value is None else struct.pack("d", value) for value in side.to_pylist()] for side in (left, right)
    ]
    return as_bytes[0] == as_bytes[1]


def assert_agreement(column: list[Cell], type_: str, nulls: tuple[str, ...], zone: LocalTimes | None, gap: str) -> None:
    rules = CsvRules(Schema.declare({"c": type_, "row": "int4"}), nulls, zone)
    block = gap.join(f"{written(cell)},{number}7\n" for number, cell in enumerate(column)).encode()
    error = Diagnosis(rules, ["c", "row"]).find(block, PLACE, final=True)
    try:
        expected = pa.array([ruled(cell, type_, nulls, zone) for cell in column], rules.schema["c"].arrow)
    except InvalidValueError:
        expected = None
    try:
        parsed = CsvParser(rules, ["c", "row"]).parse(block)
    except UnreadableBlockError:
        assert expected is None, column
        assert error is not None
        return
    assert expected is not None, column
    assert error is None
    assert same_bits(parsed.rows.column(0), expected), column
    assert parsed.lines == block.count(b"\n")


# One value a block: in a block of several, one that both refuse would hide what becomes of the others.
EVERY_TEXT = [
    *(NUMBERS + DAYS + CLOCKS + BOOLEANS + UUIDS + BYTES + JSONS + ARRAYS + TEXTS),
    *(f"{day} 12:34:56{zone}" for day in DAYS for zone in ("", "Z", "+02")),
    *(f"2024-01-02{gap}{clock}{zone}" for clock in CLOCKS for gap in (" ", "T", "t", "  ") for zone in ("", "+02:00")),
    *(f"2024-01-02 12:34:56{zone}" for zone in ZONES + ODD_ZONES),
    *(f"{day} 02:30" for day in DAYS),
    *("0001-01-01 00:00+00", "0001-01-01 00:00+02", "9999-12-31 23:59:59.999999Z", "9999-12-31 23:59-10"),
]
PADS = [("", ""), (" ", "\t")]


@pytest.mark.parametrize(
    ("type_", "zone"), [*((type_, None) for type_ in TYPES), ("timestamptz", BERLIN), ("timestamptz[]", BERLIN)]
)
def test_fast_conversion_of_each_text_agrees_with_the_rules(type_: str, zone: LocalTimes | None) -> None:
    for text in EVERY_TEXT:
        for left, right in PADS:
            assert_agreement([(left + text + right, False)], type_, ("",), zone, "")


@pytest.mark.parametrize("type_", TYPES)
@settings(max_examples=100, deadline=None)
@given(
    column=st.lists(cells, min_size=1, max_size=4),
    nulls=st.sampled_from([("",), ("", "NULL"), ("NULL",), ("1", "t")]),
    zone=st.sampled_from([None, BERLIN]),
    blank_lines=st.booleans(),
)
def test_fast_conversion_agrees_with_the_rules(
    type_: str, column: list[Cell], nulls: tuple[str, ...], zone: LocalTimes | None, blank_lines: bool
) -> None:
    assert_agreement(column, type_, nulls, zone, "\n" * blank_lines)


@settings(max_examples=500, deadline=None)
@given(
    column=st.lists(cells, min_size=1, max_size=4),
    nulls=st.sampled_from([("",), ("NULL",), ("0",)]),
    type_=st.sampled_from(["int4", "text"]),
)
def test_blank_line_of_one_column_is_a_record(column: list[Cell], nulls: tuple[str, ...], type_: str) -> None:
    rules = CsvRules(Schema.declare({"c": type_}), nulls, None)
    block = "".join(f"{written(cell)}\n" for cell in column).encode()
    try:
        expected = [ruled(cell, type_, nulls, None) for cell in column]
    except InvalidValueError:
        with pytest.raises(UnreadableBlockError):
            CsvParser(rules, ["c"]).parse(block)
    else:
        assert CsvParser(rules, ["c"]).parse(block).rows.column(0).to_pylist() == expected
