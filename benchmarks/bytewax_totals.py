"""Sum and count by key by Bytewax, written to the table at the end; ``argv`` is the file and perhaps a directory.

With a directory for its recovery store it takes a snapshot every second, otherwise none. It is run by an interpreter
that has Bytewax and psycopg; the database comes from ETL_DATABASE_URL.

Tried and slower: a running total after each row, with the last one of each key kept in the sink.
"""

import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import psycopg

_LINES = 10_000
"""Lines that the source reads at once."""

_HEADER = "key,amount"

_Sum = tuple[Decimal, int]


def _parsed(lines: list[str]) -> list[tuple[str, Decimal]]:
    pairs = (line.partition(",") for line in lines if line != _HEADER)
    return [(key, Decimal(amount)) for key, _, amount in pairs]


def _nothing() -> _Sum:
    return Decimal("0.00"), 0


def _plus(before: _Sum, amount: Decimal) -> _Sum:
    total, rows = before
    return total + amount, rows + 1


def _totals(csv: str, recovery_dir: str | None) -> list[tuple[str, _Sum]]:
    # Imported here: nothing but the measured child has it.
    from bytewax import operators  # type: ignore[import-not-found]
    from bytewax.connectors.files import FileSource  # type: ignore[import-not-found]
    from bytewax.dataflow import Dataflow  # type: ignore[import-not-found]
    from bytewax.recovery import RecoveryConfig, init_db_dir  # type: ignore[import-not-found]
    from bytewax.testing import TestingSink, run_main  # type: ignore[import-not-found]

    found: list[tuple[str, _Sum]] = []
    flow = Dataflow("totals")
    lines = operators.input("lines", flow, FileSource(csv, batch_size=_LINES))
    rows = operators.flat_map_batch("rows", lines, _parsed)
    totals = operators.fold_final("totals", rows, _nothing, _plus)
    operators.output("found", totals, TestingSink(found))
    options: dict[str, Any] = {}
    if recovery_dir is not None:
        init_db_dir(recovery_dir, 1)
        options = {"recovery_config": RecoveryConfig(recovery_dir), "epoch_interval": timedelta(seconds=1)}
    run_main(flow, **options)
    return found


def _write(totals: Iterable[tuple[str, _Sum]]) -> None:
    with (
        psycopg.connect(os.environ["ETL_DATABASE_URL"]) as connection,
        connection.cursor().copy("COPY totals (key, total, rows) FROM STDIN") as copy,
    ):
        for key, (total, rows) in totals:
            copy.write_row((key, total, rows))


def _main(csv: str, recovery_dir: str | None = None) -> None:
    _write(_totals(csv, recovery_dir))


if __name__ == "__main__":
    _main(*sys.argv[1:])
