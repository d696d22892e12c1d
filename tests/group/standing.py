"""A Ray cluster that outlives drivers, and drivers in processes of their own, which tests may kill or freeze."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.clock import now
from tests.programs import Program

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0

PROLOGUE = """
import json, os, sys, time, torch, ray
from raysharding import *
from tests.clock import now
from tests.forking import runtime_env
from tests.group.conftest import make_mlp

ray.init(address=sys.argv[1], log_to_driver=False, runtime_env=runtime_env())

def tell(**what):
    print(json.dumps(what), flush=True)

def make(**options):
    options = {"model": make_mlp(), "world_size": 2, "device": "cpu", **options}
    group = ShardedModelGroup.from_checkpoint(sys.argv[2], **options)
    tell(pids=[one.pid for one in group.ranks])
    return group
"""


@dataclass(frozen=True)
class StandingCluster:
    """A head node of its own."""

    address: str
    """What `ray.init` takes."""
    client: str
    """What `ray.init` takes for a driver behind Ray Client."""
    dashboard: str
    """Where jobs are submitted; empty without a dashboard."""
    environment: dict[str, str]
    """Environment of its drivers: a token of its own, whatever the machine's is."""


@contextlib.contextmanager
def standing_cluster(num_cpus: int = 8, *, dashboard: bool = False) -> Iterator[StandingCluster]:
    """Start a head node with ports and files of its own, and stop it by the ids of its processes."""
    # Unix sockets have short paths, and pytest's directories long ones.
    scratch = tempfile.mkdtemp(prefix="rs-", dir="/tmp")
    port, client, board = free_ports(3)
    command = [os.path.join(os.path.dirname(sys.executable), "ray"), "start", "--head", "--block"]
    command += [f"--port={port}", f"--ray-client-server-port={client}", "--min-worker-port=0", "--max-worker-port=0"]
    command += [
        f"--temp-dir={scratch}",
        f"--num-cpus={num_cpus}",
        "--disable-usage-stats",
        "--node-ip-address=127.0.0.1",
    ]
    command += ["--dashboard-agent-listen-port=0", "--dashboard-agent-grpc-port=0", "--metrics-export-port=0"]
    command += [f"--include-dashboard={str(dashboard).lower()}", f"--dashboard-port={board}"]
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # else Ray Client's server fails to start at times: docs/pages/ray.md
    with open(f"{scratch}/start.log", "wb") as log:
        head = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment, start_new_session=True)
    try:
        _wait_until_it_answers(head, port, Path(scratch))
        addresses = (f"127.0.0.1:{port}", f"ray://127.0.0.1:{client}")
        yield StandingCluster(*addresses, f"http://127.0.0.1:{board}" if dashboard else "", environment)
    finally:
        _end(head)
        shutil.rmtree(scratch, ignore_errors=True)


def _wait_until_it_answers(head: subprocess.Popen[bytes], port: int, scratch: Path) -> None:
    until = now() + START_S
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            if "Ray runtime started" in (scratch / "start.log").read_text():
                return
        assert head.poll() is None, (scratch / "start.log").read_text()
        assert now() < until, (scratch / "start.log").read_text()
        time.sleep(0.1)


def _end(process: subprocess.Popen[Any] | Program) -> None:
    """Kill a process that the tests started, and what it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(family, timeout=10)
    process.wait(10)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, below those that the system gives to every other socket until Ray listens."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port = random.randrange(20_000, 32_000)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("", port)))
                found.append(port)
        return found


class Driver:
    """A Python program on a standing cluster, which tells JSON lines."""

    def __init__(self, cluster: StandingCluster, checkpoint: Path, program: str, *arguments: str) -> None:
        text = PROLOGUE + program
        self.process = Program(text, cluster.address, str(checkpoint), *arguments, environment=cluster.environment)

    def hear(self) -> dict[str, Any]:
        """Return the next line that it tells; the test's own timeout bounds the wait."""
        line = self.process.stdout.readline()
        while line and not line.startswith("{"):  # of Ray, to the program
            line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the driver ended: {self.process.stderr.read()}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def say(self, line: str) -> None:
        """Send it a line."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self, number: int = signal.SIGKILL) -> float:
        """Send it a signal, and return the clock of that."""
        sent = now()
        self.process.send_signal(number)
        return sent

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self.process)


def seconds_until_gone(pids: list[int], since: float, at_most_s: float) -> dict[int, float]:
    """Wait until processes have ended; return for each how long that took from here on. A zombie has ended.

    Args:
        pids: The processes.
        since: What `now()` was when they were to end.
        at_most_s: Longest time from then.
    """
    gone: dict[int, float] = {}
    begun = time.monotonic()  # may be compared with what it is at least, which `now` may not
    while len(gone) < len(pids):
        for pid in pids:
            if pid not in gone and not _runs(pid):
                gone[pid] = time.monotonic() - begun
        left = [pid for pid in pids if pid not in gone]
        assert not left or now() - since < at_most_s, f"{left} still run; gone: {gone}"
        time.sleep(0.02)
    return gone


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
