"""Sinks remember what they wrote to, so that a job can say when a sink's target changes."""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COLUMN = """
ALTER TABLE etl.sink ADD COLUMN target text;
COMMENT ON COLUMN etl.sink.target IS 'What the sink wrote to last; NULL until a run of this version has recorded it.';
"""


def upgrade() -> None:
    """Add the column; what former versions wrote to is not known."""
    op.execute(COLUMN)
