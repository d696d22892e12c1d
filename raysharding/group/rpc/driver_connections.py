"""`DriverConnections`: the driver's connections to its ranks, which carry commands out and responses back.

Note [Control connections]: a command that goes through Ray costs 3 ms for two ranks and 17 ms for sixteen, on the two
cores where `tests/bench/calls.py` was first run, for an empty method. A training loop pays that in each step. So Ray
starts the ranks, reports their deaths, carries large values, and answers questions while a call runs; commands and
responses take a TCP connection of their own.

The ranks connect to the driver, so no rank listens, and the driver does so only until all of them are connected; see
`accept_ranks`. What a connection promises is in Note [Signed messages] in `connection.py`.

A lost connection is no failure by itself: it is lost whenever a rank dies, a moment before Ray reports the death, and
when another driver attaches to the group. Only if Ray reports nothing within 1.5 s is the rank unreachable, and killed:
a child that it forked may hide its death from Ray, or the network may have dropped the connection.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from raysharding.group.rpc.connection import Connection
from raysharding.group.rpc.event_loop import EventLoop

_DEATH_REPORT_S = 1.5


class DriverConnections:
    """A group's connections by rank, served by an event loop. Used on the loop's thread only."""

    def __init__(
        self, loop: EventLoop, on_message: Callable[[int, bytes], None], on_disconnect: Callable[[], object]
    ) -> None:
        """Start without connections.

        Args:
            loop: Waits for messages.
            on_message: Called with the rank and each message of it.
            on_disconnect: Called when a connection is lost.
        """
        self._loop = loop
        self._on_message = on_message
        self._on_disconnect = on_disconnect
        self._connections: dict[int, Connection] = {}
        self._lost: dict[int, tuple[float, OSError]] = {}
        """Rank → when it counts as unreachable, and how its connection was lost."""

    def add(self, connections: Sequence[Connection]) -> None:
        """Serve these connections, given by rank."""
        for rank, connection in enumerate(connections):
            self._connections[rank] = connection
            self._register(rank, wants_write=False)

    def send(self, rank: int, message: bytes) -> bool:
        """Send a message without blocking; return True if the rank is connected."""
        if rank not in self._connections:
            return False
        try:
            is_sent = self._connections[rank].send(message)
        except OSError as error:
            self._lose(rank, error)
            return False
        if not is_sent:
            self._register(rank, wants_write=True)
        return True

    def pop_unreachable(self) -> dict[int, OSError]:
        """Remove and return the ranks whose connections were lost so long ago that Ray would have reported why."""
        now = time.monotonic()
        due = {rank: error for rank, (due_at, error) in self._lost.items() if now >= due_at}
        for rank in due:
            del self._lost[rank]
        return due

    def seconds_to_unreachable(self) -> float:
        """Return the seconds until the next rank counts as unreachable."""
        return min((due_at - time.monotonic() for due_at, _ in self._lost.values()), default=math.inf)

    def close(self) -> None:
        """Close all connections."""
        for rank in list(self._connections):
            self._remove(rank)
        self._lost.clear()

    def _register(self, rank: int, *, wants_write: bool) -> None:
        self._loop.register(self._connections[rank].socket, partial(self._on_ready, rank), wants_write=wants_write)

    def _on_ready(self, rank: int) -> None:
        if rank not in self._connections:
            return  # lost since
        connection = self._connections[rank]
        try:
            is_sent = connection.flush()
            messages = connection.receive()
        except OSError as error:
            self._lose(rank, error)
            return
        self._register(rank, wants_write=not is_sent)
        for message in messages:
            self._on_message(rank, message)

    def _lose(self, rank: int, error: OSError) -> None:
        self._remove(rank)
        self._lost[rank] = time.monotonic() + _DEATH_REPORT_S, error
        self._on_disconnect()

    def _remove(self, rank: int) -> None:
        connection = self._connections.pop(rank)
        self._loop.unregister(connection.socket)
        connection.close()
