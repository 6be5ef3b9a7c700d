"""What users need to prove what is theirs: contract suites and stand-ins for connectors, a crash test for jobs."""
