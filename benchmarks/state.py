"""What keeping state costs: sums by key against other tools, checkpoints of what has changed, and their restore.

Everything is run in alternating order, each run in a fresh database whose pages have been flushed. What counts is the
median of the rounds' ratios. After each run the totals must be exactly those that the server computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.contenders import Load, Task
from benchmarks.load import WrongResultError
from benchmarks.process import Measured
from benchmarks.report import Check, Report, machine, tell
from benchmarks.server import Server, migrate
from benchmarks.state_contenders import INTERVAL_S, NEVER_S, Product, bytewax_totals, polars_totals
from benchmarks.state_data import (
    CHANGED_SHARE,
    Payments,
    Spread,
    Totals,
    create_table,
    expected_totals,
    totals_of_table,
)

EXPRESSIONS_BOUND = 1 / 10
"""Most that a row may take of the time that it takes Bytewax."""

FUNCTION_BOUND = 1 / 2
OVERHEAD_BOUND = 1.05
SNAPSHOT_BOUND = 0.05
RESTORE_BOUND_S = 2.0

ROWS_PER_CHANGED_KEY = 10
"""Rows between two checkpoints whose bytes are counted, for each key that is hit: hardly one is left out."""

_MIB = 1 << 20
_EXPRESSIONS, _FUNCTION, _POLARS, _BYTEWAX = "expressions", "function", "polars", "Bytewax"
_UNPROTECTED = "Bytewax without snapshots"

_STORED = """
SELECT (SELECT max(checkpoint_id) FROM etl.checkpoint),
       count(*) FILTER (WHERE checkpoint_id >= since),
       coalesce(sum(length(content)) FILTER (WHERE checkpoint_id = 1), 0)::int8,
       coalesce(sum(length(content)) FILTER (WHERE checkpoint_id > 1), 0)::int8
  FROM (SELECT *, max(checkpoint_id) FILTER (WHERE sequence = 0) OVER (PARTITION BY key_group) AS since
          FROM etl.state) AS chunk
