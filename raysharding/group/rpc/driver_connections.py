"""`Lines`: the driver's connections to its ranks, over which calls go out and their ends come back.

Note [Lines]: a call that goes through Ray costs 3 ms for two ranks, 17 ms for sixteen, on the two cores where
`tests/bench/calls.py` was first run; an empty method, without any of ours. A training loop pays that in each step. So
Ray starts the ranks, tells of their deaths, carries what is large, and answers questions beside the calls; but the
order to run a command, and the outcome, take a TCP connection of their own.

The ranks connect to the driver, so that no rank listens, and the driver only while its ranks come. Each greets with
the key that the driver gave it through Ray, good for one connection; others are closed, the oldest first where many
come, so that they cost few descriptors and keep no rank out. What follows: Note [Signed frames] in `connection.py`.

A line that breaks says nothing by itself: it does so whenever a rank dies, a moment before Ray tells, and when another
driver takes the group over. Only if Ray has not said anything after 1.5 s the rank counts as out of reach, and is
stopped: a process that it has forked may keep its death from Ray, or the network may have cut the line.
"""

from __future__ import annotations

import errno
import hmac
import math
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray

from raysharding.distributed.comm import listen
from raysharding.errors import GroupError, RendezvousError
from raysharding.group.ranks import Member
from raysharding.group.rpc.connection import GREETING_BYTES, KEY_BYTES, Line, greeting
from raysharding.group.rpc.event_loop import Events

_LOOK_S = 0.1
_SILENT_S = 1.5
MAX_STRANGERS = 64
"""Connections that have not greeted yet, beside those of the ranks; another one closes the oldest."""
GREETING_S = 10.0
"""How long a connection may take to greet."""


class Lines:
    """The lines to a group's ranks. Used by the supervision thread."""

    def __init__(self, events: Events, heard: Callable[[int, bytes], None], broken: Callable[[], object]) -> None:
        """No lines yet.

        Args:
            events: Waits for what comes in.
            heard: Is given each frame of a rank.
            broken: Is told that a rank's line is gone.
        """
        self._events = events
        self._heard = heard
        self._broken = broken
        self._lines: dict[int, Line] = {}
        self._broken_lines: dict[int, tuple[float, OSError]] = {}

    def take(self, opened: Sequence[Line]) -> None:
        """Use these, by rank."""
        for rank, line in enumerate(opened):
            self._events.attend(line.connection, partial(self._on_ready, rank))
            self._lines[rank] = line

    def send(self, rank: int, frame: bytes) -> bool:
        """Send a frame; waits for nothing. Return whether there is a line to that rank."""
        line = self._lines.get(rank)
        if line is None:
            return False
        try:
            is_sent = line.send(frame)
        except OSError as error:
            self._lose(rank, error)
            return False
        if not is_sent:
            self._events.attend(line.connection, partial(self._on_ready, rank), wants_room=True)
        return True

    def out_of_reach(self) -> dict[int, OSError]:
        """Take out the ranks whose lines have been broken for so long that Ray would have told why."""
        now = time.monotonic()
        due = {rank: error for rank, (until, error) in self._broken_lines.items() if now >= until}
        for rank in due:
            del self._broken_lines[rank]
        return due

    def patience_s(self) -> float:
        """Seconds until another rank counts as out of reach."""
        return min((until - time.monotonic() for until, _ in self._broken_lines.values()), default=math.inf)

    def close(self) -> None:
        """Close all of them."""
        for rank in list(self._lines):
            self._forget(rank)
        self._broken_lines.clear()

    def _on_ready(self, rank: int) -> None:
        line = self._lines.get(rank)
        if line is None:
            return  # lost since
        try:
            is_sent = line.flush()
            frames = line.receive()
        except OSError as error:
            self._lose(rank, error)
            return
        self._events.attend(line.connection, partial(self._on_ready, rank), wants_room=not is_sent)
        for frame in frames:
            self._heard(rank, frame)

    def _lose(self, rank: int, error: OSError) -> None:
        self._forget(rank)
        self._broken_lines[rank] = time.monotonic() + _SILENT_S, error
        self._broken()

    def _forget(self, rank: int) -> None:
        line = self._lines.pop(rank)
        self._events.leave(line.connection)
        line.close()


