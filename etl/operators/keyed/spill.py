"""Rows of state that lie on disk because memory is for others, found by the hashes of their keys.

They lie in **runs**, each sorted by hash and cut into pages; small runs are merged into larger ones, as in a
log-structured merge tree. In memory there are a few bytes a row: a filter that knows most keys that are not there, and
which rows were taken back.

What lies here is scratch: the state of record is in the store. The file, an SQLite database, has no name any more once
it is open, so nothing of it is left behind by any end of the process.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from etl.codec import decode_rows, encode_rows
from etl.errors import TransientError
from etl.key_group import KEY_GROUPS, Hashes, groups_of_hashes
from etl.operators.keyed.columns import Flags

PAGE_ROWS = 256
"""A look at one row reads so many."""

RUNS_MAX = 8
"""A key is looked for in no more runs than that."""

_MERGED = 4
_PART_ROWS = 65_536
_DEAD_SHARE_MAX = 0.5
_HASH = "hash"
_FILTER_BITS_A_ROW = 10
_FILTER_PROBES = 4


class SpilledRows:
    """Rows on disk.

    Args:
        schema: The columns of all rows.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema.append(pa.field(_HASH, pa.uint64()))
        self._runs: list[_Run] = []
        with _on_disk():
            self._file = _nameless_database()

    def __len__(self) -> int:
        return sum(run.live for run in self._runs)

    def write(self, hashes: Hashes, rows: pa.RecordBatch) -> None:
        """Take rows in.

        Args:
            hashes: Of their keys, ascending.
            rows: As many.
        """
        hashed = pa.RecordBatch.from_arrays([*rows.columns, pa.array(hashes)], schema=self._schema)
        self._runs.append(_Run(self._file, [hashed]))
        if len(self._runs) > RUNS_MAX:
            self._runs.sort(key=lambda run: run.live)
            self._merge(_MERGED)

    def take(self, hashes: Hashes) -> pa.RecordBatch | None:
        """Give back all rows of which the key has one of these hashes; None where there are none."""
        wanted = np.unique(hashes)
        taken = [rows for run in self._runs for rows in run.take(wanted)]
        if not taken:
            return None
        if len(self) < _DEAD_SHARE_MAX * sum(run.rows for run in self._runs):
            self._merge(len(self._runs))
        return self._without_hashes(self._together(taken))

    def of_group(self, key_group: int) -> pa.RecordBatch:
        """The rows of a key group; they stay here."""
        return self._without_hashes(self._sorted(self._runs, range(key_group, key_group + 1)))

    def close(self) -> None:
        """Give the space back."""
        self._file.close()

    def _merge(self, count: int) -> None:
        """Make one run of the first ones; some key groups at a time are in memory."""
        merged, self._runs = self._runs[:count], self._runs[count:]
        parts = min(KEY_GROUPS, 1 + sum(run.live for run in merged) // _PART_ROWS)
        groups = KEY_GROUPS // parts
        ranges = (range(first, min(first + groups, KEY_GROUPS)) for first in range(0, KEY_GROUPS, groups))
        self._runs.append(_Run(self._file, (self._sorted(merged, some) for some in ranges)))
        for run in merged:
            run.delete()

    def _sorted(self, runs: Iterable[_Run], key_groups: range) -> pa.RecordBatch:
        rows = self._together([rows for run in runs for rows in run.of_groups(key_groups)])
        return rows.take(pa.array(np.argsort(_hashes(rows), kind="stable")))

    def _together(self, rows: list[pa.RecordBatch]) -> pa.RecordBatch:
        return pa.concat_batches([pa.RecordBatch.from_pylist([], schema=self._schema), *rows])

    def _without_hashes(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(rows.columns[:-1], schema=pa.schema(list(self._schema)[:-1]))


class _Run:
    """Rows sorted by hash.

    Args:
        file: Where the pages go.
        parts: The rows, with their hashes in the last column; the parts follow one another in the order of hashes.

    Attributes:
        rows: How many were written.
        live: How many of them were not taken back.
    """

    def __init__(self, file: sqlite3.Connection, parts: Iterable[pa.RecordBatch]) -> None:
        self._file = file
        hashes: list[Hashes] = []
        firsts: list[int] = []
        begins: list[int] = []
        self.rows = 0
        with _on_disk():
            (self._page,) = file.execute("SELECT coalesce(max(number) + 1, 0) FROM page").fetchone()
            file.execute("BEGIN")
            for part in parts:
                of_part = _hashes(part)
                hashes.append(of_part)
                for rows in _pages(part):
                    file.execute("INSERT INTO page VALUES (?, ?)", (self._page + len(begins), encode_rows(rows)))
                    firsts.append(rows.column(_HASH)[0].as_py())
                    begins.append(self.rows)
                    self.rows += rows.num_rows
            file.execute("COMMIT")
        self.live = self.rows
        self._firsts: Hashes = np.array(firsts, dtype=np.uint64)
        self._begins = begins
        self._is_live: Flags = np.ones(self.rows, dtype=np.bool_)
        self._filter = _Filter(np.concatenate(hashes))

    def take(self, wanted: Hashes) -> Iterator[pa.RecordBatch]:
        """Give back the rows with these hashes, which are ascending and differ."""
        wanted = wanted[self._filter.may_have(wanted)]
        pages = np.searchsorted(self._firsts, wanted, side="right") - 1
        for page in np.unique(pages[pages >= 0]).tolist():
            rows, live = self._read(page)
            found = np.isin(_hashes(rows), wanted) & live
            if found.any():
                live[found] = False
                self.live -= int(found.sum())
                yield rows.filter(pa.array(found))

    def of_groups(self, key_groups: range) -> Iterator[pa.RecordBatch]:
        """The rows of neighbouring key groups, which stay."""
        begin, end = np.searchsorted(groups_of_hashes(self._firsts), [key_groups.start, key_groups.stop]).tolist()
        # The page before begins in a lower group and may reach into these.
        for page in range(max(0, begin - 1), end):
            rows, live = self._read(page)
            groups = groups_of_hashes(_hashes(rows))
            yield rows.filter(pa.array((groups >= key_groups.start) & (groups < key_groups.stop) & live))

    def delete(self) -> None:
        """Give the space back to other runs."""
        with _on_disk():
            last = self._page + len(self._begins)
            self._file.execute("DELETE FROM page WHERE number >= ? AND number < ?", (self._page, last))

    def _read(self, page: int) -> tuple[pa.RecordBatch, Flags]:
        """The rows of a page, and which of them are live: a view, to be changed in place."""
        with _on_disk():
            query = "SELECT content FROM page WHERE number = ?"
            (content,) = self._file.execute(query, [self._page + page]).fetchone()
        rows = decode_rows(content)
        return rows, self._is_live[self._begins[page] : self._begins[page] + rows.num_rows]


class _Filter:
    """A Bloom filter."""

    def __init__(self, hashes: Hashes) -> None:
        bits = 8
        while bits < _FILTER_BITS_A_ROW * len(hashes):
            bits *= 2
        self._mask = np.uint64(bits - 1)
        flags = np.zeros(bits, dtype=np.bool_)
        for places in self._probes(hashes):
            flags[places] = True
        self._bytes: npt.NDArray[np.uint8] = np.packbits(flags, bitorder="little")

    def may_have(self, hashes: Hashes) -> Flags:
        """False where a hash is certainly none of those."""
        found = np.ones(len(hashes), dtype=np.bool_)
        for places in self._probes(hashes):
            found &= (self._bytes[places >> 3] >> (places & 7).astype(np.uint8) & 1).astype(np.bool_)
        return found

    def _probes(self, hashes: Hashes) -> Iterator[npt.NDArray[np.int64]]:
        step = hashes >> np.uint64(32) | np.uint64(1)
        for number in range(_FILTER_PROBES):
            with np.errstate(over="ignore"):
                yield ((hashes + np.uint64(number) * step) & self._mask).astype(np.int64)


def _hashes(rows: pa.RecordBatch) -> Hashes:
    return np.asarray(rows.column(_HASH))


def _pages(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Rows in the order of their hashes, in pages; equal hashes are on one page."""
    hashes = _hashes(rows)
    begins = np.unique(np.searchsorted(hashes, hashes[::PAGE_ROWS], side="left"))
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(hashes)], strict=False):
        yield rows.slice(begin, end - begin)


def _nameless_database() -> sqlite3.Connection:
    handle, name = tempfile.mkstemp(prefix="etl-state-")
    os.close(handle)
    try:
        # Made in one thread and used in another one, never in both at once.
        connection = sqlite3.connect(name, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("CREATE TABLE page (number INTEGER PRIMARY KEY, content BLOB NOT NULL)")
    finally:
        Path(name).unlink()
    return connection


@contextmanager
def _on_disk() -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise TransientError(
            f"state beyond keys_in_memory cannot be kept in {tempfile.gettempdir()}: {error}; make room there, or set"
            " TMPDIR to another directory"
        ) from error
