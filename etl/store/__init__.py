"""The only code that speaks SQL to the schema ``etl``, and the embedded server that may hold it."""
