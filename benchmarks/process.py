"""Run a child process and measure it as its user would: by the wall clock, from start to exit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

_STOPWATCH = Path(__file__).with_name("stopwatch.py")


class ChildFailedError(Exception):
    """A measured process exited with an error; the message holds what it said."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One process from start to exit.

    Attributes:
        seconds: Wall time.
        peak_bytes: Largest resident memory the process has had.
        output: What it wrote to stdout.
    """

    seconds: float
    peak_bytes: int
    output: str


def measure(command: Sequence[str | Path], cwd: Path, environ: Mapping[str, str] | None = None) -> Measured:
    """Run a command to its end.

    Raises:
        ChildFailedError: It could not be started, or did not exit with 0.
    """
    with TemporaryDirectory(prefix="etl-stopwatch-") as directory:
        result = Path(directory, "result")
        ran = subprocess.run(
            [sys.executable, "-I", "-S", _STOPWATCH, result, *command],
            cwd=cwd,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode != 0:
            raise ChildFailedError(f"{Path(command[0]).name} could not be started: {ran.stderr.strip()}")
        seconds, peak_bytes, exit_code = result.read_text().split()
    if exit_code != "0":
        raise ChildFailedError(f"{Path(command[0]).name} exited {exit_code}: {ran.stderr.strip()}")
    return Measured(float(seconds), int(peak_bytes), ran.stdout)
