"""Loading a file into a table: each sink against what a user would write by hand, in alternating pairs.

A pair is run as baseline, product in one round and as product, baseline in the next, each load into a fresh database
whose pages have been flushed. What counts is the median of the rounds' ratios: the machine may be slower in one
minute than in the next, but hardly within a pair. After each load the table must hold exactly the rows of the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import PAIRS, Load, Pair, Start, Task
from benchmarks.data import Digest, create_table, csv_file, digest_of_table, expected_digest, fill_table
from benchmarks.process import Measured
from benchmarks.report import Check, Report, machine, tell
from benchmarks.server import Server, migrate

MEMORY_BOUND_MIB = 350.0
GROWTH_BOUND = 1.10
GROWTH_FACTOR = 10
_MIB = 1 << 20


class WrongResultError(Exception):
    """A load left something else in the table than the rows of the file."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is run.

    Attributes:
        rows: Rows of the file for sinks that append.
        upsert_rows: Rows of the file for upserts.
        rounds: How often each pair is run.
        growth: Names of the sinks whose memory is also measured at these rows and at ten times as many.
        growth_rows: How many.
        cache_dir: Where generated files are kept.
        work_dir: A directory for what the product leaves behind.
        pairs: What is measured against what.
    """

    rows: int
    upsert_rows: int
    rounds: int
    growth: tuple[str, ...]
    growth_rows: int
    cache_dir: Path
    work_dir: Path
    pairs: Sequence[Pair] = PAIRS


@dataclass(frozen=True, slots=True)
class _Results:
    """What the rounds measured, by name of product or baseline, in order of rounds."""

    products: dict[str, list[Measured]]
    baselines: dict[str, list[Measured]]


def run_load(server: Server, options: LoadOptions) -> Report:
    """Run the benchmark.

    Raises:
        WrongResultError: A load was not exact.
        ChildFailedError: A load failed.
    """
    results = _Results({}, {})
    for upserts, rows in ((False, options.rows), (True, options.upsert_rows)):
        pairs = [pair for pair in options.pairs if pair.upserts is upserts]
        if pairs:
            with _Bench.open(server, options, pairs, rows) as bench:
                _run_rounds(bench, pairs, options.rounds, results)
    checks = [*_ratio_checks(results, options), *_memory_checks(results), *_growth_checks(server, options)]
    figures = {
        f"{name}, s": [one.seconds for one in measured]
        for name, measured in (results.baselines | results.products).items()
    }
    sizes = {"rows": options.rows, "upsert_rows": options.upsert_rows, "growth_rows": options.growth_rows}
    setting = {**sizes, "rounds": options.rounds, **machine(server.version)}
    return Report("load", tuple(checks), figures, setting)


def _run_rounds(bench: _Bench, pairs: Sequence[Pair], rounds: int, results: _Results) -> None:
    for number in range(rounds):
        for pair in pairs:
            both: list[tuple[dict[str, list[Measured]], str, Load]] = [
                (results.baselines, _baseline_key(pair), pair.baseline),
                (results.products, pair.name, pair.product),
            ]
            for into, name, load in reversed(both) if number % 2 else both:
                measured = bench.run(load, pair.start)
                into.setdefault(name, []).append(measured)
                tell(f"round {number + 1}: {name}: {measured.seconds:.2f} s, {measured.peak_bytes / _MIB:.0f} MiB")


def _baseline_key(pair: Pair) -> str:
    return f"{pair.baseline_name} (beside {pair.name})"


def _ratio_checks(results: _Results, options: LoadOptions) -> Iterator[Check]:
    for pair in options.pairs:
        rounds = zip(results.products[pair.name], results.baselines[_baseline_key(pair)], strict=True)
        ratios = [product.seconds / baseline.seconds for product, baseline in rounds]
        yield Check.of_samples(f"{pair.name} / {pair.baseline_name}", ratios, pair.bound, "×")


def _memory_checks(results: _Results) -> Iterator[Check]:
    for name, measured in results.products.items():
        peaks = [one.peak_bytes / _MIB for one in measured]
        yield Check(f"{name}, peak memory", max(peaks), MEMORY_BOUND_MIB, "MiB", tuple(peaks))


def _growth_checks(server: Server, options: LoadOptions) -> Iterator[Check]:
    """Memory at some rows and at ten times as many."""
    pairs = [pair for pair in options.pairs if pair.name in options.growth]
    if not pairs:
        return
    few, many = (_peaks(server, options, pairs, options.growth_rows * factor) for factor in (1, GROWTH_FACTOR))
    for pair in pairs:
        name = f"{pair.name}, peak memory at {GROWTH_FACTOR} × the rows"
        yield Check(name, many[pair.name] / _MIB, MEMORY_BOUND_MIB, "MiB")
        yield Check(f"{name}, growth", many[pair.name] / few[pair.name], GROWTH_BOUND, "×")


def _peaks(server: Server, options: LoadOptions, pairs: Sequence[Pair], rows: int) -> Mapping[str, int]:
    with _Bench.open(server, options, pairs, rows) as bench:
        peaks = {pair.name: bench.run(pair.product, pair.start).peak_bytes for pair in pairs}
    for name, peak_bytes in peaks.items():
        tell(f"{rows:,} rows: {name}: {peak_bytes / _MIB:.0f} MiB")
    return peaks


@dataclass(frozen=True, slots=True)
class _Bench:
    """One file, the databases to start from, and what must come out.

    Attributes:
        server: Where all of it takes place.
        csv: The file.
        expected: What the table must hold after a load.
        templates: Names of the databases that are copied for a load.
        work_dir: A directory for what the product leaves behind.
    """

    server: Server
    csv: Path
    expected: Digest
    templates: Mapping[Start, str]
    work_dir: Path

    @classmethod
    @contextmanager
    def open(cls, server: Server, options: LoadOptions, pairs: Sequence[Pair], rows: int) -> Iterator[_Bench]:
        """Make the file and the databases."""
        with ExitStack() as stack:
            templates = {}
            for start in sorted({pair.start for pair in pairs}):
                tell(f"preparing: {start} table, {rows:,} rows")
                templates[start] = stack.enter_context(_template(server, options.work_dir, start, rows))
            url = server.database_url(next(iter(templates.values())))
            csv = csv_file(options.cache_dir, server, url, rows)
            with server.connect(url) as connection:
                expected = expected_digest(connection, rows)
            yield cls(server, csv, expected, templates, options.work_dir)

    def run(self, load: Load, start: Start) -> Measured:
        """One load into a fresh database, checked."""
        with self.server.database(self.templates[start]) as name:
            url = self.server.database_url(name)
            measured = load(Task(self.server, url, self.csv, self.work_dir))
            with self.server.connect(url) as connection:
                found = digest_of_table(connection)
        if found != self.expected:
            raise WrongResultError(f"the table holds {found}, the file {self.expected}")
        return measured


@contextmanager
def _template(server: Server, work_dir: Path, start: Start, rows: int) -> Iterator[str]:
    with server.database(is_template=True) as name:
        url = server.database_url(name)
        migrate(url, work_dir)
        with server.connect(url) as connection:
            create_table(connection)
            if start is Start.FILLED:
                fill_table(connection, rows)
                connection.execute("VACUUM ANALYZE events")
        yield name
