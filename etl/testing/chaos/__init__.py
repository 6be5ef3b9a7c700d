"""A crash test for anybody's job: killed at every step of the protocol, run again, compared with undisturbed runs.

The job runs under names of its own, into copies of its targets that are removed afterwards; its positions and its
targets are not touched. docs/chaos.md says what that shows and what it does not.

================  =================================================================================
module            what it holds
================  =================================================================================
``experiment``    the whole test: undisturbed runs, kills, verdicts
``rehearsal``     the job under another name, aimed at a scratch place
``sample``        a source cut down to its first rows
``ground``        scratch places, and the removal of all that was left
``process``       a run in a process of its own, killed at a step if wanted
``zygote``        a warm process that forks these processes
``comparison``    which rows were lost, which came twice
``suspects``      what on the way to a sink may yield something else the next time
``report``        what came of it, for people and programs
================  =================================================================================
"""

from etl.runtime.loader import JobLoader
from etl.testing.chaos.experiment import MINUTES, OCCURRENCES, ChaosOptions, ChaosPlan, crash_test
from etl.testing.chaos.report import ChaosReport
from etl.testing.chaos.zygote import ChaosStoppedError, StopRequest

__all__ = [
    "MINUTES",
    "OCCURRENCES",
    "ChaosOptions",
    "ChaosPlan",
    "ChaosReport",
    "ChaosStoppedError",
    "JobLoader",
    "StopRequest",
    "crash_test",
]
