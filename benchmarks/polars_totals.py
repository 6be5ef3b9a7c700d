"""Sum and count by key over a whole file in memory, by polars alone; ``argv`` is the file.

Prints the number of keys, the sum of all totals and that of all counts: what was computed, to be compared.
"""

import sys

import polars as pl


def _main(csv: str) -> None:
    schema = {"key": pl.Int64(), "amount": pl.Decimal(12, 2)}
    rows = pl.scan_csv(csv, schema=schema)
    totals = rows.group_by("key").agg(total=pl.col("amount").sum(), rows=pl.len()).collect()
    print(totals.height, totals["total"].sum(), totals["rows"].sum())


if __name__ == "__main__":
    _main(*sys.argv[1:])
