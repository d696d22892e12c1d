"""A driver program on one of several hosts, which runs what a test asks for: functions of `jobs.py`, or its own."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ray import cloudpickle

from cluster.local.hosts import Host
from cluster.local.ray_hosts import RayHosts

ROOT = Path(__file__).resolve().parents[2]


class Driver:
    """The test's end: what `run` is given happens in a program on the host, which keeps its state in between."""

    def __init__(self, rays: RayHosts, host: Host, **environment: str) -> None:
        self._ours, theirs = Pipe()
        environment["PYTHONPATH"] = str(ROOT)
        command = [sys.executable, "-m", "tests.cluster.driver", str(theirs.fileno())]
        self.process = rays.popen(host, command, cwd=ROOT, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()

    def begin(self, job: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Begin what `end` waits for."""
        self._ours.send_bytes(cloudpickle.dumps((job, args, kwargs)))

    def end(self, timeout_s: float = 200.0) -> Any:
        """Return what the job returned, or raise what it raised."""
        assert self._ours.poll(timeout_s), f"the driver's job is not done after {timeout_s:g} s"
        value, error = pickle.loads(self._ours.recv_bytes())
        if error is not None:
            raise error
        return value

    def run(self, job: Callable[..., Any], *args: Any, timeout_s: float = 200.0, **kwargs: Any) -> Any:
        """Run a job to its end."""
        self.begin(job, *args, **kwargs)
        return self.end(timeout_s)

    def close(self) -> None:
        """Let the program end; it is killed with its host if it does not."""
        self._ours.close()


def _serve(connection: Connection) -> None:
    while True:
        try:
            job, args, kwargs = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        value: Any = None
        error: Exception | None = None
        try:
            value = job(*args, **kwargs)
        except Exception as raised:
            error = raised
        try:
            # Not `send`: torch would send tensors through shared memory, which the hosts do not share.
            answer = pickle.dumps((value, error))
        except (pickle.PicklingError, TypeError, AttributeError) as unpicklable:
            answer = pickle.dumps((None, RuntimeError(f"{error or value!r} does not travel: {unpicklable}")))
        connection.send_bytes(answer)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
