"""State of operators, by key group."""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE etl.state (
    job_id        text     NOT NULL REFERENCES etl.job (job_id),
    incarnation   bigint   NOT NULL,
    uid           text     NOT NULL,
    key_group     smallint NOT NULL CONSTRAINT key_group_known CHECK (key_group BETWEEN 0 AND 127),
    checkpoint_id bigint   NOT NULL,
    sequence      smallint NOT NULL,
    rows          bigint   NOT NULL,
    content       bytea    NOT NULL,
    digest        bytea    NOT NULL,
    PRIMARY KEY (job_id, incarnation, uid, key_group, checkpoint_id)
);
-- Chunks are compressed already.
ALTER TABLE etl.state ALTER COLUMN content SET STORAGE EXTERNAL;
COMMENT ON TABLE etl.state IS
    'What operators remember: by key group a chain of chunks, a full one (sequence 0) and then what has changed.';
COMMENT ON COLUMN etl.state.digest IS 'SHA-256 of the other columns, each with its length.';

ALTER TABLE etl.checkpoint
    ADD COLUMN chunks integer NOT NULL DEFAULT 0,
    ADD COLUMN states jsonb NOT NULL DEFAULT '{}',
    ADD COLUMN states_digest bytea;
UPDATE etl.checkpoint SET states_digest = sha256(convert_to(
    jsonb_build_array(job_id, incarnation, checkpoint_id, chunks, states)::text, 'UTF8'));
ALTER TABLE etl.checkpoint
    ALTER COLUMN chunks DROP DEFAULT, ALTER COLUMN states DROP DEFAULT, ALTER COLUMN states_digest SET NOT NULL;
COMMENT ON COLUMN etl.checkpoint.chunks IS 'Rows of etl.state that it wrote.';
COMMENT ON COLUMN etl.checkpoint.states IS
    'By operator: how many rows of etl.state a restore of it reads, since which checkpoint, and how it was declared.';
COMMENT ON COLUMN etl.checkpoint.states_digest IS 'SHA-256 of its number, chunks and states, as a JSON array.';
"""

VIEWS = """
CREATE VIEW etl.operator_states AS
SELECT j.name AS job, s.uid AS operator, count(DISTINCT s.key_group) AS key_groups, count(*) AS chunks,
       sum(length(s.content)) AS bytes, max(s.checkpoint_id) AS last_changed
FROM etl.state s JOIN etl.head h USING (job_id, incarnation) JOIN etl.job j USING (job_id)
GROUP BY j.name, s.uid;
COMMENT ON VIEW etl.operator_states IS 'Size of what each operator has stored, older checkpoints included.';
"""


def upgrade() -> None:
    """Create the table; jobs that are there have no state."""
    op.execute(TABLES)
    op.execute(VIEWS)
