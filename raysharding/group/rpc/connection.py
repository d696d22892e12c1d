"""`Connection`: one end of the TCP connection between the driver and a rank; see Note [Control connections].

Note [Signed messages]: a message holds pickles, so whoever could insert one could run code on the receiver. Each
carries an HMAC-SHA256 of its bytes, its sequence number and its direction, under a key that the driver generates for
this one connection and passes to the rank through Ray. A message that is forged, replayed or missing closes the
connection. Messages are not encrypted.

pyzmq with CURVE, which encrypts, was tried (pyzmq 27.3, libzmq 4.3.5): unbinding a socket closes the connections that
it has accepted, so the driver would listen as long as the group lives; nothing bounds the connections that wait for
their handshake, and a process that is out of descriptors spins in its I/O thread. It saved 70 lines.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct

KEY_BYTES = 32
HANDSHAKE_BYTES = 32

_HEADER = struct.Struct("!Q32s")
"""Precedes each message: its length and its signature."""
_SEQUENCE = struct.Struct("!?Q")
_RECV_BYTES = 64 << 10
"""`recv` allocates as much: 256 KiB are mapped and unmapped each time, which doubles the cost of a small message."""
_MAX_MESSAGE_BYTES = 16 << 20
"""Far above what either end sends. The length is read before the signature can be verified, so it is not trusted."""
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 60_000}
"""In seconds, except for the last one: milliseconds that sent bytes may remain unacknowledged."""


def handshake(key: bytes) -> bytes:
    """Return the first bytes that a rank sends, by which the driver identifies it."""
    return hmac.digest(key, b"raysharding", "sha256")


def connect_to_driver(address: tuple[str, int], key: bytes, timeout_s: float) -> Connection:
    """Open a rank's end.

    Args:
        address: Where the driver listens.
        key: This rank's, of `KEY_BYTES`.
        timeout_s: Longest wait for the driver's machine to answer.

    Raises:
        OSError: The driver cannot be reached.
    """
    sock = socket.create_connection(address, timeout_s)
    try:
        sock.sendall(handshake(key))
        return Connection(sock, key, is_driver=False)
    except OSError:
        sock.close()
        raise


class Connection:
    """Sends and receives signed messages.

    The driver's end never blocks: what the kernel does not accept is kept until `flush`. A rank's end blocks, since its
    work thread has nothing else to do.
    """

    def __init__(self, sock: socket.socket, key: bytes, *, is_driver: bool) -> None:
        """Take ownership of a socket after the handshake.

        Args:
            sock: Connected.
            key: The rank's.
            is_driver: Which end this is.
        """
        sock.setblocking(not is_driver)
        _set_options(sock)
        self.socket = sock
        self._key = key
        self._is_driver = is_driver
        self._num_sent = self._num_received = 0
        self._unsent = bytearray()
        self._unparsed = bytearray()

    def send(self, message: bytes) -> bool:
        """Send a message after those before it; return True if the kernel has accepted all of them.

        Raises:
            OSError: The connection is lost, or `shutdown` was called.
        """
        self._unsent += _HEADER.pack(len(message), self._sign(self._is_driver, self._num_sent, message)) + message
        self._num_sent += 1
        return self.flush()

    def flush(self) -> bool:
        """Send what the kernel has not accepted yet; return True if it now has.

        Raises:
            OSError: The connection is lost, or `shutdown` was called.
        """
        while self._unsent:
            try:
                num_bytes = self.socket.send(self._unsent)
            except BlockingIOError:
                return False
            del self._unsent[:num_bytes]
        return True

    def receive(self) -> list[bytes]:
        """Read once from the socket; return the messages that are complete, which may be none.

        Raises:
            OSError: The connection is lost, `shutdown` was called, or the peer did not sign what arrived.
        """
        try:
            data = self.socket.recv(_RECV_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("the other end has closed the connection")
        self._unparsed += data
        messages = []
        while (message := self._parse()) is not None:
            messages.append(message)
        return messages

    def shutdown(self) -> None:
        """Make a `send` or `receive` that blocks in another thread fail."""
        with contextlib.suppress(OSError):  # it is closed already
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Not while another thread uses it."""
        self.socket.close()

    def _parse(self) -> bytes | None:
        """Take the next complete message from the bytes that have arrived."""
        if len(self._unparsed) < _HEADER.size:
            return None
        num_bytes, signature = _HEADER.unpack_from(self._unparsed)
        if num_bytes > _MAX_MESSAGE_BYTES:
            raise ConnectionAbortedError(f"a message of {num_bytes} bytes was announced; the other end sends none")
        end = _HEADER.size + num_bytes
        if len(self._unparsed) < end:
            return None
        message = bytes(self._unparsed[_HEADER.size : end])
        if not hmac.compare_digest(signature, self._sign(not self._is_driver, self._num_received, message)):
            raise ConnectionAbortedError("a message arrived that the other end did not sign")
        self._num_received += 1
        del self._unparsed[:end]
        return message

    def _sign(self, is_from_driver: bool, number: int, message: bytes) -> bytes:
        return hmac.digest(self._key, _SEQUENCE.pack(is_from_driver, number) + message, "sha256")


def _set_options(sock: socket.socket) -> None:
    # A network that drops packets, or a firewall that forgot an idle connection, must end it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    # A command is smaller than a segment: Nagle's algorithm would hold it back until the last one was acknowledged.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
