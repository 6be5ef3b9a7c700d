"""Positions and handles carry a digest of what they say, so that one changed by hand is noticed."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

COLUMNS = """
ALTER TABLE etl.position ADD COLUMN digest bytea;
ALTER TABLE etl.committable ADD COLUMN digest bytea;

UPDATE etl.position SET digest = sha256(convert_to(
    jsonb_build_array(job_id, incarnation, uid, split_id, checkpoint_id, position)::text, 'UTF8'));
UPDATE etl.committable SET digest = sha256(convert_to(
    jsonb_build_array(job_id, incarnation, checkpoint_id, uid, subtask, epoch, rows, payload)::text, 'UTF8'));

ALTER TABLE etl.position ALTER COLUMN digest SET NOT NULL;
ALTER TABLE etl.committable ALTER COLUMN digest SET NOT NULL;
COMMENT ON COLUMN etl.position.digest IS 'SHA-256 of the other columns, as a JSON array.';
COMMENT ON COLUMN etl.committable.digest IS 'SHA-256 of the other columns, as a JSON array.';
"""


def upgrade() -> None:
    """Add the digests; what is there counts as unchanged."""
    op.execute(COLUMNS)