"""


@dataclass(frozen=True, slots=True)
class StateOptions:
    """What is run.

    Attributes:
        rows: Rows that are added up by expressions.
        function_rows: Rows that are added up by a function.
        bytewax_rows: Rows that are added up by Bytewax.
        change_rows: Rows that hit one key in :data:`~benchmarks.state_data.CHANGED_SHARE`.
        few_keys: Keys that are few.
        many_keys: Keys that are many.
        rounds: How often everything is run.
        cache_dir: Where generated files are kept.
        work_dir: A directory for what the product leaves behind.
        bytewax_python: An interpreter that has Bytewax and psycopg; None to compare with nobody.
    """

    rows: int
    function_rows: int
    bytewax_rows: int
    change_rows: int
    few_keys: int
    many_keys: int
    rounds: int
    cache_dir: Path
    work_dir: Path
    bytewax_python: Path | None


@dataclass(frozen=True, slots=True)
class _Results:
    """What the rounds have found, in their order."""

    checks: list[Check] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)

    def note(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)


def run_state(server: Server, options: StateOptions) -> Report:
    """Run the benchmark.

    Raises:
        WrongResultError: The totals of a run were not exact.
        ChildFailedError: A run failed.
    """
    results = _Results()
    for keys in dict.fromkeys((options.few_keys, options.many_keys)):
        _add_up(server, options, keys, results)
    _change_few(server, options, results)
    sizes = {
        "rows": options.rows,
        "function_rows": options.function_rows,
        "bytewax_rows": options.bytewax_rows,
        "change_rows": options.change_rows,
        "few_keys": options.few_keys,
        "many_keys": options.many_keys,
    }
    setting = {**sizes, "rounds": options.rounds, **machine(server.version)}
    return Report("state", tuple(results.checks), results.figures, setting)


# --- sums by key ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Contender:
    """Somebody who adds up.

    Attributes:
        name: Who.
        load: How.
        rows: How many rows.
        writes: Whether the totals are in the table afterwards; else their summary is printed.
    """

    name: str
    load: Load
    rows: int
    writes: bool = True


def _contenders(options: StateOptions) -> list[_Contender]:
    contenders = [
        _Contender(_POLARS, polars_totals, options.rows, writes=False),
        _Contender(_EXPRESSIONS, Product(), options.rows),
        _Contender(_FUNCTION, Product("function"), options.function_rows),
    ]
    if options.bytewax_python is not None:
        for name, recovers in ((_BYTEWAX, True), (_UNPROTECTED, False)):
            load = bytewax_totals(options.bytewax_python, recovers=recovers)
            contenders.append(_Contender(name, load, options.bytewax_rows))
    return contenders


def _add_up(server: Server, options: StateOptions, keys: int, results: _Results) -> None:
    contenders = _contenders(options)
    row_s: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    with _template(server, options.work_dir) as template:
        url = server.database_url(template)
        files = {rows: Payments(rows, keys) for rows in (options.rows, options.function_rows, options.bytewax_rows)}
        tell(f"preparing: {', '.join(f'{rows:,}' for rows in files)} rows, {keys:,} keys")
        paths = {rows: file.file(options.cache_dir, server, url) for rows, file in files.items()}
        with server.connect(url) as connection:
            expected = {rows: expected_totals(connection, [file]) for rows, file in files.items()}
        for number in range(options.rounds):
            for contender in reversed(contenders) if number % 2 else contenders:
                with server.database(template) as name:
                    task = Task(server, server.database_url(name), paths[contender.rows], options.work_dir)
                    measured = contender.load(task)
                    _require(expected[contender.rows], task, measured, writes=contender.writes)
                row_s[contender.name].append(measured.seconds / contender.rows)
                _note(results, f"{contender.name}, {keys:,} keys", measured, contender.rows)
    for one, bound in ((_EXPRESSIONS, EXPRESSIONS_BOUND), (_FUNCTION, FUNCTION_BOUND)):
        if options.bytewax_python is not None:
            name = f"{one} / {_BYTEWAX}, time a row, {keys:,} keys"
            results.checks.append(Check.of_samples(name, _ratios(row_s[one], row_s[_BYTEWAX]), bound, "×"))
            name = f"{one} / {_UNPROTECTED}, time a row, {keys:,} keys, ×"
            results.figures[name] = _ratios(row_s[one], row_s[_UNPROTECTED])
    ratios = _ratios(row_s[_EXPRESSIONS], row_s[_POLARS])
    results.figures[f"{_EXPRESSIONS} / {_POLARS}, time, {keys:,} keys, ×"] = ratios


def _note(results: _Results, name: str, measured: Measured, rows: int) -> None:
    rate, peak = rows / measured.seconds, measured.peak_bytes / _MIB
    results.note(f"{name}, s", measured.seconds)
    results.note(f"{name}, rows/s", rate)
    results.note(f"{name}, peak memory, MiB", peak)
    tell(f"{name}: {measured.seconds:.2f} s, {rate:,.0f} rows/s, {peak:.0f} MiB")


def _ratios(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(some, others, strict=True)]


def _require(expected: Totals, task: Task, measured: Measured, *, writes: bool = True) -> None:
    """Refuse a run whose totals are others.

    Raises:
        WrongResultError: They are.
    """
    if writes:
        with task.server.connect(task.url) as connection:
            found = totals_of_table(connection)
        if found != expected:
            raise WrongResultError(f"the table holds {found}, the file {expected}")
    elif measured.output.strip() != expected.summary:
        raise WrongResultError(f"printed was {measured.output.strip()}, the file holds {expected.summary}")


# --- few keys that change, among many ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Few:
    """A database in which a job remembers many keys, and a file that hits few of them.

    Attributes:
        server: Where it is.
        template: Name of the database, which is copied for each run.
        before: The file that the job has read there.
        csv: The file that hits few.
        expected: What the table must hold when it was read as well.
        work_dir: A directory for what the product leaves behind.
    """

    server: Server
    template: str
    before: Path
    csv: Path
    expected: Totals
    work_dir: Path

    def product(self, interval_s: float, checkpoint_rows: int | None = None) -> Product:
        """The job, with checkpoints as told."""
        return Product(interval_s=interval_s, checkpoint_rows=checkpoint_rows, before=(self.before,))

    @contextmanager
    def ran(self, product: Product) -> Iterator[tuple[Task, Measured]]:
        """A copy of the database in which the job has read the file that hits few; checked."""
        with self.server.database(self.template) as name:
            task = Task(self.server, self.server.database_url(name), self.csv, self.work_dir)
            measured = product(task)
            _require(self.expected, task, measured)
            yield task, measured


@dataclass(frozen=True, slots=True)
class _Round:
    """What one round has measured, in seconds of whole processes.

    Attributes:
        often_s: Few keys change, with a checkpoint every second.
        once_s: The same with one checkpoint, at the end.
        restoring_s: Nothing new, for a job that remembers many keys.
    """

    often_s: float
    once_s: float
    restoring_s: float

    @property
    def overhead(self) -> float:
        """Time with checkpoints to time without, less what either spends before its first row and behind its last.

        Where a run is hardly longer than that, it means nothing.
        """
        return (self.often_s - self.restoring_s) / (self.once_s - self.restoring_s)


def _change_few(server: Server, options: StateOptions, results: _Results) -> None:
    with _few(server, options) as few:
        rounds = [_round(few, options, results, number) for number in range(options.rounds)]
        overheads = [one.overhead for one in rounds]
        name = "checkpoint every second / at the end, time"
        results.checks.append(Check.of_samples(name, overheads, OVERHEAD_BOUND, "×"))
        _remember_long(few, options, results)


def _round(few: _Few, options: StateOptions, results: _Results, number: int) -> _Round:
    runs: dict[float, Measured] = {}
    for interval_s in (NEVER_S, INTERVAL_S) if number % 2 else (INTERVAL_S, NEVER_S):
        with few.ran(few.product(interval_s)) as (task, runs[interval_s]):
            if interval_s == INTERVAL_S:
                results.note("checkpoints of a run that takes one every second", _stored(task).count)
                restoring = few.product(interval_s)(task)
    _note(results, "few keys change, checkpoint every second", runs[INTERVAL_S], options.change_rows)
    _note(results, "few keys change, checkpoint at the end", runs[NEVER_S], options.change_rows)
    return _Round(runs[INTERVAL_S].seconds, runs[NEVER_S].seconds, restoring.seconds)


def _remember_long(few: _Few, options: StateOptions, results: _Results) -> None:
    """Bytes of many checkpoints in which few keys have changed, and the restore of what they leave.

    There are so many checkpoints that key groups begin new chains: those full chunks count as well. And what they leave
    are chains of all lengths, as a job that runs for long has them; many chunks are what a restore takes time for.
    """
    hit = max(options.many_keys // CHANGED_SHARE, 1)
    with (
        few.ran(few.product(INTERVAL_S, checkpoint_rows=hit * ROWS_PER_CHANGED_KEY)) as (task, _),
        _forgetful(few.server, few.work_dir) as stateless,
    ):
        stored = _stored(task)
        tell(f"{stored.count} checkpoints of {stored.mean_bytes:,.0f} bytes, {stored.base_bytes:,} bytes of all keys")
        restores_s = [_restore_s(few.product(INTERVAL_S), task, stateless, results) for _ in range(options.rounds)]
    results.note("checkpoints whose bytes were counted", stored.count)
    results.note("state of all keys, bytes", stored.base_bytes)
    results.note("a checkpoint of changes, bytes", stored.mean_bytes)
    results.note("chunks of a restore", stored.chunks)
    share = stored.mean_bytes / stored.base_bytes
    results.checks.append(Check("bytes of changed keys / of all keys", share, SNAPSHOT_BOUND, "×"))
    restored = f"restore of {options.many_keys:,} keys"
    results.checks.append(Check.of_samples(restored, restores_s, RESTORE_BOUND_S, "s"))


def _restore_s(product: Product, task: Task, stateless: Task, results: _Results) -> float:
    """What a run that finds nothing new takes longer because there is something to remember."""
    idle, restoring = Product()(stateless), product(task)
    for name, measured in (("nothing new, no state", idle), ("nothing new, many keys", restoring)):
        results.note(f"{name}, s", measured.seconds)
        tell(f"{name}: {measured.seconds:.2f} s, {measured.peak_bytes / _MIB:.0f} MiB")
    return restoring.seconds - idle.seconds


@dataclass(frozen=True, slots=True)
class _Stored:
    """What the store holds of a job whose first checkpoint was of all keys.

    Attributes:
        count: Number of later checkpoints.
        chunks: How many chunks a restore reads.
        base_bytes: Bytes of the first checkpoint's chunks.
        mean_bytes: Bytes of the chunks of a later one.
    """

    count: int
    chunks: int
    base_bytes: int
    mean_bytes: float


def _stored(task: Task) -> _Stored:
    with task.server.connect(task.url) as connection:
        row = connection.execute(_STORED).fetchone()
    assert row is not None
    last, chunks, base_bytes, later_bytes = row
    return _Stored(last - 1, chunks, base_bytes, later_bytes / max(last - 1, 1))


@contextmanager
def _few(server: Server, options: StateOptions) -> Iterator[_Few]:
    """A database with a job that remembers many keys, in full chunks of one checkpoint."""
    before = Payments(options.many_keys, options.many_keys, Spread.ONCE)
    changes = Payments(options.change_rows, options.many_keys, Spread.FEW)
    with _template(server, options.work_dir) as template:
        url = server.database_url(template)
        tell(f"preparing: {options.many_keys:,} keys, and {options.change_rows:,} rows for one in {CHANGED_SHARE}")
        csv, first = (file.file(options.cache_dir, server, url) for file in (changes, before))
        with server.connect(url) as connection:
            expected = expected_totals(connection, [before, changes])
        Product(interval_s=NEVER_S)(Task(server, url, first, options.work_dir))
        yield _Few(server, template, first, csv, expected, options.work_dir)


@contextmanager
def _forgetful(server: Server, work_dir: Path) -> Iterator[Task]:
    """A job that has read a file without rows."""
    empty = work_dir / "empty.csv"
    empty.write_text("key,amount\n")
    with _template(server, work_dir) as template:
        task = Task(server, server.database_url(template), empty, work_dir)
        Product()(task)
        yield task


@contextmanager
def _template(server: Server, work_dir: Path) -> Iterator[str]:
    with server.database(is_template=True) as name:
        url = server.database_url(name)
        migrate(url, work_dir)
        with server.connect(url) as connection:
            create_table(connection)
        yield name
