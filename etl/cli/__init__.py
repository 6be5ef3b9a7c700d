"""The command `etl`: one command family a file; the composition root of the project."""
