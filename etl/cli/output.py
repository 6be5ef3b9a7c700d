"""How the command line speaks: results on stdout, everything else on stderr, errors as single lines.

Nothing printed here contains a password (``etl.settings.redact``) or a control character: texts of errors may carry
pieces of data, and data must not be able to forge a line or drive a terminal.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from etl.errors import ConfigurationError, EtlError, InternalError
from etl.settings import redact

EXIT_USAGE = 2
EXIT_INTERNAL = 70
EXIT_OUTPUT_CLOSED = 141
"""128 + SIGPIPE: what any Unix tool ends with when its reader went away."""

TRACEBACKS_MAX = 20
MISSING = "-"

_error_lock = threading.Lock()


class OutputClosedError(Exception):
    """Nobody reads our stdout any more (``etl list | head -1``)."""


class OutputFailedError(EtlError):
    """What was asked for could not be printed (disk full)."""


def write_out(text: str) -> None:
    """Print a result on stdout, through to the operating system.

    Raises:
        OutputClosedError: The reader has gone away.
        OutputFailedError: The text could not be written.
    """
    try:
        click.echo(text)
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes stdout once more at exit; let that go nowhere instead of failing again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise OutputClosedError("stdout was closed by its reader") from error
        raise OutputFailedError(f"stdout cannot be written: {error.strerror}") from error


def write_json(value: Mapping[str, Any] | Sequence[Any], *, indent: int | None = None) -> None:
    """Print one JSON document on stdout."""
    write_out(json.dumps(_redacted(value), ensure_ascii=False, indent=indent))


def write_line(text: str) -> None:
    """Print a line for people on stderr. A closed stderr never stops a run."""
    with _error_lock:
        try:
            click.echo(printable(redact(text)), err=True)
        except OSError:
            return


def write_error(error: BaseException, subject: str | None = None) -> None:
    """Print an error: one line, and one more for each finding."""
    first, *more = error_lines(error)
    write_line(f"etl: error: {subject}: {first}" if subject else f"etl: error: {first}")
    for line in more:
        write_line(line)


def error_lines(error: BaseException) -> list[str]:
    """What to say about an error, without a traceback: its message, then its findings, one a line."""
    if isinstance(error, click.UsageError):
        return [_usage_line(error)]
    if isinstance(error, click.ClickException):
        return [_one_line(error.format_message())]
    if isinstance(error, ConfigurationError):
        return _configuration_lines(error)
    if isinstance(error, EtlError):
        return [_one_line(str(error)) or type(error).__name__]
    translated = _translate_driver_error(error)
    if translated is not None:
        return error_lines(translated)
    return [_one_line(f"internal error: {type(error).__name__}: {error}")]


def exit_code_of(error: BaseException) -> int:
    """The documented exit code of an error."""
    if isinstance(error, click.ClickException):
        return EXIT_USAGE
    if isinstance(error, OutputClosedError):
        return EXIT_OUTPUT_CLOSED
    if isinstance(error, EtlError):
        return error.exit_code
    translated = _translate_driver_error(error)
    return translated.exit_code if translated else EXIT_INTERNAL


def report(error: BaseException, *, debug: bool, subject: str | None = None) -> int:
    """Print an error as its reader needs it, keep the traceback of a defect, and return the exit code."""
    if isinstance(error, OutputClosedError):
        return EXIT_OUTPUT_CLOSED
    write_error(error, subject)
    if debug and not isinstance(error, click.ClickException):
        for line in _traceback(error).splitlines():
            write_line(line)
    elif is_defect(error):
        write_line(f"  the traceback is in {_keep_traceback(error)}; --debug shows it here")
    return exit_code_of(error)


def is_defect(error: BaseException) -> bool:
    """Whether a traceback is of use: a defect of the framework or of user code, not a mistake at the keyboard."""
    if isinstance(error, InternalError):
        return True
    return not isinstance(error, EtlError | click.ClickException) and _translate_driver_error(error) is None


def printable(text: str) -> str:
    """The text with control and line-break characters shown as escapes, so that one line stays one line."""
    return "".join(_escape(character) for character in text)


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]], numeric: Sequence[str] = ()) -> str:
    """Plain aligned text; columns named in ``numeric`` are aligned to the right. None is shown as ``-``."""
    cells = [[MISSING if value is None else printable(redact(str(value))) for value in row] for row in rows]
    widths = [max(len(row[column]) for row in [headers, *cells]) for column in range(len(headers))]
    align: list[Callable[[str, int], str]] = [str.rjust if name in numeric else str.ljust for name in headers]
    return "\n".join(
        "  ".join(align[column](row[column], widths[column]) for column in range(len(headers))).rstrip()
        for row in [list(headers), *cells]
    )


def format_duration(seconds: float) -> str:
    """Seconds as people read them: ``0.8s``, ``12s``, ``3m 20s``, ``2h 5m``, ``3d 4h``."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {rest}s" if minutes else f"{rest}s"


def format_bytes(size_bytes: float) -> str:
    """A size in decimal units: ``153.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: _redacted(each) for key, each in value.items()}
    return [_redacted(each) for each in value] if isinstance(value, list | tuple) else value


def _usage_line(error: click.UsageError) -> str:
    command = error.ctx.command_path if error.ctx else "etl"
    return f"{_one_line(error.format_message()).rstrip('.')}; see {command} --help"


def _configuration_lines(error: ConfigurationError) -> list[str]:
    # A message made by ConfigurationError.from_findings lists its findings already, one a line.
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    missing = [finding for finding in error.findings if str(finding).splitlines()[0] not in str(error)]
    return [*lines, *(f"  - {_one_line(str(finding))}" for finding in missing)]


def _one_line(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def _escape(character: str) -> str:
    if character.isprintable() or character == " ":
        return character
    # Unicode spaces are harmless; the line separators and all controls are not.
    if unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()


def _translate_driver_error(error: BaseException) -> EtlError | None:
    """Our error for one of psycopg's; imported late, because most commands never touch a database."""
    # SQLAlchemy wraps the driver's error and keeps it as ``orig``.
    cause = getattr(error, "orig", None) or error
    if type(cause).__module__.partition(".")[0] != "psycopg":
        return None
    import psycopg

    from etl.sqlstate import translate

    return translate(cause, "database") if isinstance(cause, psycopg.Error) else None


def _traceback(error: BaseException) -> str:
    return redact("".join(traceback.format_exception(error)))


def _keep_traceback(error: BaseException) -> Path | str:
    """Write the traceback where only this user can read it; keep the newest few."""
    directory = traceback_dir()
    path = directory / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}.txt"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(_traceback(error))
        for old in sorted(directory.glob("*.txt"))[:-TRACEBACKS_MAX]:
            old.unlink(missing_ok=True)
    except OSError as failure:
        return f"no file ({failure})"
    return path


def traceback_dir() -> Path:
    """The directory of kept tracebacks, in the user's state directory."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "etl" / "tracebacks"
