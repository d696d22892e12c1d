"""`WorkThread`: the thread of a rank that runs commands, as they come over the line or, with large parts, from Ray."""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import socket
import threading
import traceback
from collections.abc import Callable, Sequence

from raysharding.group.rpc import Packed, RankLine


class WorkThread:
    """Runs one command after the other, in the order in which they come; all methods are for other threads.

    It is one thread because torch's current device is per thread, and it obeys one line at a time, the newest: the
    driver of an earlier one was followed by another, or is gone.
    """

    def __init__(self, run: Callable[[bytes, Sequence[Packed]], bytes]) -> None:
        """Start, without a line.

        Args:
            run: Runs the command of a message, given its stored arguments; returns the response's message, and raises
                nothing.
        """
        self._run = run
        self._line: RankLine | None = None
        self._new_lines: collections.deque[RankLine] = collections.deque()
        self._delivered: collections.deque[tuple[bytes, Sequence[Packed]]] = collections.deque()
        self._bell, self._button = socket.socketpair()
        self._button.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._newest: RankLine | None = None
        self._epoch = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="raysharding-work", daemon=True)
        self._thread.start()
        # Of a rank that dies the driver would hear nothing as long as a process that it has forked holds its line.
        os.register_at_fork(after_in_child=self._let_go)

    def _let_go(self) -> None:
        """In a forked child, where this thread is not: close its copies of the lines."""
        for line in (self._line, self._newest, *self._new_lines):
            if line is not None:
                line.close()

    @property
    def ident(self) -> int:
        """The thread's, as `sys._current_frames` knows it."""
        return self._thread.ident or 0

    def obey(self, epoch: int, line: RankLine) -> None:
        """Take orders from this line, and from no earlier one; a command that runs is run to its end.

        Args:
            epoch: Of its driver. Nothing happens where the line of a later driver has come already.
            line: It.
        """
        with self._lock:
            if epoch < self._epoch:
                line.close()
                return
            before, self._newest, self._epoch = self._newest, line, epoch
            self._new_lines.append(line)
        if before is not None:
            before.hang_up()
        self._ring()

    def deliver(self, message: bytes, stored: Sequence[Packed]) -> None:
        """Run a command whose large arguments Ray has brought."""
        self._delivered.append((message, stored))
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been rung often enough
            self._button.send(b"\0")

    def _loop(self) -> None:
        try:
            while True:
                self._work()
        except BaseException:  # noqa: BLE001
            # A rank that obeys nobody any more would be a hang. Ray tells of its end.
            traceback.print_exc()
            os._exit(1)

    def _work(self) -> None:
        order = self._next()
        if order is None:
            return
        reply = self._run(*order)
        try:
            if self._line is not None:
                self._line.send(reply)
        except OSError:
            self._drop_line()  # the driver is gone, and what it wanted to know with it

    def _next(self) -> tuple[bytes, Sequence[Packed]] | None:
        """Wait until something comes; `None`: it was no order."""
        is_here = self._line is not None and self._line.has_frame()
        if not (is_here or self._delivered or self._new_lines):
            ready = {key.fileobj for key, _ in self._selector.select()}
            if self._bell in ready:
                self._bell.recv(1 << 10)
            is_here = self._line is not None and self._line.connection in ready
        if self._new_lines:
            self._drop_line()
            self._line = self._new_lines.popleft()
            self._selector.register(self._line.connection, selectors.EVENT_READ)
            return None
        if self._delivered:
            return self._delivered.popleft()
        return self._receive() if is_here else None

    def _receive(self) -> tuple[bytes, Sequence[Packed]] | None:
        assert self._line is not None, "it has said something"
        try:
            return self._line.receive(), ()
        except OSError:
            self._drop_line()  # another driver may come
            return None

    def _drop_line(self) -> None:
        if self._line is not None:
            self._selector.unregister(self._line.connection)
            self._line.close()
            self._line = None
