"""A directory of CSV files, and runs over it that remember their positions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from etl.source import Position, SourceContext
from etl.sources import CsvFiles

Row = tuple[Any, ...]


@dataclass
class Inbox:
    """Files below a directory, and the positions of the last completed checkpoint."""

    directory: Path
    known: dict[str, Position] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def write(self, data: bytes, name: str = "orders.csv") -> None:
        (self.directory / name).write_bytes(data)

    def append(self, data: bytes, name: str = "orders.csv") -> None:
        with (self.directory / name).open("ab") as file:
            file.write(data)

    def context(self, *, follow: bool = False) -> SourceContext:
        return SourceContext("orders", self.directory, follow, self.warnings.append)

    def pending(self, source: CsvFiles, *, follow: bool = False) -> list[str]:
        return [split.id for split in source.create_enumerator(self.context(follow=follow)).discover(self.known)]

    def batches(self, source: CsvFiles, *, follow: bool = False, stop_after: int = 1_000_000) -> list[list[Row]]:
        """Run from the known positions on; remember the new ones as a store would."""
        context = self.context(follow=follow)
        reader = source.create_reader(context)
        batches: list[list[Row]] = []
        try:
            reader.assign(source.create_enumerator(context).discover(self.known))
            while len(batches) < stop_after and (batch := reader.read_batch()) is not None:
                assert batch.schema == source.schema.to_arrow()
                batch.validate(full=True)
                batches.append([tuple(row.values()) for row in batch.to_pylist()])
            self.remember(reader.snapshot_positions())
        finally:
            reader.close()
        return batches

    def remember(self, positions: Mapping[str, Position]) -> None:
        self.known.update(json.loads(json.dumps(positions)))

    def rows(self, source: CsvFiles, *, follow: bool = False) -> list[Row]:
        return [row for batch in self.batches(source, follow=follow) for row in batch]


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    return Inbox(tmp_path)
