"""Savepoints, the requests for them, and how many rows a job has written up to each checkpoint."""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

CHECKPOINTS = """
ALTER TABLE etl.checkpoint DROP CONSTRAINT trigger_known;
ALTER TABLE etl.checkpoint ADD CONSTRAINT trigger_known
    CHECK (trigger IN ('interval', 'rows', 'end-of-input', 'stop', 'savepoint', 'rewind'));

ALTER TABLE etl.checkpoint ADD COLUMN rows_written_total jsonb NOT NULL DEFAULT '{}';
UPDATE etl.checkpoint c SET rows_written_total = coalesce((
    SELECT jsonb_object_agg(uid, rows) FROM (
        SELECT written.key AS uid, sum(written.value::bigint) AS rows
        FROM etl.checkpoint b, jsonb_each_text(b.rows_written) AS written
        WHERE b.job_id = c.job_id AND b.incarnation = c.incarnation AND b.checkpoint_id <= c.checkpoint_id
        GROUP BY written.key) AS summed), '{}');
ALTER TABLE etl.checkpoint ALTER COLUMN rows_written_total DROP DEFAULT;
COMMENT ON COLUMN etl.checkpoint.rows_written_total IS
    'Rows that the job has written by sink, up to this checkpoint, whatever it went back to in between.';
"""

TABLES = """
CREATE TABLE etl.savepoint (
    job_id        text        NOT NULL REFERENCES etl.job,
    name          text        NOT NULL CONSTRAINT name_is_no_number CHECK (name ~ '^[A-Za-z][A-Za-z0-9_.-]{0,99}$'),
    incarnation   bigint      NOT NULL,
    checkpoint_id bigint      NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT now(),
    digest        bytea       NOT NULL,
    PRIMARY KEY (job_id, name),
    FOREIGN KEY (job_id, incarnation, checkpoint_id) REFERENCES etl.checkpoint
);
COMMENT ON TABLE etl.savepoint IS 'Names of completed checkpoints. One that has a name is not pruned.';
COMMENT ON COLUMN etl.savepoint.digest IS 'SHA-256 of job, name, incarnation and number, as a JSON array.';

CREATE TABLE etl.savepoint_request (
    job_id       text        NOT NULL REFERENCES etl.job,
    name         text        NOT NULL,
    stop         boolean     NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (job_id, name)
);
COMMENT ON TABLE etl.savepoint_request IS
    'Asks the running job for a savepoint; it goes in the transaction that makes the savepoint.';
"""

VIEWS = """
CREATE VIEW etl.savepoints AS
SELECT j.name AS job, s.name AS savepoint, s.checkpoint_id AS checkpoint, s.incarnation, s.created_at,
       c.completed_at, c.rows_written_total
FROM etl.savepoint s JOIN etl.job j USING (job_id) JOIN etl.checkpoint c USING (job_id, incarnation, checkpoint_id);
COMMENT ON VIEW etl.savepoints IS 'Checkpoints that have a name.';
"""


def upgrade() -> None:
    """Create the tables; the checkpoints that are kept count the rows from the first of them on."""
    op.execute(CHECKPOINTS)
    op.execute(TABLES)
    op.execute(VIEWS)
