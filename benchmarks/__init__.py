"""Benchmarks that fail when a bound is missed: ``python -m benchmarks load`` and ``python -m benchmarks startup``.

Nothing here imports the engine into the measuring process: a child's peak memory would count its parent's.
"""
