"""`GcsMonitor`: checks without Ray whether the GCS, Ray's head process, answers.

Note [What Ray does without its GCS]: actors keep running and answer calls, but nothing can be stopped or released: Ray
waits silently for the GCS for a minute. Ray then ends every connected program, drivers included. A
GCS with external storage comes back before that, maybe at another address, and nothing is lost. The driver therefore
gives a group up shortly before Ray ends the program.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from typing import Any

import ray

from raysharding.group.cluster.ray_internals import client_session

GCS_GONE_S = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60")) - 10.0
"""Silence of the GCS, in seconds, after which a driver gives its groups up: until then it may come back, and then Ray
ends the program."""
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.ENETDOWN, errno.ETIMEDOUT)
_ASK_S = 1.0
_ANSWER_S = 5.0


class GcsMonitor:
    """Connects to the port of the GCS once a second, and measures how long the GCS has been silent."""

    def __init__(self, address: str) -> None:
        """Create a monitor that has not connected yet.

        Args:
            address: What `head_address` returned.
        """
        self.is_client = client_session() is not None
        """True if this process is behind `ray://`."""
        self.address = address
        self._endpoint = _endpoint(address)
        self._probe: socket.socket | None = None
        self._asked = 0.0
        self._refused = False
        self._looked = self._heard = time.monotonic()

    def seconds_silent(self) -> float:
        """Take the result of the pending connection attempt and begin the next one. Never waits.

        Call it at least once a second.

        Returns:
            Seconds since the GCS last answered.
        """
        now = time.monotonic()
        if self._endpoint is None or now - self._looked > _ANSWER_S:
            self._heard = now  # unknown: the address has no endpoint, or this process itself was stopped
        self._looked = now
        if self._probe is not None:
            self._take_answer(now)
        if self._probe is None and self._endpoint is not None and now - self._asked >= _ASK_S:
            self._ask(now)
        return now - self._heard

    def is_silent(self) -> bool:
        """Return True if the GCS refused the last connection attempt, or did not answer it within a second."""
        self.seconds_silent()
        return self._refused or (self._probe is not None and time.monotonic() - self._asked > _ASK_S)

    def gone(self) -> str:
        """Return a message that the GCS is gone and that Ray will end this program, which Ray Client does not."""
        if self.is_client:
            return f"Ray Client's server at {self.address} does not answer"
        return (
            f"the GCS (Ray's head process) at {self.address} does not answer: Ray will end this program within a "
            "minute, unless the program calls ray.shutdown()"
        )

    def close(self) -> None:
        """Close the pending connection attempt, if any."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _ask(self, now: float) -> None:
        assert self._endpoint is not None
        family, address = self._endpoint
        self._asked = now
        self._probe = socket.socket(family, socket.SOCK_STREAM)
        self._probe.setblocking(False)
        # Close with a reset: one socket in TIME_WAIT per rank and second would exhaust the ports in the end.
        self._probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        code = self._probe.connect_ex(address)
        if code in (0, errno.EINPROGRESS):
            self._take_answer(now)  # a GCS that is near has already answered
        else:
            # There is no route to the GCS. A lack of ports or memory on this machine says nothing about the GCS.
            self._refused = code in _UNREACHABLE
            self._heard = self._heard if self._refused else now
            self.close()

    def _take_answer(self, now: float) -> None:
        assert self._probe is not None
        poll = select.poll()  # not `select`, which takes no descriptor over 1023
        poll.register(self._probe, select.POLLOUT)
        if poll.poll(0):
            self._refused = self._probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
            self._heard = self._heard if self._refused else now
            self.close()
        elif now - self._asked > _ANSWER_S:
            self._refused = True
            self.close()


def _endpoint(address: str) -> tuple[int, Any] | None:
    """Resolve a name once, since a name server may be slow; `None` if the name is unknown, so nothing is monitored."""
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, endpoint = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError):
        return None
    return family, endpoint


def head_address() -> str:
    """Return `host:port` of the GCS of this process's cluster; behind `ray://`, of Ray Client's server on the head."""
    client = client_session()
    return str(ray.get_runtime_context().gcs_address) if client is None else client[1]
