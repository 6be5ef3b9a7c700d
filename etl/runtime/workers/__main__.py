"""What a worker process runs; started by :mod:`etl.runtime.workers.fleet` alone."""

from etl.runtime.workers.process import main

main()
