"""Worker processes: where subtasks that run Python need cores of their own."""
