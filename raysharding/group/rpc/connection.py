"""One TCP connection between the driver and a rank, and its frames; see Note [Lines] in `driver_connections.py`.

Note [Signed frames]: a frame holds pickles, so who could put one into a connection could run code. Each carries an
HMAC-SHA256 of itself, its number and its direction, under a key that the driver made for this connection and told the
rank through Ray. A frame that is forged, repeated, or left out ends the connection. What frames say is not hidden.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import socket
import struct
from typing import Literal

KEY_BYTES = 32
GREETING_BYTES = 32

_HEADER = struct.Struct("!Q32s")
_NUMBER = struct.Struct("!cQ")
_CHUNK = 256 << 10
_MAX_FRAME_BYTES = 16 << 20
"""Far above what either end sends: the length of a frame is read before its signature can be."""
_LIVENESS = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 60_000}
"""In seconds, but for the last, which is in ms: how long sent bytes may stay without an answer of the other machine."""

_End = Literal[b"d", b"r"]
"""Who speaks: the driver, or the rank."""


def greeting(key: bytes) -> bytes:
    """Return what a rank says first, by which the driver knows who it is."""
    return hmac.digest(key, b"raysharding", "sha256")


class _Writer:
    """Makes frames: eight bytes that say how long one is, its signature, and so many bytes."""

    def __init__(self, key: bytes, end: _End) -> None:
        self._key, self._end, self._number = key, end, 0

    def frame(self, data: bytes) -> bytes:
        signature = _sign(self._key, self._end, self._number, data)
        self._number += 1
        return _HEADER.pack(len(data), signature) + data


class _Reader:
    """Cuts a stream of bytes into frames."""

    def __init__(self, connection: socket.socket, key: bytes, end: _End) -> None:
        self._connection, self._key, self._end, self._number = connection, key, end, 0
        self._rest = bytearray()
        self.whole: collections.deque[bytes] = collections.deque()

    def read(self) -> None:
        """Take in what has arrived.

        Raises:
            OSError: The connection is gone, or carries what the other end did not sign.
        """
        data = self._connection.recv(_CHUNK)
        if not data:
            raise ConnectionResetError("the other end has closed the connection")
        self._rest += data
        while len(self._rest) >= _HEADER.size:
            num_bytes, signature = _HEADER.unpack_from(self._rest)
            if num_bytes > _MAX_FRAME_BYTES:
                raise ConnectionAbortedError(f"a frame of {num_bytes} bytes was announced; the other end sends none")
            end = _HEADER.size + num_bytes
            if len(self._rest) < end:
                return
            frame = bytes(self._rest[_HEADER.size : end])
            if not hmac.compare_digest(signature, _sign(self._key, self._end, self._number, frame)):
                raise ConnectionAbortedError("a frame arrived that the other end did not sign")
            self._number += 1
            self.whole.append(frame)
            del self._rest[:end]


def _sign(key: bytes, end: _End, number: int, data: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(end, number) + data, "sha256")


def _tune(connection: socket.socket) -> None:
    # So that a way between them that is cut, or has forgotten a connection on which nothing came for long, breaks it.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _LIVENESS.items():
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    # An order is smaller than a segment: without this the kernel may keep it back until the last one was acknowledged.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Line:
    """The driver's end, which never waits: what the kernel does not take yet is kept until it does."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        """Take over a connection.

        Args:
            connection: Its other end has greeted.
            key: The rank's.
        """
        connection.setblocking(False)
        _tune(connection)
        self.connection = connection
        self._reader, self._writer = _Reader(connection, key, b"r"), _Writer(key, b"d")
        self._unsent = bytearray()

    def send(self, data: bytes) -> bool:
        """Send a frame behind those before it; return whether the kernel has all of them.

        Raises:
            OSError: The connection is gone.
        """
        self._unsent += self._writer.frame(data)
        return self.flush()

    def flush(self) -> bool:
        """Send on, where the kernel did not take everything; return whether it has now.

        Raises:
            OSError: The connection is gone.
        """
        while self._unsent:
            try:
                num_sent = self.connection.send(self._unsent)
            except BlockingIOError:
                return False
            del self._unsent[:num_sent]
        return True

    def receive(self) -> list[bytes]:
        """Return the frames that are here.

        Raises:
            OSError: The connection is gone.
        """
        try:
            self._reader.read()
        except BlockingIOError:
            return []
        found = list(self._reader.whole)
        self._reader.whole.clear()
        return found

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


class RankLine:
    """A rank's end, at which its work thread waits."""

    def __init__(self, address: tuple[str, int], key: bytes, timeout_s: float) -> None:
        """Connect to the driver.

        Args:
            address: Where it listens.
            key: This rank's, of `KEY_BYTES`.
            timeout_s: Longest wait for the driver's machine to answer.

        Raises:
            OSError: It cannot be reached.
        """
        self.connection = socket.create_connection(address, timeout_s)
        try:
            _tune(self.connection)
            self.connection.sendall(greeting(key))
            self.connection.settimeout(None)
        except OSError:
            self.connection.close()
            raise
        self._reader, self._writer = _Reader(self.connection, key, b"d"), _Writer(key, b"r")

    def has_frame(self) -> bool:
        """Whether a frame is here that came together with one before it."""
        return bool(self._reader.whole)

    def receive(self) -> bytes:
        """Wait for the next frame.

        Raises:
            OSError: The driver is gone, or `hang_up` was called.
        """
        while not self._reader.whole:
            self._reader.read()
        return self._reader.whole.popleft()

    def send(self, data: bytes) -> None:
        """Send a frame, and wait until the kernel has it.

        Raises:
            OSError: The driver is gone, or `hang_up` was called.
        """
        self.connection.sendall(self._writer.frame(data))

    def hang_up(self) -> None:
        """From another thread: end what `receive` and `send` wait for."""
        with contextlib.suppress(OSError):  # it is closed already
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; by the thread that waits at it."""
        self.connection.close()
