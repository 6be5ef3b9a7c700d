"""A TCP proxy before the server that loses one message or the answer to it, and then the connection.

It reads the frontend's messages as they are: connections through it use neither TLS nor GSS encryption.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo

_CHUNK_BYTES = 1 << 16
READY_FOR_QUERY = b"Z\x00\x00\x00\x05"
COPY_DATA = "rows of a COPY"
"""Stands for a statement: a message that holds rows of a COPY."""


class Loss(StrEnum):
    """What is lost."""

    REQUEST = "request lost"
    ANSWER = "answer lost"
    CONNECTION = "connection cut while the server works"
    HALF = "connection reset in the middle of the message"


@dataclass(frozen=True, slots=True)
class Incident:
    """A loss at one statement.

    Attributes:
        statement: How it begins, or :data:`COPY_DATA`.
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
        incident: What is to happen; None when nothing is.

    Attributes:
        seen: How many of the incident's statements have come.
    """

    def __init__(self, server: str, incident: Incident | None = None) -> None:
        self.seen = 0
        self._place = _place_of(server)
        self._incident = incident
        self._lock = threading.Lock()
        self._connections: list[ProxiedConnection] = []
        self._listen(0)

    def _listen(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=[self._listener], daemon=True).start()

    def conninfo(self, url: str) -> str:
        """The same database through the proxy."""
        return make_conninfo(
            url, host="127.0.0.1", port=self.port, sslmode="disable", gssencmode="disable", channel_binding="disable"
        )

    def close(self) -> None:
        """End all connections."""
        end(self._listener)
        for one in self.connections():
            one.cut()

    def connections(self) -> list[ProxiedConnection]:
        """All that were ever made."""
        with self._lock:
            return list(self._connections)

    def _accept(self, listener: socket.socket) -> None:
        # Ends when the listener is closed.
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX if isinstance(self._place, str) else socket.AF_INET)
        server.connect(self._place)
        for one in (client, server):
            if one.family == socket.AF_INET:
                # Each piece at once: else the kernel would wait for the confirmation of the one before.
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = ProxiedConnection(self, client, server)
        with self._lock:
            self._connections.append(connection)
        for pump in (connection.requests, connection.answers):
            threading.Thread(target=pump, daemon=True).start()

    def forward(self, data: bytes, to: socket.socket) -> None:
        """Pass bytes on."""
        to.sendall(data)

    def ended(self, connection: ProxiedConnection) -> None:
        """One of its sides has ended: so does the other."""
        connection.cut()

    def loss_at(self, data: bytes) -> Loss | None:
        """Count the message, if it is one of those; what is to be lost at it."""
        with self._lock:
            if self._incident is None or not _is_about(data, self._incident.statement):
                return None
            self.seen += 1
            return self._incident.loss if self.seen == self._incident.occurrence else None


class ProxiedConnection:
    """Two sockets, and a thread for each direction.

    Attributes:
        client: Towards the client.
        server: Towards the server.
    """

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self._proxy = proxy
        self._deaf = False
        self._rude = False

    def requests(self) -> None:
        """From the client to the server."""
        self._pump(self.client, self._request)

    def answers(self) -> None:
        """From the server to the client."""
        self._pump(self.server, self._answer)

    def _pump(self, incoming: socket.socket, handle: Callable[[bytes], None]) -> None:
        with suppress(OSError):
            while data := incoming.recv(_CHUNK_BYTES):
                handle(data)
        self._proxy.ended(self)

    def _request(self, data: bytes) -> None:
        loss = self._proxy.loss_at(data)
        if loss is Loss.REQUEST:
            raise ConnectionResetError
        self._deaf = loss is Loss.ANSWER
        if loss is Loss.HALF:
            self._proxy.forward(data[: len(data) // 2], self.server)
            self.reset()
            raise ConnectionResetError
        self._proxy.forward(data, self.server)
        if loss is Loss.CONNECTION:
            raise ConnectionResetError

    def _answer(self, data: bytes) -> None:
        if not self._deaf:
            self._proxy.forward(data, self.client)
        elif READY_FOR_QUERY in data:
            # The server has done it, and nobody will know.
            raise ConnectionResetError

    def cut(self) -> None:
        """End both sides, as a program that closes its sockets does."""
        if not self._rude:
            end(self.client)
            end(self.server)

    def reset(self) -> None:
        """End both sides by a reset instead."""
        # Told to the pumps first: their closing would say goodbye in the ordinary way.
        self._rude = True
        for one in (self.client, self.server):
            with suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                # Wakes the pump, without which close() would do nothing, and tells the peer nothing yet.
                one.shutdown(socket.SHUT_RD)
            one.close()


def end(one: socket.socket) -> None:
    """Close a socket that another thread may be using."""
    # Without the shutdown, close() tells the peer nothing while another thread is receiving.
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def _is_about(data: bytes, statement: str) -> bool:
    """Whether this is a simple query, or the parse message of an extended one, that begins with the statement."""
    if statement == COPY_DATA:
        return data[:1] == b"d"
    text = data[5:] if data[:1] == b"Q" else data[5:].lstrip(b"\0") if data[:1] == b"P" else b""
    return text.startswith(statement.encode()) and not (statement == "COMMIT" and text.startswith(b"COMMIT PREPARED"))


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
