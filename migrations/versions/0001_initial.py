"""Jobs, heads, runs, checkpoints, positions, committables, fence, ledger, write-ahead log; views for people."""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE etl.job (
    job_id text PRIMARY KEY CONSTRAINT job_id_is_hex CHECK (job_id ~ '^[0-9a-f]{16}$'),
    name text NOT NULL UNIQUE,
    created_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE etl.job IS 'One row a job. The id is random, so that public identifiers made of it never clash.';

CREATE TABLE etl.sink (
    job_id text NOT NULL REFERENCES etl.job,
    uid text NOT NULL,
    sink_id integer NOT NULL,
    PRIMARY KEY (job_id, uid),
    UNIQUE (job_id, sink_id)
);
COMMENT ON TABLE etl.sink IS 'Small numbers of sinks, for identifiers such as those of prepared transactions.';

CREATE TABLE etl.head (
    job_id text PRIMARY KEY REFERENCES etl.job,
    epoch bigint NOT NULL DEFAULT 0,
    incarnation bigint NOT NULL DEFAULT 1,
    checkpoint_id bigint NOT NULL DEFAULT 0,
    owner_pid integer,
    owner_backend_start timestamptz,
    owner_host text,
    heartbeat bigint NOT NULL DEFAULT 0,
    failures integer NOT NULL DEFAULT 0
);
COMMENT ON TABLE etl.head IS 'Fencing token, last completed checkpoint, owner of a job. Locked first, by key.';
COMMENT ON COLUMN etl.head.failures IS 'Failed attempts since the last completed checkpoint; outlives the process.';

CREATE TABLE etl.run (
    run_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id text NOT NULL REFERENCES etl.job,
    status text NOT NULL CONSTRAINT status_known
        CHECK (status IN ('running', 'succeeded', 'stopped', 'failed', 'fenced', 'crashed')),
    epoch bigint NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz,
    host text NOT NULL,
    pid integer NOT NULL,
    version text NOT NULL,
    rows_read bigint NOT NULL DEFAULT 0,
    rows_written jsonb NOT NULL DEFAULT '{}',
    rows_rejected bigint NOT NULL DEFAULT 0,
    checkpoint_id bigint,
    restarts integer NOT NULL DEFAULT 0,
    exit_code integer,
    error text
);
CREATE INDEX ix_etl_run_job_id ON etl.run (job_id);

CREATE TABLE etl.checkpoint (
    job_id text NOT NULL REFERENCES etl.job,
    incarnation bigint NOT NULL,
    checkpoint_id bigint NOT NULL,
    epoch bigint NOT NULL,
    run_id bigint NOT NULL REFERENCES etl.run,
    trigger text NOT NULL CONSTRAINT trigger_known CHECK (trigger IN ('interval', 'rows', 'end-of-input', 'stop')),
    completed_at timestamptz NOT NULL DEFAULT now(),
    duration_ms bigint NOT NULL,
    rows_read bigint NOT NULL,
    rows_written jsonb NOT NULL,
    PRIMARY KEY (job_id, incarnation, checkpoint_id)
);
COMMENT ON TABLE etl.checkpoint IS 'Completed checkpoints; the newest of a job is the one its head names.';

CREATE TABLE etl.position (
    job_id text NOT NULL REFERENCES etl.job,
    incarnation bigint NOT NULL,
    uid text NOT NULL,
    split_id text NOT NULL,
    checkpoint_id bigint NOT NULL,
    position jsonb NOT NULL,
    PRIMARY KEY (job_id, incarnation, uid, split_id, checkpoint_id)
);
COMMENT ON TABLE etl.position IS
    'Where the next read of a split starts, written when it moves: the newest row up to a checkpoint counts.';

CREATE TABLE etl.committable (
    job_id text NOT NULL REFERENCES etl.job,
    incarnation bigint NOT NULL,
    checkpoint_id bigint NOT NULL,
    uid text NOT NULL,
    subtask integer NOT NULL,
    epoch bigint NOT NULL,
    rows bigint NOT NULL,
    payload jsonb NOT NULL,
    PRIMARY KEY (job_id, incarnation, checkpoint_id, uid, subtask)
);
COMMENT ON TABLE etl.committable IS 'What each sink staged for a completed checkpoint and how to find it.';

CREATE TABLE etl.fence (job_id text PRIMARY KEY, epoch bigint NOT NULL);
COMMENT ON TABLE etl.fence IS 'Which epoch of a job may write to this database. Writers hold the row FOR SHARE.';

CREATE TABLE etl.commit_ledger (
    job_id text NOT NULL,
    incarnation bigint NOT NULL,
    sink_id integer NOT NULL,
    subtask integer NOT NULL,
    checkpoint_id bigint NOT NULL,
    epoch bigint NOT NULL,
    rows bigint NOT NULL,
    written_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (job_id, incarnation, sink_id, subtask, checkpoint_id, epoch)
);
COMMENT ON TABLE etl.commit_ledger IS 'Written in the transaction that carries the rows: proof that they are there.';

CREATE TABLE etl.write_ahead_log (
    job_id text NOT NULL REFERENCES etl.job,
    incarnation bigint NOT NULL,
    sink_id integer NOT NULL,
    subtask integer NOT NULL,
    checkpoint_id bigint NOT NULL,
    epoch bigint NOT NULL,
    sequence integer NOT NULL,
    rows bigint NOT NULL,
    segment bytea STORAGE EXTERNAL NOT NULL,
    PRIMARY KEY (job_id, incarnation, sink_id, subtask, checkpoint_id, epoch, sequence)
);
COMMENT ON TABLE etl.write_ahead_log IS 'Rows staged by write-ahead sinks, as compressed Arrow IPC segments.';
"""

VIEWS = """
CREATE VIEW etl.jobs AS
SELECT j.name AS job, h.checkpoint_id AS checkpoint, c.completed_at AS last_completed_at,
       a.pid IS NOT NULL AS running, h.owner_host AS owner_host, h.owner_pid AS owner_backend,
       h.epoch, h.incarnation, h.failures, r.run_id AS last_run, r.status AS last_status, r.error AS last_error
FROM etl.job j
JOIN etl.head h USING (job_id)
LEFT JOIN etl.checkpoint c USING (job_id, incarnation, checkpoint_id)
LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = h.owner_pid AND a.backend_start = h.owner_backend_start
LEFT JOIN LATERAL (SELECT * FROM etl.run WHERE run.job_id = j.job_id ORDER BY run_id DESC LIMIT 1) r ON true;

CREATE VIEW etl.runs AS
SELECT r.run_id, j.name AS job, r.status, r.started_at, r.ended_at,
       round(extract(epoch FROM coalesce(r.ended_at, now()) - r.started_at), 3) AS duration_s,
       r.rows_read, r.rows_written, r.rows_rejected, r.checkpoint_id AS checkpoint, r.restarts, r.exit_code, r.error,
       r.host, r.pid, r.version
FROM etl.run r JOIN etl.job j USING (job_id);

CREATE VIEW etl.checkpoints AS
SELECT j.name AS job, c.incarnation, c.checkpoint_id AS checkpoint, c.completed_at, c.trigger, c.duration_ms,
       c.rows_read, c.rows_written, c.run_id,
       c.incarnation = h.incarnation AND c.checkpoint_id = h.checkpoint_id AS current
FROM etl.checkpoint c JOIN etl.job j USING (job_id) JOIN etl.head h USING (job_id);

CREATE VIEW etl.positions AS
SELECT DISTINCT ON (j.name, p.uid, p.split_id)
       j.name AS job, p.uid, p.split_id AS split, p.position, p.checkpoint_id AS checkpoint
FROM etl.position p JOIN etl.job j USING (job_id) JOIN etl.head h USING (job_id)
WHERE p.incarnation = h.incarnation AND p.checkpoint_id <= h.checkpoint_id
ORDER BY j.name, p.uid, p.split_id, p.checkpoint_id DESC;
"""


def upgrade() -> None:
    """Create everything."""
    op.execute(TABLES)
    op.execute(VIEWS)
