"""Run a child process and measure it as its user would: by the wall clock, from start to exit."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

_KIB = 1024


class ChildFailedError(Exception):
    """A measured process exited with an error; the message holds what it said."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One process from start to exit.

    Attributes:
        seconds: Wall time.
        peak_bytes: Largest resident memory the process has had. The kernel counts the memory of the process that
            forked it too, so the measuring process has to be a small one.
        output: What it wrote to stdout.
    """

    seconds: float
    peak_bytes: int
    output: str


def measure(command: Sequence[str | Path], cwd: Path, environ: Mapping[str, str] | None = None) -> Measured:
    """Run a command to its end.

    Raises:
        ChildFailedError: It did not exit with 0.
    """
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        started_s = time.perf_counter()
        child = subprocess.Popen(
            command, cwd=cwd, env={**os.environ, **(environ or {})}, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        # Not child.wait(): only wait4 tells what the process has used.
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - started_s
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            err.seek(0)
            raise ChildFailedError(f"{Path(command[0]).name} exited {child.returncode}: {err.read().strip()}")
        out.seek(0)
        return Measured(seconds, usage.ru_maxrss * _KIB, out.read())
