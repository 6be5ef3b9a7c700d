"""Exactly-once ETL on nothing but PostgreSQL."""
