"""Start a process from a small one, and tell how long it ran and how much memory it had.

The kernel counts the memory of the process that starts a program as the program's own until it has more. A test run or
a benchmark with its libraries loaded would lend the measured program its size, so it is this file, run as a script
without site-packages, that starts it. ``argv`` is the file to write ``seconds peak_bytes exit_code`` to, then the
command.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

_KIB = 1024


def _main(result: str, *command: str) -> None:
    started_s = time.perf_counter()
    try:
        child = subprocess.Popen(command)
    except OSError as error:
        sys.exit(str(error))
    # Not child.wait(): only wait4 tells what the process has used.
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - started_s
    child.returncode = os.waitstatus_to_exitcode(status)
    Path(result).write_text(f"{seconds!r} {usage.ru_maxrss * _KIB} {child.returncode}")


if __name__ == "__main__":
    _main(*sys.argv[1:])
