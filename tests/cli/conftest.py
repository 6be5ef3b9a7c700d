"""Projects on disk, and the command ``etl`` as a process in them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import etl

CHECKOUT = Path(etl.__file__).parents[1]
TIMEOUT_S = 60

NUMBERS = '''
"""A source of the numbers below ``count``, and a sink that takes part in the checkpoint's transaction."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from etl.errors import RecordError
from etl.schema import Schema
from etl.sink import Delivery, Sink, SinkWriter
from etl.source import Source, SourceReader, Split, SplitEnumerator


@dataclass(frozen=True)
class Numbers(Source):
    count: int
    bad: int | None = None

    @property
    def schema(self):
        return Schema.declare({"n": "int8"})

    def describe(self):
        return f"the numbers below {self.count}"

    def create_enumerator(self, context):
        return Enumerator(self.count)

    def create_reader(self, context):
        return Reader(self)


class Enumerator(SplitEnumerator):
    def __init__(self, count):
        self.count = count

    def discover(self, known):
        position = known.get("all", {"next": 0})
        return [Split("all", position)] if position["next"] < self.count else []


class Reader(SourceReader):
    def __init__(self, source):
        self.source, self.next, self.reported = source, source.count, source.count

    def assign(self, splits):
        for split in splits:
            self.next = self.reported = (split.position or {"next": 0})["next"]

    def read_batch(self):
        if self.next >= self.source.count:
            return None
        end = min(self.next + 10, self.source.count)
        numbers = list(range(self.next, end))
        if self.source.bad in numbers:
            raise RecordError(f"number {self.source.bad} is bad")
        self.next = end
        return pa.RecordBatch.from_pydict({"n": numbers}, schema=self.source.schema.to_arrow())

    def snapshot_positions(self):
        moved, self.reported = self.next != self.reported, self.next
        return {"all": {"next": self.next}} if moved else {}

    def close(self):
        pass


@dataclass(frozen=True)
class Table(Sink):
    name: str
    other: str | None = None
    marker: str | None = None
    delivery = Delivery.TRANSACTIONAL

    @property
    def database(self):
        return self.other

    def describe(self):
        return f"table {self.name}"

    def prepare_target(self, context):
        with context.connect("prepare") as connection:
            connection.execute(f"CREATE TABLE IF NOT EXISTS {self.name} (n int8 PRIMARY KEY)")

    def create_writer(self, context):
        return Writer(self, context)


class Writer(SinkWriter):
    def __init__(self, sink, context):
        self.sink, self.context, self.checkpoint, self.count = sink, context, context.checkpoint_id + 1, 0

    def write(self, batch):
        with self.context.transactions.of(self.checkpoint).use() as connection:
            with connection.cursor() as cursor:
                cursor.executemany(f"INSERT INTO {self.sink.name} VALUES (%s)", [(n,) for n in batch["n"].to_pylist()])
        self.count += batch.num_rows
        if self.sink.marker:
            Path(self.sink.marker).touch()

    def prepare_commit(self, checkpoint_id):
        self.checkpoint = checkpoint_id + 1
        return None

    @property
    def rows(self):
        return self.count

    def close(self):
        pass
'''


@dataclass(frozen=True, slots=True)
class Project:
    """A project directory, and commands run in it with an environment that knows no other database.

    Attributes:
        dir: Where it is.
        environ: What the commands see.
    """

    dir: Path
    environ: Mapping[str, str]

    def write(self, name: str, text: str) -> Path:
        """Write a file that nobody else can write."""
        path = self.dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
        return path

    def job(self, name: str, arguments: str = "count=25", sink: str = "", job: str = "") -> None:
        """Write ``jobs/<name>.py``: numbers into the table ``<name>``."""
        lines = [
            "from etl import Job",
            "from jobs._numbers import Numbers, Table",
            f"job = Job({name!r}{job})",
            f'job.read("numbers", Numbers({arguments})).write("table", Table({name!r}{sink}))',
        ]
        self.write(f"jobs/{name}.py", "\n".join(lines) + "\n")

    @property
    def command(self) -> list[str]:
        """The words that start ``etl``."""
        return [sys.executable, "-m", "etl.cli"]

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        """Start ``etl`` in the project."""
        return subprocess.Popen(
            [*self.command, *arguments],
            cwd=self.dir,
            env={**self.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def etl(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run ``etl`` in the project to its end."""
        process = self.start(*arguments, **environ)
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project without jobs and without a database."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ETL_", "PG", "XDG_", "PYTHON"))}
    state = {"HOME": str(tmp_path / "home"), "XDG_STATE_HOME": str(tmp_path / "state")}
    project = Project(tmp_path / "project", {**kept, **state, "PYTHONPATH": str(CHECKOUT), "COLUMNS": "120"})
    project.write("etl.toml", "")
    project.write("jobs/__init__.py", "")
    project.write("jobs/_numbers.py", NUMBERS)
    return project


@pytest.fixture
def stored(project: Project, store_url: str) -> Project:
    """The same project on a store with the schema migrated."""
    return Project(project.dir, {**project.environ, "ETL_DATABASE_URL": store_url})


def rows(url: str, table: str) -> list[Any]:
    """The numbers in a table, sorted."""
    import psycopg
    from psycopg import sql
    from psycopg.rows import scalar_row

    query = sql.SQL("SELECT n FROM {} ORDER BY n").format(sql.Identifier(table))
    with psycopg.connect(url, row_factory=scalar_row) as connection:
        return connection.execute(query).fetchall()


@contextmanager
def started(project: Project, *arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A command that is gone at the end of the block, however the block ends."""
    process = project.start(*arguments, **environ)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def await_file(path: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a file is there, as long as the process lives."""
    pause = threading.Event()
    for _ in range(TIMEOUT_S * 20):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()
        pause.wait(0.05)
    raise AssertionError(f"{path} did not appear")
