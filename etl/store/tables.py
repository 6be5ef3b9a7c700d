"""Tables of the schema ``etl``, as SQLAlchemy Core sees them.

The migrations own the schema; a test asserts that both yield the same one. Six tables matter for the protocol:

* ``head`` — one row a job: the fencing token (``epoch``), the last completed checkpoint, the owner's session. It is
  always locked first, by primary key.
* ``committable`` — what the last completed checkpoints staged and where.
* ``state`` — what operators remember, in chunks; see :mod:`etl.state`.
* ``savepoint`` — names of checkpoints, which are kept as long as they have one.
* ``fence`` and ``commit_ledger`` — also in every target database: who may write, and what was committed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import LiteralString

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import BYTEA, JSONB

SCHEMA = "etl"
metadata = sa.MetaData(schema=SCHEMA)


class RunStatus(StrEnum):
    """Life of a run.

    ::

        running ─┬─► succeeded   input read, final checkpoint visible
                 ├─► stopped     asked to stop; final checkpoint visible
                 ├─► failed      gave up; the error says why
                 ├─► fenced      outdated by a newer run
                 └─► crashed     found dead by a later run
    """

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    FAILED = "failed"
    FENCED = "fenced"
    CRASHED = "crashed"


class Trigger(StrEnum):
    """Why a checkpoint was taken."""

    INTERVAL = "interval"
    ROWS = "rows"
    END_OF_INPUT = "end-of-input"
    STOP = "stop"
    SAVEPOINT = "savepoint"
    REWIND = "rewind"


def _one_of(column: str, values: type[StrEnum]) -> sa.CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return sa.CheckConstraint(f"{column} IN ({listed})", name=f"{column}_known")


job = sa.Table(
    "job",
    metadata,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("created_at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now()),
    sa.CheckConstraint("job_id ~ '^[0-9a-f]{16}$'", name="job_id_is_hex"),
)

sink = sa.Table(
    "sink",
    metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey(job.c.job_id), primary_key=True),
    sa.Column("uid", sa.Text, primary_key=True),
    sa.Column("sink_id", sa.Integer, nullable=False),
    sa.Column("target", sa.Text),
    sa.UniqueConstraint("job_id", "sink_id"),
)

head = sa.Table(
    "head",
    metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey(job.c.job_id), primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("incarnation", sa.BigInteger, nullable=False, server_default="1"),
    sa.Column("checkpoint_id", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("owner_pid", sa.Integer),
    sa.Column("owner_backend_start", sa.TIMESTAMP(timezone=True)),
    sa.Column("owner_host", sa.Text),
    sa.Column("heartbeat", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("failures", sa.Integer, nullable=False, server_default="0"),
)

run = sa.Table(
    "run",
    metadata,
    sa.Column("run_id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
    sa.Column("job_id", sa.Text, sa.ForeignKey(job.c.job_id), nullable=False, index=True),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("started_at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now()),
    sa.Column("ended_at", sa.TIMESTAMP(timezone=True)),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("rows_read", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("rows_written", JSONB, nullable=False, server_default="{}"),
    sa.Column("rows_rejected", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("checkpoint_id", sa.BigInteger),
    sa.Column("restarts", sa.Integer, nullable=False, server_default="0"),
    sa.Column("exit_code", sa.Integer),
    sa.Column("error", sa.Text),
    _one_of("status", RunStatus),
)

checkpoint = sa.Table(
    "checkpoint",
    metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey(job.c.job_id), primary_key=True),
    sa.Column("incarnation", sa.BigInteger, primary_key=True),
    sa.Column("checkpoint_id", sa.BigInteger, primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("run_id", sa.BigInteger, sa.ForeignKey(run.c.run_id), nullable=False),
    sa.Column("trigger", sa.Text, nullable=False),
    sa.Column("completed_at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now()),
    sa.Column("duration_ms", sa.BigInteger, nullable=False),
    sa.Column("rows_read", sa.BigInteger, nullable=False),
    sa.Column("rows_written", JSONB, nullable=False),
    sa.Column("rows_written_total", JSONB, nullable=False),
    sa.Column("units", sa.Integer, nullable=False),
    sa.Column("positions", sa.Integer, nullable=False),
    sa.Column("splits", sa.BigInteger, nullable=False),
    sa.Column("chunks", sa.Integer, nullable=False),
    sa.Column("states", JSONB, nullable=False),
    sa.Column("states_digest", BYTEA, nullable=False),
    _one_of("trigger", Trigger),
)

savepoint = sa.Table(
    "savepoint",
    metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey(job.c.job_id), primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("incarnation", sa.BigInteger, nullable=False),
    sa.Column("checkpoint_id", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now()),
    sa.Column("digest", BYTEA, nullable=False),
    sa.ForeignKeyConstraint(
        ["job_id", "incarnation", "checkpoint_id"],
        [checkpoint.c.job_id, checkpoint.c.incarnation, checkpoint.c.checkpoint_id],
    ),
    sa.CheckConstraint("name ~ '^[A-Za-z][A-Za-z0-9_.-]{0,99}$'", name="name_is_no_number"),
)

savepoint_request = sa.Table(
    "savepoint_request",
    metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey(job.c.job_id), primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("stop", sa.Boolean, nullable=False),
    sa.Column("requested_at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now()),
)

position = sa.Table(
    "position",
    metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey(job.c.job_id), primary_key=True),
    sa.Column("incarnation", sa.BigInteger, primary_key=True),
    sa.Column("uid", sa.Text, primary_key=True),
    sa.Column("split_id", sa.Text, primary_key=True),
    sa.Column("checkpoint_id", sa.BigInteger, primary_key=True),
    sa.Column("position", JSONB, nullable=False),
    sa.Column("digest", BYTEA, nullable=False),
)

committable = sa.Table(
    "committable",
    metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey(job.c.job_id), primary_key=True),
    sa.Column("incarnation", sa.BigInteger, primary_key=True),
    sa.Column("checkpoint_id", sa.BigInteger, primary_key=True),
    sa.Column("uid", sa.Text, primary_key=True),
    sa.Column("subtask", sa.Integer, primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("rows", sa.BigInteger, nullable=False),
    sa.Column("payload", JSONB, nullable=False),
    sa.Column("digest", BYTEA, nullable=False),
)

state = sa.Table(
    "state",
    metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey(job.c.job_id), primary_key=True),
    sa.Column("incarnation", sa.BigInteger, primary_key=True),
    sa.Column("uid", sa.Text, primary_key=True),
    sa.Column("key_group", sa.SmallInteger, primary_key=True),
    sa.Column("checkpoint_id", sa.BigInteger, primary_key=True),
    sa.Column("sequence", sa.SmallInteger, nullable=False),
    sa.Column("rows", sa.BigInteger, nullable=False),
    sa.Column("content", BYTEA, nullable=False),
    sa.Column("digest", BYTEA, nullable=False),
    sa.CheckConstraint("key_group BETWEEN 0 AND 127", name="key_group_known"),
)

POSITION_DIGEST: LiteralString = (
    "sha256(convert_to(jsonb_build_array(job_id, incarnation, uid, split_id, checkpoint_id, position)::text, 'UTF8'))"
)
"""What ``digest`` must be in a row of ``etl.position``."""

COMMITTABLE_DIGEST: LiteralString = (
    "sha256(convert_to("
    "jsonb_build_array(job_id, incarnation, checkpoint_id, uid, subtask, epoch, rows, payload)::text, 'UTF8'))"
)
"""What ``digest`` must be in a row of ``etl.committable``."""

STATES_DIGEST: LiteralString = (
    "sha256(convert_to(jsonb_build_array(job_id, incarnation, checkpoint_id, chunks, states)::text, 'UTF8'))"
)
"""What ``states_digest`` must be in a row of ``etl.checkpoint``."""

SAVEPOINT_DIGEST: LiteralString = (
    "sha256(convert_to(jsonb_build_array(job_id, name, incarnation, checkpoint_id)::text, 'UTF8'))"
)
"""What ``digest`` must be in a row of ``etl.savepoint``."""

fence = sa.Table(
    "fence",
    metadata,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
)

commit_ledger = sa.Table(
    "commit_ledger",
    metadata,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("incarnation", sa.BigInteger, primary_key=True),
    sa.Column("sink_id", sa.Integer, primary_key=True),
    sa.Column("subtask", sa.Integer, primary_key=True),
    sa.Column("checkpoint_id", sa.BigInteger, primary_key=True),
    sa.Column("epoch", sa.BigInteger, primary_key=True),
    sa.Column("rows", sa.BigInteger, nullable=False),
    sa.Column("written_at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now()),
)

write_ahead_log = sa.Table(
    "write_ahead_log",
    metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey(job.c.job_id), primary_key=True),
    sa.Column("incarnation", sa.BigInteger, primary_key=True),
    sa.Column("sink_id", sa.Integer, primary_key=True),
    sa.Column("subtask", sa.Integer, primary_key=True),
    sa.Column("checkpoint_id", sa.BigInteger, primary_key=True),
    sa.Column("epoch", sa.BigInteger, primary_key=True),
    sa.Column("sequence", sa.Integer, primary_key=True),
    sa.Column("rows", sa.BigInteger, nullable=False),
    sa.Column("segment", BYTEA, nullable=False),
)