def open_lines(members: Sequence[Member], within_s: float, check: Callable[[], None]) -> list[Line]:
    """Have every rank connect to this process.

    Args:
        members: By rank.
        within_s: Deadline for all of them.
        check: Called now and then; raises where there is no use in waiting.

    Returns:
        The lines, by rank.

    Raises:
        RendezvousError: A rank cannot reach this process, or has not come in time.
        GroupError: A rank's process is gone.
    """
    until = time.monotonic() + within_s
    keys = [secrets.token_bytes(KEY_BYTES) for _ in members]
    waiting = {greeting(key): rank for rank, key in enumerate(keys)}
    host = _own_address()
    with listen(host) as listener, _Door(listener) as door:
        address: tuple[str, int] = host, listener.getsockname()[1]
        asked = {
            member.actor.connect.remote(member.epoch, address, key, within_s): member
            for member, key in zip(members, keys, strict=True)
        }
        while waiting:
            door.admit(waiting, min(_LOOK_S, max(0.0, until - time.monotonic())))
            check()
            asked = _still_asked(asked, address)
            if waiting and time.monotonic() > until:
                late = ", ".join(str(members[rank].info.rank) for rank in sorted(waiting.values()))
                what = f"ranks {late} did not connect to this driver at {host}:{address[1]} within {within_s:g} s"
                why = f"; the driver could not accept connections: {door.error}" if door.error else ""
                raise RendezvousError(f"{what}{why}; raise Timeouts.rendezvous_s, or open the driver's ports to them")
        return [Line(connection, keys[rank]) for rank, connection in sorted(door.take().items())]


def _own_address() -> str:
    """The address of this process's node, as the cluster knows it.

    `ray.util.get_node_ip_address` of a driver takes what another node of this machine has left in Ray's folder.
    """
    node_id = ray.get_runtime_context().get_node_id()
    return str(next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id))


def _still_asked(asked: dict[ray.ObjectRef, Member], address: tuple[str, int]) -> dict[ray.ObjectRef, Member]:
    """Drop those who have done what they were asked.

    Raises:
        RendezvousError: One of them could not.
        GroupError: One of them is gone.
    """
    ended, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0) if asked else ([], [])
    for ref in ended:
        info = asked[ref].info
        try:
            ray.get(ref)
        except ray.exceptions.RayActorError as error:
            raise GroupError(f"rank {info.rank} died before it had connected to the driver: {error}") from error
        except ray.exceptions.RayTaskError as error:
            reason = f"{type(error.cause).__name__}: {error.cause}"
            what = f"rank {info.rank} on {info.node_ip} cannot connect to this driver at {address[0]}:{address[1]}"
            raise RendezvousError(f"{what}: {reason}; let the ranks' nodes reach the driver's, on any port") from error
    return {ref: member for ref, member in asked.items() if ref not in ended}


class _Door:
    """Takes in connections that say the right word first, however many others come, in whatever order they speak."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self.error: OSError | None = None
        """Why the last connection could not be accepted, where it was this process's fault."""
        self._said: dict[socket.socket, bytes] = {}
        self._since: dict[socket.socket, float] = {}
        self._known: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *_: Any) -> None:
        self._selector.close()
        for connection in (*self._said, *self._known.values()):
            connection.close()

    def take(self) -> dict[int, socket.socket]:
        """Give the connections away, by rank."""
        known, self._known = self._known, {}
        return known

    def admit(self, waiting: dict[bytes, int], timeout_s: float) -> None:
        """Let in who is there, taking each out of `waiting`."""
        ready = [key.fileobj for key, _ in self._selector.select(timeout_s)]
        for connection in ready:
            if connection is not self._listener:
                assert isinstance(connection, socket.socket), "only sockets are registered"
                self._hear(connection, waiting)
        # Last: who has greeted by now is not closed to make room.
        if self._listener in ready:
            self._accept(timeout_s)
        self._close_oldest(len(waiting) + MAX_STRANGERS)

    def _accept(self, pause_s: float) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return  # it has gone again
            self.error = error
            if not self._since:
                time.sleep(pause_s)  # others hold all descriptors: it would be ready again at once
            self._close_oldest(len(self._since) - 1)
            return
        connection.setblocking(False)
        self._said[connection], self._since[connection] = b"", time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ)

    def _close_oldest(self, at_most: int) -> None:
        """Close those that have not greeted in time, and the oldest of the others that are more than `at_most`."""
        late = time.monotonic() - GREETING_S
        for connection, since in list(self._since.items()):
            if len(self._since) <= at_most and since > late:
                return
            self._forget(connection)
            connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._said[connection], self._since[connection]

    def _hear(self, connection: socket.socket, waiting: dict[bytes, int]) -> None:
        try:
            # Not a byte more: a frame may follow.
            more = connection.recv(GREETING_BYTES - len(self._said[connection]))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said = self._said[connection] = self._said[connection] + more
        if more and len(said) < GREETING_BYTES:
            return
        self._forget(connection)
        known = next((one for one in waiting if hmac.compare_digest(one, said)), None)
        if known is None:
            connection.close()
        else:
            self._known[waiting.pop(known)] = connection
