"""Channels between processes: elements as frames on a socket of their own; a receiver without room does not read.

::

    1 byte   what follows: a schema, a batch, or the kind of another element
    8 bytes  its length, little-endian
    rest     schema and batch as Arrow IPC messages, other elements as MessagePack

The schema goes ahead of the first batch, and again whenever it changes.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

import msgspec
import pyarrow as pa

from etl.errors import InternalError
from etl.runtime.channel import ChannelClosedError
from etl.runtime.element import Barrier, Element, EndOfInput, Watermark
from etl.runtime.subtask import Output, Report, failure_of

SOCKET_BUFFER_BYTES = 1 << 20
"""Asked of the system, which may give less: what lies between two processes besides the receiver's channel."""

_HEADER = struct.Struct("<cQ")
_SCHEMA, _BATCH = b"s", b"b"
_PLAIN: dict[bytes, type[Watermark | Barrier | EndOfInput]] = {b"w": Watermark, b"c": Barrier, b"e": EndOfInput}
_KINDS = {element: kind for kind, element in _PLAIN.items()}


def channel_sockets() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new channel, the sender's and the receiver's. Nobody else can connect to them."""
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    return sender, receiver


def shut(end: socket.socket) -> None:
    """End a connection for both sides, whatever they wait for; the socket itself is closed by who uses it."""
    # It may have been closed by its user, or shut by the other side.
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def read_exactly(end: socket.socket, size_bytes: int) -> pa.Buffer | None:
    """So many bytes, None when the connection was ended before."""
    buffer = pa.allocate_buffer(size_bytes)
    rest = memoryview(buffer)
    while rest:
        try:
            read = end.recv_into(rest)
        except OSError:
            return None
        if not read:
            return None
        rest = rest[read:]
    return buffer


class ChannelSender:
    """The sender's end of a channel to another process; an output of one subtask.

    Args:
        end: The socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._schema: pa.Schema | None = None

    def put(self, element: Element) -> None:
        """Append an element, waiting for room.

        Raises:
            ChannelClosedError: The attempt was ended meanwhile, or the other process has.
        """
        if isinstance(element, pa.RecordBatch):
            if self._schema is None or not element.schema.equals(self._schema, check_metadata=True):
                self._send(_SCHEMA, element.schema.serialize())
                self._schema = element.schema
            self._send(_BATCH, element.serialize())
        elif type(element) in _KINDS:
            self._send(_KINDS[type(element)], msgspec.msgpack.encode(element))
        else:
            raise InternalError(f"{type(element).__name__} does not leave its process")

    def _send(self, kind: bytes, content: bytes | pa.Buffer) -> None:
        try:
            self._end.sendall(_HEADER.pack(kind, len(content)))
            self._end.sendall(content)
        except OSError as error:
            # The process at the other end is watched elsewhere: who sees it end says so.
            raise ChannelClosedError from error

    def close(self) -> None:
        """End all waiting, on both sides."""
        shut(self._end)


class ChannelReceiver:
    """The receiver's end of a channel from another process: hands on what comes, as there is room.

    Args:
        uid: Names the thread.
        end: The socket.
        channel: One of the gate of the subtask that receives.
        report: Where errors are reported to.
    """

    def __init__(self, uid: str, end: socket.socket, channel: Output, report: Report) -> None:
        self.uid = uid
        self._end = end
        self._channel = channel
        self._report = report
        self._schema: pa.Schema | None = None

    def run(self) -> None:
        """The thread's body: until the end of the input, or of the attempt."""
        try:
            element: Element | None = None
            while not isinstance(element, EndOfInput):
                element = self._receive()
                if element is not None:
                    self._channel.put(element)
        except ChannelClosedError:
            return
        except BaseException as error:  # noqa: BLE001 - everything is handed to the coordinator, which raises it
            self._report(failure_of(error))

    def _receive(self) -> Element | None:
        """The next element; None when it was a schema.

        Raises:
            ChannelClosedError: The connection was ended.
        """
        kind, size_bytes = _HEADER.unpack(self._read(_HEADER.size))
        content = self._read(size_bytes)
        if kind == _SCHEMA:
            self._schema = pa.ipc.read_schema(content)
            return None
        if kind == _BATCH:
            return pa.ipc.read_record_batch(content, self._schema)
        return msgspec.msgpack.decode(content, type=_PLAIN[kind])

    def _read(self, size_bytes: int) -> pa.Buffer:
        content = read_exactly(self._end, size_bytes)
        if content is None:
            raise ChannelClosedError
        return content

    def close(self) -> None:
        """End all waiting, on both sides."""
        shut(self._end)
