from __future__ import annotations

import pytest

from sinks import UnitId


def test_unit_id_is_read_back() -> None:
    unit = UnitId("c0ffee", 3, 7, 1, 0)
    assert str(unit) == "etl:c0ffee:3:7:1:0"
    assert UnitId.parse(str(unit)) == unit


@pytest.mark.parametrize("text", ["", "etl", "etl:job:1:2:3", "etl:job:1:2:3:x", "other:job:1:2:3:4", "etl:j:1:2:3:-4"])
def test_foreign_id_is_not_taken_for_a_unit(text: str) -> None:
    assert UnitId.parse(text) is None


def test_longest_unit_id_fits_into_a_gid() -> None:
    assert len(str(UnitId("f" * 16, 2**63 - 1, 2**63 - 1, 2**31 - 1, 2**31 - 1))) <= 199
