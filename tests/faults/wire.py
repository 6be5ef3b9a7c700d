"""A network between the runs and the server that falls silent, stalls, is slow, or refuses to connect.

A peer that is silent must not even confirm what it gets: a proxy's sockets do that for it as long as the kernel serves
them. So they get a packet filter that drops everything before it reaches TCP; some kernels let only root attach one.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.faults.fault import RunRequest
from tests.faults.proxy import ProxiedConnection, Proxy, end

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_DROP_EVERYTHING = struct.pack("HBBI", 0x06, 0, 0, 0)
"""One instruction of a classic packet filter: return 0 bytes."""

TIMEOUTS = {
    "connect_timeout": 2,
    "keepalives_idle": 1,
    "keepalives_interval": 1,
    "keepalives_count": 1,
    "tcp_user_timeout": 1000,
}
"""What the URLs of the runs say, so that nobody has to wait for the half minute of the defaults."""


class Wire(Proxy):
    """A proxy whose behaviour the test changes while runs are under way."""

    def __init__(self, server: str) -> None:
        self._flowing = threading.Event()
        self._flowing.set()
        self._piece_bytes = 0
        self._pause_s = 0.0
        self._swallowing: set[socket.socket] = set()
        super().__init__(server)

    def conninfo(self, url: str) -> str:
        """The same database over this wire, with short timeouts unless the URL has its own."""
        return make_conninfo(super().conninfo(url), **{**TIMEOUTS, **_said(url)})

    def forward(self, data: bytes, to: socket.socket) -> None:
        """Pass bytes on, once they flow, and as slowly as was asked for."""
        self._flowing.wait()
        if to in self._swallowing:
            return
        size = self._piece_bytes or len(data)
        for start in range(0, len(data), size):
            to.sendall(data[start : start + size])
            if self._pause_s:
                threading.Event().wait(self._pause_s)

    def silence(self) -> None:
        """Neither side of the connections there are hears anything any more, not even that its bytes have come."""
        for one in self.connections():
            _drop_packets(one.client)
            _drop_packets(one.server)

    def isolate(self) -> None:
        """The same, and nobody answers to new connections either."""
        _drop_packets(self._listener)
        self.silence()

    def lose_packets(self) -> None:
        """Packets are dropped until :meth:`recover`; connections that were not given up by then go on."""
        self.isolate()

    def recover(self) -> None:
        """Packets get through again."""
        _pass_packets(self._listener)
        for one in self.connections():
            with suppress(OSError):
                _pass_packets(one.client)
                _pass_packets(one.server)

    def stall(self) -> None:
        """Bytes are confirmed, and delivered later."""
        self._flowing.clear()

    def go_on(self) -> None:
        """Deliver what has waited."""
        self._flowing.set()

    def swallow(self) -> None:
        """What comes on the connections there are is confirmed and never delivered, nor their end; new ones work."""
        self._swallowing.update(one for pair in self.connections() for one in (pair.client, pair.server))

    def ended(self, connection: ProxiedConnection) -> None:
        """One of its sides has ended."""
        if connection.client not in self._swallowing:
            super().ended(connection)

    def slow_down(self, piece_bytes: int, pause_s: float) -> None:
        """Deliver in pieces, with a pause after each."""
        self._piece_bytes, self._pause_s = piece_bytes, pause_s

    def refuse(self) -> None:
        """Reset the connections there are, and refuse new ones."""
        end(self._listener)
        for one in self.connections():
            one.reset()

    def admit(self) -> None:
        """Take new connections again, at the same place."""
        self._listen(self.port)

    def close(self) -> None:
        """End all connections."""
        self.go_on()
        super().close()


def over(wire: Wire, request: RunRequest) -> RunRequest:
    """The same run over the wire."""
    return replace(request, store_url=wire.conninfo(request.store_url), other_url=wire.conninfo(request.other_url))


def _drop_packets(one: socket.socket) -> None:
    instructions = ctypes.create_string_buffer(_DROP_EVERYTHING)
    try:
        one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(instructions)))
    except PermissionError:
        pytest.skip("this kernel lets only root filter the packets of a socket")
    except OSError as error:
        # One that was closed meanwhile hears nothing anyway.
        if error.errno != errno.EBADF:
            raise


def _pass_packets(one: socket.socket) -> None:
    one.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _said(url: str) -> dict[str, Any]:
    return {key: value for key, value in conninfo_to_dict(url).items() if key in TIMEOUTS}


def tcp_url(url: str, connection: psycopg.Connection[Any]) -> str:
    """A URL over TCP: over a Unix socket the server would never be left by its client without a word."""
    if sys.platform != "linux":
        pytest.skip("packet filters on sockets are Linux's")
    if not str(conninfo_to_dict(url).get("host") or "").startswith("/"):
        return url
    row = connection.execute("SELECT current_setting('port'), current_setting('listen_addresses')").fetchone()
    assert row is not None
    if row[1] == "":
        pytest.skip("the server does not listen on TCP")
    return make_conninfo(url, host="127.0.0.1", port=row[0])


@contextmanager
def wired(url: str, connection: psycopg.Connection[Any]) -> Iterator[Wire]:
    """A wire to a server for the block."""
    wire = Wire(tcp_url(url, connection))
    try:
        yield wire
    finally:
        wire.close()
