"""The view of jobs says of a job that another role runs that it is running."""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# When a session began is hidden from other roles; that it is there is not.
VIEW = """
CREATE OR REPLACE VIEW etl.jobs AS
SELECT j.name AS job, h.checkpoint_id AS checkpoint, c.completed_at AS last_completed_at,
       a.pid IS NOT NULL AS running, h.owner_host AS owner_host, h.owner_pid AS owner_backend,
       h.epoch, h.incarnation, h.failures, r.run_id AS last_run, r.status AS last_status, r.error AS last_error
FROM etl.job j
JOIN etl.head h USING (job_id)
LEFT JOIN etl.checkpoint c USING (job_id, incarnation, checkpoint_id)
LEFT JOIN pg_catalog.pg_stat_activity a
       ON a.pid = h.owner_pid AND coalesce(a.backend_start = h.owner_backend_start, true)
LEFT JOIN LATERAL (SELECT * FROM etl.run WHERE run.job_id = j.job_id ORDER BY run_id DESC LIMIT 1) r ON true;
"""


def upgrade() -> None:
    """Replace the view."""
    op.execute(VIEW)
