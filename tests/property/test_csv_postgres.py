"""Whatever the rules accept means the same to PostgreSQL."""

from __future__ import annotations

import itertools
import re
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg
import pytest

from etl.schema import PostgresType
from etl.sources.csv_invalid import InvalidValueError
from etl.sources.csv_values import converter_of
from etl.sources.local_time import LocalTimes
from tests.property.test_csv_values import (
    ARRAYS,
    BOOLEANS,
    BYTES,
    CLOCKS,
    DAYS,
    JSONS,
    NUMBERS,
    ODD_ZONES,
    TYPES,
    UUIDS,
    ZONES,
)

BERLIN = LocalTimes("Europe/Berlin")
TIMESTAMPS = [
    f"{day} {clock}{zone}" for day, clock, zone in itertools.product(DAYS, CLOCKS[:12], ["", "Z", "+02", "-02:30"])
]
OFFSETS = [f"2024-01-02 12:34:56{zone}" for zone in ZONES + ODD_ZONES]
PADDED = [" 1", "1\t", " true ", " 2024-01-02 ", " 12:34 ", " 2024-01-02 12:34Z "]
VALUES = [*NUMBERS, *DAYS, *CLOCKS, *TIMESTAMPS, *OFFSETS, *BOOLEANS, *UUIDS, *BYTES, *JSONS, *ARRAYS, *PADDED]

HOUR_ONLY = re.compile(r".* [0-9]{2}( ?[Z+-].*)?")
FAR_OFFSETS = ("+16:00", "+23:59")


def is_refused_by_postgres_only(text: str) -> bool:
    """PostgreSQL does not know an hour alone, nor offsets of 16 hours and more; both are without doubt."""
    return HOUR_ONLY.fullmatch(text) is not None or text.endswith(FAR_OFFSETS)


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    return str(value) if isinstance(value, UUID) else value


@pytest.mark.parametrize("name", TYPES)
def test_accepted_value_is_the_same_to_postgres(connection: psycopg.Connection[Any], name: str) -> None:
    connection.execute("SET timezone = 'Europe/Berlin'")
    convert = converter_of(PostgresType.parse(name), BERLIN)
    accepted = 0
    for text in VALUES:
        try:
            value = convert(text)
        except InvalidValueError:
            continue
        if "timestamp" in name and is_refused_by_postgres_only(text):
            continue
        accepted += 1
        # Shown as float8, a float4 keeps all its digits.
        row = connection.execute(f"SELECT (%s::text)::{name}{'::float8' * (name == 'float4')}", [text]).fetchone()
        assert row is not None
        if name not in {"json", "jsonb"}:
            assert repr(plain(row[0])) == repr(value) or plain(row[0]) == value, text
    assert accepted > 0
