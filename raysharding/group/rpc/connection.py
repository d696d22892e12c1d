"""`Connection`, one end of the TCP connection between the driver and a rank, and `accept_ranks`, how ranks connect.

See Note [Control connections] in `driver_connections.py`.

A rank authenticates with a handshake under the key that the driver passed to it through Ray, which is good for one
connection. Other connections are closed after 10 s, and the oldest first where there are many, so that they cost few
descriptors and keep no rank out.

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
import errno
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence

import ray

from raysharding.distributed.comm import listen
from raysharding.errors import GroupError, RendezvousError
from raysharding.group.ranks import Member

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


_POLL_S = 0.1
_CONNECT_S = 10.0
"""Time of four connection attempts of TCP; later ones do not succeed where these failed."""
_CURE = (
    "let the ranks' nodes reach this driver's address, on any port or on those of Placement.port_range, or run the "
    "program on a node of the cluster, for example by `ray job submit`"
)
MAX_PENDING = 64
"""Connections without a handshake that are kept, beside those of the ranks."""
HANDSHAKE_S = 10.0
"""How long a connection may take for its handshake."""


def accept_ranks(
    members: Sequence[Member], port_range: tuple[int, int] | None, within_s: float, check: Callable[[], None]
) -> list[Connection]:
    """Have every rank connect to this process.

    Args:
        members: By rank.
        port_range: Where to listen; `None`: any free port.
        within_s: Deadline for all of them.
        check: Called periodically; raises if waiting is pointless.

    Returns:
        The connections, by rank.

    Raises:
        RendezvousError: No port is free, or a rank cannot reach this process or did not in time.
        GroupError: A rank's process is gone.
    """
    deadline = time.monotonic() + within_s
    keys = [secrets.token_bytes(KEY_BYTES) for _ in members]
    host = _own_address()
    with listen(host, port_range) as listener, Handshakes(listener, keys) as handshakes:
        address = host, listener.getsockname()[1]
        asked = {
            member.actor.connect.remote(member.epoch, address, key, min(_CONNECT_S, within_s / 2)): member
            for member, key in zip(members, keys, strict=True)
        }
        while handshakes.missing:
            handshakes.poll(min(_POLL_S, max(0.0, deadline - time.monotonic())))
            check()
            asked = _pending(asked, address)
            if handshakes.missing and time.monotonic() > deadline:
                late = ", ".join(str(members[rank].info.rank) for rank in sorted(handshakes.missing.values()))
                what = f"ranks {late} did not connect to this driver at {host}:{address[1]} within {within_s:g} s"
                why = f"; the driver could not accept connections: {handshakes.error}" if handshakes.error else ""
                raise RendezvousError(f"{what}{why}; raise Timeouts.rendezvous_s, or {_CURE}")
        return [connection for _, connection in sorted(handshakes.take().items())]


def _own_address() -> str:
    """Return the address of this process, as the cluster knows it.

    `ray.util.get_node_ip_address` of a driver reads what another node of this machine has left in Ray's directory.
    """
    node_id = ray.get_runtime_context().get_node_id()
    node_ip = str(next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id))
    if not ray.util.client.ray.is_connected():
        return node_ip
    # The node is that of Ray Client's server, maybe another machine: this process's end of the route there is its own
    # address. Connecting UDP sends nothing.
    family = socket.AF_INET6 if ":" in node_ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((node_ip, 1))
        return str(probe.getsockname()[0])


def _pending(asked: dict[ray.ObjectRef, Member], address: tuple[str, int]) -> dict[ray.ObjectRef, Member]:
    """Return those that have not answered yet.

    Raises:
        RendezvousError: A rank could not connect.
        GroupError: A rank's process is gone.
    """
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0) if asked else ([], [])
    for ref in answered:
        info = asked[ref].info
        try:
            ray.get(ref)
        except ray.exceptions.RayActorError as error:
            raise GroupError(f"rank {info.rank} died before it had connected to the driver: {error}") from error
        except ray.exceptions.RayTaskError as error:
            is_late = isinstance(error.cause, TimeoutError)
            reason = "no answer, as behind a firewall" if is_late else f"{type(error.cause).__name__}: {error.cause}"
            what = f"rank {info.rank} on {info.node_ip} cannot connect to this driver at {address[0]}:{address[1]}"
            raise RendezvousError(f"{what}: {reason}; {_CURE}") from error
    return {ref: member for ref, member in asked.items() if ref not in answered}


class Handshakes:
    """Accepts connections, and keeps those whose handshake is a rank's, in whatever order the others come and send."""

    def __init__(self, listener: socket.socket, keys: Sequence[bytes]) -> None:
        """Start listening; `close`, or a `with` block, ends it.

        Args:
            listener: Stays the caller's.
            keys: By rank.
        """
        self.missing = {handshake(key): rank for rank, key in enumerate(keys)}
        """Handshake → rank of those that have not connected."""
        self.error: OSError | None = None
        """Why the last connection could not be accepted, where this process is out of descriptors."""
        self._keys = keys
        self._pending: dict[socket.socket, tuple[float, bytes]] = {}
        """Connection → when it was accepted, and what it has sent."""
        self._accepted: dict[int, Connection] = {}
        listener.setblocking(False)
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Handshakes:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for sock in self._pending:
            sock.close()
        for connection in self._accepted.values():
            connection.close()

    def take(self) -> dict[int, Connection]:
        """Hand over the connections of ranks, by rank."""
        accepted, self._accepted = self._accepted, {}
        return accepted

    def poll(self, timeout_s: float) -> None:
        """Wait for connections and their handshakes, and process what has arrived."""
        ready = [key.fileobj for key, _ in self._selector.select(timeout_s)]
        for sock in ready:
            if sock is not self._listener:
                assert isinstance(sock, socket.socket), "only sockets are registered"
                self._receive(sock)
        # Last: a rank whose handshake has arrived is not closed to make room.
        if self._listener in ready:
            self._accept(timeout_s)
        self._close_oldest(len(self.missing) + MAX_PENDING)

    def _accept(self, pause_s: float) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return  # the peer is gone again
            self.error = error
            if not self._pending:
                time.sleep(pause_s)  # nothing to close here: the listener would be ready again at once
            self._close_oldest(len(self._pending) - 1)
            return
        sock.setblocking(False)
        self._pending[sock] = time.monotonic(), b""
        self._selector.register(sock, selectors.EVENT_READ)

    def _close_oldest(self, at_most: int) -> None:
        """Close connections whose handshake is late, and the oldest of the others that exceed `at_most`."""
        late = time.monotonic() - HANDSHAKE_S
        for sock, (since, _) in list(self._pending.items()):
            if len(self._pending) <= at_most and since > late:
                return
            self._forget(sock)
            sock.close()

    def _forget(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._pending[sock]

    def _receive(self, sock: socket.socket) -> None:
        since, received = self._pending[sock]
        try:
            # Not a byte more: a message may follow.
            data = sock.recv(HANDSHAKE_BYTES - len(received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        received += data
        if data and len(received) < HANDSHAKE_BYTES:
            self._pending[sock] = since, received
            return
        self._forget(sock)
        known = next((one for one in self.missing if hmac.compare_digest(one, received)), None)
        if known is None:
            sock.close()
        else:
            rank = self.missing.pop(known)
            self._accepted[rank] = Connection(sock, self._keys[rank], is_driver=True)
