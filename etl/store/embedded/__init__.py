"""A private PostgreSQL for people who have none: started on demand, shared by all commands, stopped by the last.

Nobody has to clean up after a ``kill -9``, of a command or of the server: who uses the server and whether it runs is
known by locks that the kernel frees with the process that held them, never by lists of process ids.

Everything lies in ``<state directory>/postgresql``::

    start.lock      held while the server is being made, started or stopped
    users.lock      held, shared, by every command that uses the server
    server.lock     held by the server's processes themselves: free means that none of them is left
    keep-running    exists between "etl server start" and "etl server stop"
    password, port, server.conf
    cluster/        what belongs to the account the server runs under: data/, run/ (sockets), server.log
    binaries-…/     a copy of the binaries, where that account could not reach the installed ones
"""

from __future__ import annotations

from etl.store.embedded.server import EmbeddedServer, ServerState, ServerStatus, StopOutcome

__all__ = ["EmbeddedServer", "ServerState", "ServerStatus", "StopOutcome"]
