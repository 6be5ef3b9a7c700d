"""Stored state as it is decoded; what needs a database is in tests/integration/runtime/test_state.py."""

from __future__ import annotations

import pyarrow as pa
import pytest

from etl.codec import FORMAT, encode_rows
from etl.errors import StateError
from etl.state import StateChunk
from etl.store.state import _fragments, _Stored


def stored(key_group: int, content: bytes) -> _Stored:
    return _Stored(StateChunk("totals", key_group, 0, 1, content, b""), 7)


def test_chunks_come_out_in_their_order() -> None:
    rows = [pa.record_batch({"x": [number]}) for number in range(40)]
    found = list(_fragments([stored(number, encode_rows(one)) for number, one in enumerate(rows)]))
    assert [one.key_group for one in found] == list(range(40))
    assert [one.rows for one in found] == rows


def test_chunk_that_cannot_be_read_is_named_among_others() -> None:
    content = encode_rows(pa.record_batch({"x": [1]}))
    newer = content[:4] + bytes([FORMAT + 1]) + content[5:]
    chunks = [stored(number, newer if number == 20 else content) for number in range(40)]
    with pytest.raises(
        StateError, match=f'operator "totals", key group 20, checkpoint 7: its format is {FORMAT + 1}, this version'
    ):
        list(_fragments(chunks))
