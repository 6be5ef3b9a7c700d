"""Checkpoints count the rows that belong to them, so that rows deleted by hand are noticed."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

COLUMNS = """
ALTER TABLE etl.checkpoint ADD COLUMN units integer, ADD COLUMN positions integer, ADD COLUMN splits bigint;

UPDATE etl.checkpoint c SET
    units = (SELECT count(*) FROM etl.committable u
             WHERE (u.job_id, u.incarnation, u.checkpoint_id) = (c.job_id, c.incarnation, c.checkpoint_id)),
    positions = (SELECT count(*) FROM etl.position p
                 WHERE (p.job_id, p.incarnation, p.checkpoint_id) = (c.job_id, c.incarnation, c.checkpoint_id)),
    splits = (SELECT count(DISTINCT (p.uid, p.split_id)) FROM etl.position p
              WHERE (p.job_id, p.incarnation) = (c.job_id, c.incarnation) AND p.checkpoint_id <= c.checkpoint_id);

ALTER TABLE etl.checkpoint
    ALTER COLUMN units SET NOT NULL, ALTER COLUMN positions SET NOT NULL, ALTER COLUMN splits SET NOT NULL;
COMMENT ON COLUMN etl.checkpoint.units IS 'Rows of etl.committable that belong to it.';
COMMENT ON COLUMN etl.checkpoint.positions IS 'Rows of etl.position that it wrote.';
COMMENT ON COLUMN etl.checkpoint.splits IS 'Splits that have a position, up to this checkpoint.';
"""


def upgrade() -> None:
    """Add the counts, and fill them in for checkpoints that are there."""
    op.execute(COLUMNS)
