"""Files that are read in parts: every row once, and every position and line where it is, whatever the cuts."""

from __future__ import annotations

import csv
import io
import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import RecordError
from etl.runtime.split_assigner import ReadUpTo, SplitAssigner
from etl.source import Position, SourceContext, SourceReader
from etl.sources import CsvFiles
from etl.sources.csv_ranges import file_and_begin

SCHEMA = {"id": "int8", "note": "text"}
NOTES = ["", "x", "a,b", 'say "x"', "two\nlines", '"\n,"\n', "\r\n", "long " * 9]


def encoded(ids: range, chance: random.Random, line_end: str = "\n") -> bytes:
    output = io.StringIO()
    csv.writer(output, lineterminator=line_end).writerows([id_, chance.choice(NOTES)] for id_ in ids)
    return output.getvalue().encode()


class Readers:
    """Several readers of one source, that come to barriers and ask for more in any order."""

    def __init__(self, source: CsvFiles, context: SourceContext, known: dict[str, Position], count: int) -> None:
        self.ids: list[int] = []
        self.known = known
        self._assigner = SplitAssigner(source.create_enumerator(context), known, count, follow=context.follow)
        self.readers = [source.create_reader(context) for _ in range(count)]
        self._read: list[dict[str, Position]] = [{} for _ in range(count)]

    def read_out(self, number: int) -> None:
        """Have one read until there is nothing for it."""
        while self.step(number):
            pass

    def step(self, number: int) -> bool:
        """Whether there was anything to do."""
        reader = self.readers[number]
        batch = reader.read_batch()
        if batch is not None:
            self.ids += batch["id"].to_pylist()
            return True
        self._collect(number, reader)
        splits = self._assigner.take(number, {one: ReadUpTo(at) for one, at in self._read[number].items()})
        self._read[number] = {}
        if splits:
            reader.assign(splits)
        return bool(splits)

    def barrier(self) -> None:
        for number, reader in enumerate(self.readers):
            self._collect(number, reader)
            self._assigner.passed_barrier(number)

    def close(self) -> None:
        for reader in self.readers:
            reader.close()

    def _collect(self, number: int, reader: SourceReader) -> None:
        moved = json.loads(json.dumps(reader.snapshot_positions()))
        self.known.update(moved)
        self._read[number].update(moved)


def check_positions(data: bytes, known: dict[str, Position]) -> None:
    for split_id, position in known.items():
        _, begin = file_and_begin(split_id)
        assert begin <= position["offset"] <= position.get("end", len(data))
        assert position["line"] == 1 + data.count(b"\n", 0, position["offset"])


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_every_row_comes_once_however_a_file_is_cut(chance: random.Random, line_end: str, follow: bool) -> None:
    """Over growth, barriers, restarts, and changes of the number of readers and of the size of parts."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.csv"
        head = chance.choice([b"", b"\xef\xbb\xbf", b"\n\n"])
        total = chance.randrange(0, 60)
        path.write_bytes(head + b"id,note" + line_end.encode() + encoded(range(total), chance, line_end))
        known: dict[str, Position] = {}
        ids: list[int] = []
        for last in [False] * chance.randrange(0, 4) + [True]:
            size: Any = chance.choice([None, 1, 10, 40, 100, 300])
            source = CsvFiles("*.csv", SCHEMA, batch_rows=chance.choice([1, 3, 100]), block_bytes=64, split_bytes=size)
            context = SourceContext("src", Path(name), follow and not last)
            readers = Readers(source, context, known, chance.randrange(1, 4))
            with closing(readers):
                for _ in range(chance.randrange(0, 40)):
                    readers.step(chance.randrange(len(readers.readers)))
                    if chance.random() < 0.1:
                        readers.barrier()
                    if chance.random() < 0.1 and not last:
                        more = chance.randrange(1, 20)
                        with path.open("ab") as file:
                            file.write(encoded(range(total, total + more), chance, line_end))
                        total += more
                if last:
                    for number in range(len(readers.readers)):
                        readers.read_out(number)
                readers.barrier()
            check_positions(path.read_bytes(), known)
            ids += readers.ids
            assert len(set(ids)) == len(ids)
        assert sorted(ids) == list(range(total))


def read_all(directory: Path, source: CsvFiles) -> list[int]:
    readers = Readers(source, SourceContext("src", directory), {}, 1)
    try:
        readers.read_out(0)
    finally:
        readers.close()
    return readers.ids


@pytest.mark.parametrize("size", [1, 30, 200, None])
def test_errors_name_the_same_line_and_byte_in_any_part(tmp_path: Path, size: int | None) -> None:
    rows = b"".join(b'%d,"two\nlines"\n' % number for number in range(30))
    data = b"id,note\n" + rows + b"31,x\nbad,y\n32,z\n" + rows
    (tmp_path / "a.csv").write_bytes(data)
    byte = data.index(b"bad")
    with pytest.raises(RecordError, match=rf"^a\.csv:63 byte {byte} column \"id\": "):
        read_all(tmp_path, CsvFiles("*.csv", SCHEMA, split_bytes=size))


@pytest.mark.parametrize("broken", [b'5,x"y\n', b'6,"x"y\n', b"7,a\0b\n", b"8,a\rb\n"])
def test_nothing_is_cut_behind_what_is_no_csv(tmp_path: Path, broken: bytes) -> None:
    """Quotes behind it could mean anything, so nothing of what follows may be read before it is refused."""
    before, behind = b"".join(b"%d,x\n" % n for n in range(50)), b'9,"a\nb"\n' * 50
    (tmp_path / "a.csv").write_bytes(b"id,note\n" + before + broken + behind)
    source = CsvFiles("*.csv", SCHEMA, split_bytes=20)
    splits: Sequence[Any] = source.create_enumerator(SourceContext("src", tmp_path)).discover({})
    assert all(file_and_begin(split.id)[1] < 8 + len(before) for split in splits)
    with pytest.raises(RecordError, match=r"^a\.csv:52 byte "):
        read_all(tmp_path, source)
