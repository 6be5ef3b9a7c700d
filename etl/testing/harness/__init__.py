"""Plays a job on scripted input, in one thread and without a database.

::

    marks ──► script ──► player ──► attempt: the job's own subtasks, wired as in a run, driven step by step
                           │
                           └──► memory: positions, encoded state and committed rows of the last checkpoint ──► result

Sources and sinks are replaced. All between them is what a run has: chains, exchange, barriers, operators, the bytes
of state and their restore.
"""
