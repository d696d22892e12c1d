"""Whether the head of the Ray cluster answers, asked without Ray.

Note [What Ray does without its head]: actors go on and answer calls, but nothing can be stopped or given back: Ray
waits for the head in silence, for a minute. Then it ends every program that is connected, drivers too. A node that the
head cannot reach is given up after a minute; its own processes notice after four (all seen, Ray 2.60). So the driver
gives a group up before Ray ends the program, and a rank whose head is gone ends itself.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import time
from typing import Any

import ray

from raysharding.group.cluster.display import tell

GCS_GONE_S = 10.0
"""Silence after which a driver gives its groups up."""
CUT_OFF_S = 75.0
"""Silence after which a rank ends itself: by then Ray has given its node up, or ended its driver."""
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.ENETDOWN, errno.ETIMEDOUT)
_ASK_S = 1.0
_ANSWER_S = 5.0


class GcsMonitor:
    """Asks the head's port for a connection once a second, and says how long it has been silent."""

    def __init__(self, address: str) -> None:
        """Ask nothing yet.

        Args:
            address: `host:port` of the head.
        """
        self.address = address
        self._endpoint = _endpoint(address)
        self._probe: socket.socket | None = None
        self._asked = 0.0
        self._refused = False
        self._looked = self._heard = time.monotonic()

    def seconds_silent(self) -> float:
        """Take the answer to an earlier question, ask the next one. Never waits; to be called at least once a second.

        Returns:
            Seconds since the head last answered.
        """
        now = time.monotonic()
        if self._endpoint is None or now - self._looked > _ANSWER_S:
            self._heard = now  # nobody to ask, or this process itself was stopped: it cannot know
        self._looked = now
        if self._probe is not None:
            self._take_answer(now)
        if self._probe is None and self._endpoint is not None and now - self._asked >= _ASK_S:
            self._ask(now)
        return now - self._heard

    def is_silent(self) -> bool:
        """Whether it refused the last question, or did not answer it within a second."""
        self.seconds_silent()
        return self._refused or (self._probe is not None and time.monotonic() - self._asked > _ASK_S)

    def gone(self) -> str:
        """Say that it is gone, and what becomes of this program."""
        return (
            f"the head of the Ray cluster at {self.address} does not answer: Ray will end this program within a "
            "minute, unless it calls ray.shutdown()"
        )

    def close(self) -> None:
        """Ask no more."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _ask(self, now: float) -> None:
        assert self._endpoint is not None
        family, address = self._endpoint
        self._asked = now
        self._probe = socket.socket(family, socket.SOCK_STREAM)
        self._probe.setblocking(False)
        # Closed by a reset: a port that waits out its time, once a second for each rank, would run out in the end.
        self._probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            self._probe.connect(address)
        except BlockingIOError:
            pass
        except OSError as error:
            # No route to it. What this machine lacks, ports or memory, says nothing of the head.
            self._refused = error.errno in _UNREACHABLE
            self._heard = self._heard if self._refused else now
            self.close()
        # Where it is near it has answered already.
        if self._probe is not None:
            self._take_answer(now)

    def _take_answer(self, now: float) -> None:
        assert self._probe is not None
        question = select.poll()  # not `select`, which takes no descriptor over 1023
        question.register(self._probe, select.POLLOUT)
        if question.poll(0):
            self._refused = self._probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
            self._heard = self._heard if self._refused else now
            self.close()
        elif now - self._asked > _ANSWER_S:
            self._refused = True
            self.close()


def _endpoint(address: str) -> tuple[int, Any] | None:
    """Look a name up, once: asking a name server may take long. `None` where nobody knows it, so nobody is asked."""
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, endpoint = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError):
        return None
    return family, endpoint


def gcs_address() -> str:
    """Return `host:port` of the head of the cluster that this process is connected to."""
    return str(ray.get_runtime_context().gcs_address)


def exit_without_gcs() -> None:
    """Start a thread that ends this process when the head is gone for good."""
    threading.Thread(target=_exit_without_gcs, name="watch head", daemon=True).start()


def _exit_without_gcs() -> None:
    head = GcsMonitor(gcs_address())
    # Ends with the process.
    while head.seconds_silent() < CUT_OFF_S:
        time.sleep(_ASK_S)
    tell(f"the head at {head.address} has been silent for {CUT_OFF_S:g} s: the rank ends, pid {os.getpid()}")
    os._exit(1)
