"""``python -m benchmarks``: exits 1 when a bound is missed, 2 when something could not be measured."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import click

from benchmarks.contenders import PAIRS
from benchmarks.load import LoadOptions, WrongResultError, run_load
from benchmarks.process import ChildFailedError
from benchmarks.report import Report
from benchmarks.server import NoPsqlError, Server, open_server
from benchmarks.startup import run_startup
from benchmarks.state import StateOptions, run_state
from benchmarks.state_contenders import BYTEWAX, make_bytewax_python

_NAMES = [pair.name for pair in PAIRS]
_ROWS = 10_000_000
_UPSERT_ROWS = 4_000_000
_GROWTH_ROWS = 2_000_000
_STATE_ROWS = 5_000_000
_FUNCTION_ROWS = 5_000_000
_BYTEWAX_ROWS = 2_000_000
_CHANGE_ROWS = 40_000_000
_FEW_KEYS = 100_000
_MANY_KEYS = 1_000_000
_ROUNDS = 5
_COULD_NOT_MEASURE = 2


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "exactly-once-etl" / "benchmarks"


_json = click.option("--json", "as_json", is_flag=True, help="Print one object on stdout.")
_rounds = click.option("--rounds", type=click.IntRange(min=1), default=_ROUNDS, show_default=True)
_cache = click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path, resolve_path=True),
    default=_cache_dir,
    help="Where generated files are kept; by default below the user's cache directory.",
)


@click.group()
def main() -> None:
    """Benchmarks on the server of ETL_DATABASE_URL (the role may create databases), else on a private one."""


def _count(name: str, default: int, text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(name, type=click.IntRange(min=1), default=default, show_default=True, help=text)


@main.command()
@_count("--rows", _ROWS, "Rows for sinks that append.")
@_count("--upsert-rows", _UPSERT_ROWS, "Rows for upserts.")
@_rounds
@click.option("--only", type=click.Choice(_NAMES), multiple=True, help="Measure these sinks alone.")
@click.option(
    "--growth",
    type=click.Choice([*_NAMES, "all", "none"]),
    default="two-phase",
    show_default=True,
    help="Whose memory is measured at --growth-rows and at ten times as many.",
)
@_count("--growth-rows", _GROWTH_ROWS, "Rows for that.")
@_cache
@_json
@click.pass_context
def load(
    context: click.Context,
    rows: int,
    upsert_rows: int,
    rounds: int,
    only: tuple[str, ...],
    growth: str,
    growth_rows: int,
    cache_dir: Path,
    as_json: bool,
) -> None:
    r"""Each sink against psql \copy, or against the best hand-written upsert."""
    pairs = [pair for pair in PAIRS if not only or pair.name in only]
    grown = tuple(pair.name for pair in pairs if growth in {pair.name, "all"})

    def run(server: Server, work_dir: Path) -> Report:
        options = LoadOptions(rows, upsert_rows, rounds, grown, growth_rows, cache_dir, work_dir, pairs)
        return run_load(server, options)

    _finish(context, run, as_json=as_json)


@main.command()
@_rounds
@_cache
@_json
@click.pass_context
def startup(context: click.Context, rounds: int, cache_dir: Path, as_json: bool) -> None:
    """How long ``etl --help`` takes, and a run that finds nothing new."""
    _finish(context, lambda server, work_dir: run_startup(server, rounds, cache_dir, work_dir), as_json=as_json)


@main.command()
@_count("--rows", _STATE_ROWS, "Rows that are added up by expressions, and by polars.")
@_count("--function-rows", _FUNCTION_ROWS, "Rows that are added up by a Python function.")
@_count("--bytewax-rows", _BYTEWAX_ROWS, "Rows that are added up by Bytewax.")
@_count("--change-rows", _CHANGE_ROWS, "Rows that hit one in a hundred of many keys.")
@_count("--few-keys", _FEW_KEYS, "Keys to add up by.")
@_count("--many-keys", _MANY_KEYS, "Keys to add up by, and to remember while few of them change.")
@_rounds
@click.option(
    "--bytewax-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An interpreter that has Bytewax and psycopg; by default one is made below the cache directory, by pip.",
)
@click.option("--without-bytewax", is_flag=True, help=f"Measure without Bytewax {BYTEWAX}, and without its bounds.")
@_cache
@_json
@click.pass_context
def state(
    context: click.Context,
    rows: int,
    function_rows: int,
    bytewax_rows: int,
    change_rows: int,
    few_keys: int,
    many_keys: int,
    rounds: int,
    bytewax_python: Path | None,
    without_bytewax: bool,
    cache_dir: Path,
    as_json: bool,
) -> None:
    """Sums by key against Bytewax and polars, checkpoints of changes, and their restore."""

    def run(server: Server, work_dir: Path) -> Report:
        python = None if without_bytewax else bytewax_python or make_bytewax_python(cache_dir)
        options = StateOptions(
            rows, function_rows, bytewax_rows, change_rows, few_keys, many_keys, rounds, cache_dir, work_dir, python
        )
        return run_state(server, options)

    _finish(context, run, as_json=as_json)


def _finish(context: click.Context, run: Callable[[Server, Path], Report], *, as_json: bool) -> NoReturn:
    """Run a benchmark on a server, print its report, and exit with its code."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix="etl-benchmark-") as work_dir,
            open_server(os.environ.get("ETL_DATABASE_URL")) as server,
        ):
            report = run(server, Path(work_dir))
    except (ChildFailedError, NoPsqlError, WrongResultError) as error:
        click.echo(f"benchmarks: {error}", err=True)
        context.exit(_COULD_NOT_MEASURE)
    click.echo(report.to_json() if as_json else report.text())
    context.exit(report.exit_code)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
