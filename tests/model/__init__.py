"""The protocol as a model, explored to the end: every crash, every zombie, every order in which runs can meet.

===============  =================================================================================
module           what it holds
===============  =================================================================================
``world``        what a state consists of: the databases, and runs with their threads
``mutants``      ways to get the protocol wrong, by name
``protocol``     the steps of a run, as the engine takes them
``invariants``   what must hold in every state
``exploration``  every state that can be reached, and the shortest way to a wrong one
===============  =================================================================================

A step is one thing that happens atomically at a server, with the events that the engine emits around it. The names of
these events are the engine's: ``test_conformance`` holds what a run emits on a real server against the model.
"""
