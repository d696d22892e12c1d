"""`WorkThread`: the thread of a rank that runs the commands of the connection and, with large arguments, of Ray."""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import socket
import threading
import traceback
from collections.abc import Callable, Sequence

from raysharding.group.rpc import Connection, Packed


class WorkThread:
    """Runs commands one at a time, in the order of arrival. Its methods are called by other threads.

    All commands run on one thread because torch's current device is per thread. The thread serves one connection, the
    newest: the driver of an earlier connection has been replaced, or is gone.
    """

    def __init__(self, run: Callable[[bytes, Sequence[Packed]], bytes]) -> None:
        """Start the thread, without a connection.

        Args:
            run: Runs the command of a message with its stored arguments, and returns the message of its response. Must
                not raise.
        """
        self._run = run
        self._connection: Connection | None = None
        self._new_connections: collections.deque[Connection] = collections.deque()
        self._received: collections.deque[bytes] = collections.deque()
        self._delivered: collections.deque[tuple[bytes, Sequence[Packed]]] = collections.deque()
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        self._wakeup_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup_receiver, selectors.EVENT_READ)
        self._newest: Connection | None = None
        self._epoch = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="raysharding-work", daemon=True)
        self._thread.start()
        # A forked child that held the connection open would hide the death of the rank from the driver.
        os.register_at_fork(after_in_child=self._close_in_child)

    def _close_in_child(self) -> None:
        """Close the connections of a forked child, where this thread does not run."""
        for connection in (self._connection, self._newest, *self._new_connections):
            if connection is not None:
                connection.close()

    @property
    def ident(self) -> int:
        """Identifier of the thread, the key in `sys._current_frames`."""
        return self._thread.ident or 0

    def obey(self, epoch: int, connection: Connection) -> None:
        """Replace the connection. A running command is not interrupted.

        Args:
            epoch: Epoch of the driver. A connection of an earlier driver than the current one is closed.
            connection: The new connection.
        """
        with self._lock:
            if epoch < self._epoch:
                connection.close()
                return
            before, self._newest, self._epoch = self._newest, connection, epoch
            self._new_connections.append(connection)
        if before is not None:
            before.shutdown()
        self._wake_up()

    def deliver(self, message: bytes, stored: Sequence[Packed]) -> None:
        """Run a command whose large arguments Ray has fetched."""
        self._delivered.append((message, stored))
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # enough wake-ups are pending
            self._wakeup_sender.send(b"\0")

    def _loop(self) -> None:
        try:
            while True:
                self._work()
        except BaseException:  # noqa: BLE001
            # Without this thread the rank would hang. Ray reports the end of the process.
            traceback.print_exc()
            os._exit(1)

    def _work(self) -> None:
        order = self._next()
        if order is None:
            return
        reply = self._run(*order)
        try:
            if self._connection is not None:
                self._connection.send(reply)
        except OSError:
            self._drop_connection()  # the driver is gone: nobody needs the response

    def _next(self) -> tuple[bytes, Sequence[Packed]] | None:
        """Wait for the next event; `None` if it is no command."""
        if not (self._received or self._delivered or self._new_connections):
            ready = {key.fileobj for key, _ in self._selector.select()}
            if self._wakeup_receiver in ready:
                self._wakeup_receiver.recv(1 << 10)
            if self._connection is not None and self._connection.socket in ready:
                self._receive(self._connection)
        if self._new_connections:
            self._drop_connection()
            self._connection = self._new_connections.popleft()
            self._selector.register(self._connection.socket, selectors.EVENT_READ)
            return None
        if self._delivered:
            return self._delivered.popleft()
        return (self._received.popleft(), ()) if self._received else None

    def _receive(self, connection: Connection) -> None:
        try:
            self._received.extend(connection.receive())
        except OSError:
            self._drop_connection()  # another driver may connect

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection.socket)
            self._connection.close()
            self._connection = None
            self._received.clear()
