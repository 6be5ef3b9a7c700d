"""Example jobs: each runs as it stands, and a test compares what it writes with an independent computation."""
