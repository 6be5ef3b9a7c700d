"""The processes of a data directory, as /proc shows them: where there is none, nothing is known."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from etl.store.embedded.account import Account

_PROC = Path("/proc")


def is_alive(postmaster: int | None, data: Path, account: Account) -> bool:
    """Whether the postmaster of ``data`` lives under this process id; taken for true where there is no /proc.

    A process id alone proves nothing: it may be a zombie's, or have been given to another process.
    """
    if not (_PROC / "self" / "stat").exists():
        return True
    return postmaster in set(_processes_in(data, account))


def kill_orphans(data: Path, account: Account) -> None:
    """End the backends of a postmaster that was killed: they keep its shared memory, and no new server can start.

    What they did is lost in the same way as in any crash, that is, recovered. Call it when the postmaster is gone.
    """
    for pid in set(_processes_in(data, account)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes_in(data: Path, account: Account) -> Iterator[int]:
    """Server processes change to their data directory: so the working directory says whose they are."""
    for entry in _PROC.glob("[0-9]*"):
        if _is_live_postgres(entry) and _working_directory(entry, account) == str(data):
            yield int(entry.name)


def _is_live_postgres(entry: Path) -> bool:
    try:
        text = (entry / "stat").read_text(errors="replace")
    except OSError:
        return False
    head, _, rest = text.rpartition(")")
    # A zombie holds nothing any more; where nobody reaps, it stays for ever.
    return head.endswith("(postgres") and rest.split()[0] not in ("Z", "X")


def _working_directory(entry: Path, account: Account) -> str | None:
    try:
        return str((entry / "cwd").readlink())
    except PermissionError:
        # Root in a container may lack the right to look at other users' processes; the account itself has it.
        output = account.run(["readlink", entry / "cwd"])
        return output.text if output.returncode == 0 else None
    except OSError:
        return None
