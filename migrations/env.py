"""Alembic environment: always run by the library, on a connection that the caller opened."""

from alembic import context

config = context.config
context.configure(
    connection=config.attributes["connection"],
    version_table_schema=config.attributes["schema"],
    target_metadata=None,
)
context.run_migrations()
