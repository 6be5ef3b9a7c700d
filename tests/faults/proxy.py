"""A TCP proxy before the server that loses one statement or the answer to it, and then the connection.

It reads the frontend's messages as they are: connections through it use neither TLS nor GSS encryption.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo

_CHUNK_BYTES = 1 << 16
READY_FOR_QUERY = b"Z\x00\x00\x00\x05"


class Loss(StrEnum):
    """What is lost."""

    REQUEST = "request lost"
    ANSWER = "answer lost"
    CONNECTION = "connection cut while the server works"


@dataclass(frozen=True, slots=True)
class Incident:
    """A loss at one statement.

    Attributes:
        statement: How it begins.
        occurrence: Which of them, from 1, over all connections.
        loss: What is lost.
    """

    statement: str
    occurrence: int
    loss: Loss

    def __str__(self) -> str:
        return f"{self.loss} at {self.statement}, occurrence {self.occurrence}"


class Proxy:
    """Passes bytes on between clients and one server until the incident.

    Args:
        server: Conninfo of the server.
        incident: What is to happen.

    Attributes:
        seen: How many of the incident's statements have come.
    """

    def __init__(self, server: str, incident: Incident) -> None:
        self.seen = 0
        self._place = _place_of(server)
        self._incident = incident
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def conninfo(self, url: str) -> str:
        """The same database through the proxy."""
        port = self._listener.getsockname()[1]
        return make_conninfo(
            url, host="127.0.0.1", port=port, sslmode="disable", gssencmode="disable", channel_binding="disable"
        )

    def close(self) -> None:
        """End all connections."""
        _end(self._listener)
        with self._lock:
            for one in self._sockets:
                _end(one)

    def _accept(self) -> None:
        # Ends when the listener is closed.
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX if isinstance(self._place, str) else socket.AF_INET)
        server.connect(self._place)
        with self._lock:
            self._sockets += [client, server]
        connection = _Connection(self, client, server)
        for pump in (connection.requests, connection.answers):
            threading.Thread(target=pump, daemon=True).start()

    def loss_at(self, data: bytes) -> Loss | None:
        """Count the statement, if it is one of those; what is to be lost at it."""
        with self._lock:
            if not _begins_with(data, self._incident.statement.encode()):
                return None
            self.seen += 1
            return self._incident.loss if self.seen == self._incident.occurrence else None


class _Connection:
    """Two sockets, and a thread for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._deaf = False

    def requests(self) -> None:
        """From the client to the server."""
        self._pump(self._client, self._request)

    def answers(self) -> None:
        """From the server to the client."""
        self._pump(self._server, self._answer)

    def _pump(self, incoming: socket.socket, handle: Any) -> None:
        with suppress(OSError):
            while data := incoming.recv(_CHUNK_BYTES):
                handle(data)
        self._cut()

    def _request(self, data: bytes) -> None:
        loss = self._proxy.loss_at(data)
        if loss is Loss.REQUEST:
            raise ConnectionResetError
        self._deaf = loss is Loss.ANSWER
        self._server.sendall(data)
        if loss is Loss.CONNECTION:
            raise ConnectionResetError

    def _answer(self, data: bytes) -> None:
        if not self._deaf:
            self._client.sendall(data)
        elif READY_FOR_QUERY in data:
            # The server has done it, and nobody will know.
            raise ConnectionResetError

    def _cut(self) -> None:
        _end(self._client)
        _end(self._server)


def _end(one: socket.socket) -> None:
    # Without the shutdown, close() tells the peer nothing while another thread is receiving.
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def _begins_with(data: bytes, statement: bytes) -> bool:
    """Whether a simple query, or the parse message of an extended one (of an unnamed statement), begins with it."""
    text = data[5:] if data[:1] == b"Q" else data[5:].lstrip(b"\0") if data[:1] == b"P" else b""
    return text.startswith(statement) and not (statement == b"COMMIT" and text.startswith(b"COMMIT PREPARED"))


def _place_of(server: str) -> Any:
    parts = conninfo_to_dict(server)
    host, port = str(parts.get("host") or "127.0.0.1"), int(str(parts.get("port") or 5432))
    return f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port)


@contextmanager
def proxied(server: str, incident: Incident) -> Iterator[Proxy]:
    """A proxy for the block."""
    proxy = Proxy(server, incident)
    try:
        yield proxy
    finally:
        proxy.close()
