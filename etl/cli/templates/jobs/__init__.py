"""The jobs of this project: one module a job."""
