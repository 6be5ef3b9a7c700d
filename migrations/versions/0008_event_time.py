"""How far event time has come in each operator, and how many rows were late."""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

# Moments before 4713 BC are none of timestamptz.
VIEW = """
DROP VIEW etl.operator_states;
CREATE VIEW etl.operator_states AS
SELECT j.name AS job, o.uid AS operator, s.key_groups, s.chunks, s.bytes, s.last_changed,
       CASE WHEN (o.state ->> 'watermark')::bigint > -210866803200000000
            THEN 'epoch'::timestamptz + (o.state ->> 'watermark')::bigint * interval '1 microsecond'
            WHEN o.state ->> 'watermark' IS NOT NULL THEN '-infinity'
       END AS event_time,
       coalesce((o.state ->> 'late_rows')::bigint, 0) AS late_rows
FROM etl.head h
JOIN etl.job j USING (job_id)
JOIN etl.checkpoint c USING (job_id, incarnation, checkpoint_id)
CROSS JOIN LATERAL jsonb_each(c.states) AS o (uid, state)
CROSS JOIN LATERAL (
    SELECT count(DISTINCT key_group) AS key_groups, count(*) AS chunks, coalesce(sum(length(content)), 0) AS bytes,
           max(checkpoint_id) AS last_changed
    FROM etl.state
    WHERE job_id = h.job_id AND incarnation = h.incarnation AND uid = o.uid
) AS s;
COMMENT ON VIEW etl.operator_states IS
    'What each operator has stored, older checkpoints included; up to where it has closed event time; its late rows.';
"""


def upgrade() -> None:
    """Replace the view."""
    op.execute(VIEW)
