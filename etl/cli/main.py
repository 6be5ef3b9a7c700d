"""Entry point of the command ``etl``: the table of commands, and the one place where errors become exit codes.

Only click and the standard library are imported here, and a command's module only when that command runs:
``etl --help`` answers in a moment, however heavy the engine behind it is.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import click

DISTRIBUTION = "exactly-once-etl"
EXIT_INTERRUPTED = 130
EXIT_USAGE = 2


@dataclass(slots=True)
class Invocation:
    """What one call of the command line was asked for, beyond the command's own options.

    Attributes:
        debug: Show tracebacks instead of writing them to a file.
    """

    debug: bool = False


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command that is imported when it is needed.

    Attributes:
        target: ``module:attribute`` of the click command.
        help: Its line in ``etl --help``.
    """

    target: str
    help: str

    def load(self) -> click.Command:
        """Import the command's module."""
        module, _, attribute = self.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), self.target
        return command


COMMANDS: Mapping[str, LazyCommand] = {
    "init": LazyCommand("etl.cli.init:init", "Create a project that runs at once."),
    "run": LazyCommand("etl.cli.run:run", "Run jobs: read what is there, make it visible, exit."),
    "list": LazyCommand("etl.cli.listing:list_jobs", "List the jobs of the project."),
    "explain": LazyCommand("etl.cli.explain:explain", "Show a job's graph, schemas and guarantees."),
    "chaos": LazyCommand("etl.cli.chaos:chaos", "Kill a job at every step, on scratch copies, and compare."),
    "status": LazyCommand("etl.cli.status:status", "Show where each job stands."),
    "history": LazyCommand("etl.cli.history:history", "Show past runs."),
    "state": LazyCommand("etl.cli.state:state", "Show, export and compare what operators remember."),
    "savepoint": LazyCommand("etl.cli.savepoint:savepoint", "Keep checkpoints under a name, to go back to."),
    "crontab": LazyCommand("etl.cli.crontab:crontab", "Print crontab lines for the jobs that have a schedule."),
    "db": LazyCommand("etl.cli.db:db", "Create, upgrade and inspect the schema etl of a database."),
    "server": LazyCommand("etl.cli.server:server", "Control the embedded PostgreSQL server."),
}


class LazyGroup(click.Group):
    """A group whose help is printed from a table, without importing the commands."""

    def __init__(self, *, lazy: Mapping[str, LazyCommand], **attributes: Any) -> None:
        super().__init__(**attributes)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """The names in the order of the table: the order in which a new user needs them."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 (click's signature)
        """Import the command asked for."""
        entry = self._lazy.get(cmd_name)
        return entry.load() if entry else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the table of commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self._lazy.items()])


def _print_version(ctx: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if not asked or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        number = version(DISTRIBUTION)
    except PackageNotFoundError:
        number = "(not installed: running from source)"
    click.echo(f"etl {number}")
    ctx.exit(0)


_HELP = """Exactly-once ETL on nothing but PostgreSQL.

\b
Exit codes: 0 done and visible · 2 usage or configuration · 65 bad data
69 database not reachable · 70 internal · 75 already running
78 fenced by a newer run · 130/143 stopped by a signal
1 (chaos alone) the job does not survive every crash
"""


@click.group(cls=LazyGroup, lazy=COMMANDS, help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an internal error.")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
@click.pass_obj
def cli(invocation: Invocation, debug: bool) -> None:
    """Options that come before the command."""
    invocation.debug = invocation.debug or debug


def execute(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; whatever goes wrong has been printed."""
    invocation = Invocation()
    try:
        # Commands return None; those that end with a code of their own call ctx.exit(code).
        code = cli.main(args=list(arguments), prog_name="etl", standalone_mode=False, obj=invocation)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    except click.Abort:
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 (the outermost handler: everything ends as a line and an exit code)
        from etl.cli.output import report

        return report(error, debug=invocation.debug)
    return code if isinstance(code, int) else 0


def open_missing_streams() -> None:
    """Give the process the standard streams that it was started without (``etl run … 2>&-``, some schedulers).

    Otherwise the next file or database session would get one of their numbers, and what any library prints there would
    end up in it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 (as long as the process)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def main() -> NoReturn:
    """Entry point of the console script."""
    open_missing_streams()
    # Importing makes objects that stay: looking for garbage among them takes a tenth of a run's start.
    gc.disable()
    sys.exit(execute(sys.argv[1:]))
