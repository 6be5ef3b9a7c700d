"""The engine: runs a job graph as subtasks over channels, with barriers, checkpoints, commits and recovery."""
