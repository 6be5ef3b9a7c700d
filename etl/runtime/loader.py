"""How another process comes by a job."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from etl.job import Job


@dataclass(frozen=True, slots=True)
class JobLoader:
    """How another process comes by the job: the user's module is imported there anew, as by every run.

    Attributes:
        module: Where the function is.
        function: Its name; it returns the job.
        arguments: What it is called with.
    """

    module: str
    function: str
    arguments: tuple[str, ...] = ()

    def load(self) -> Job:
        """The job.

        Raises:
            ConfigurationError: Whatever the function says.
        """
        job = getattr(import_module(self.module), self.function)(*self.arguments)
        assert isinstance(job, Job)
        return job
