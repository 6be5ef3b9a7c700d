"""Random files that grow: every way of writing a row that the format allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tests.faults.described import COLUMNS
from tests.soak.plan import Growth

NOTES = (
    None,
    "",
    "x",
    "plain",
    "a, b",
    'he said "no"',
    "two\nlines",
    "three\r\nlines\n",
    "  blanks  ",
    "tab\there",
    "back\\slash \\N \\.",
    "NULL",
    "Žluťoučký kůň 😀",
    "é" * 70,
)
KEYS_OF_A_SOURCE = 1000
KEYS_OF_A_FILE = 7


@dataclass(slots=True)
class _File:
    """How a file is written.

    Attributes:
        name: Its split.
        columns: In the order of its header.
        line_end: Of every line.
        open_end: Whether its last line lacks the line end.
        keys: Its smallest key.
    """

    name: str
    columns: list[str]
    line_end: str
    keys: int
    open_end: bool = False


class Writer:
    """Makes up the files of one source.

    The rows of one key come from one source, and there in an order that does not depend on where runs were
    interrupted: either only the last file grows, or no key is in two files.

    Args:
        source: Its uid and directory.
        place: Its number among the sources.
        random: Decides everything.
    """

    def __init__(self, source: str, place: int, random: Random) -> None:
        self.source = source
        self._place = place
        self._random = random
        self._files: list[_File] = []
        self._grows_anywhere = random.random() < 0.5
        self._count = 0

    def grow(self) -> Iterator[Growth]:
        """Rows at the end of files, and new files."""
        if not self._files:
            for _ in range(self._random.choice((1, 1, 2, 3))):
                yield self._new_file()
            return
        growing = [*self._files] if self._grows_anywhere else self._files[-1:]
        for file in growing:
            if self._random.random() < 0.5:
                yield self._grown(file, "")
        if self._random.random() < 0.3:
            yield self._new_file()

    def _new_file(self) -> Growth:
        random, number = self._random, len(self._files) + 1
        columns = list(COLUMNS)
        if random.random() < 0.3:
            random.shuffle(columns)
        keys = KEYS_OF_A_SOURCE * self._place + (KEYS_OF_A_FILE * number if self._grows_anywhere else 0)
        # Two digits where it matters: "10.csv" comes after "9.csv", not before.
        file = _File(f"{self.source}/{8 + number}.csv", columns, random.choice(("\n", "\n", "\n", "\r\n")), keys)
        self._files.append(file)
        mark = "\ufeff" if random.random() < 0.1 else ""
        return self._grown(file, f"{mark}{','.join(columns)}{file.line_end}")

    def _grown(self, file: _File, before: str) -> Growth:
        random = self._random
        rows = [self._row(file) for _ in range(random.choice((0, 1, 2, 3, 4, 5, 6, 8, 11, 15)))]
        text = "".join(f"{file.line_end if random.random() < 0.03 else ''}{row}{file.line_end}" for row in rows)
        if file.open_end:
            text = file.line_end + text
        file.open_end = bool(rows) and random.random() < 0.15
        if file.open_end:
            text = text.removesuffix(file.line_end)
        return Growth(file.name, before + text, len(rows))

    def _row(self, file: _File) -> str:
        random = self._random
        self._count += 1
        number = 3 * self._count + self._place
        values = {
            "id": str(number),
            "key": str(file.keys + random.randrange(KEYS_OF_A_FILE)),
            # No two rows share one, and a later row may well have a lower one.
            "version": str(random.randrange(100) * 100_000 + number),
            "amount": str(random.randint(-1000, 1000)),
            "price": f"{random.randint(-10_000, 10_000) / 100:.2f}",
            "note": _encoded(random.choice(NOTES)),
        }
        return ",".join(values[column] for column in file.columns)


def _encoded(note: str | None) -> str:
    if note is None:
        return ""
    if not note or any(mark in note for mark in ',"\r\n'):
        return '"' + note.replace('"', '""') + '"'
    return note
