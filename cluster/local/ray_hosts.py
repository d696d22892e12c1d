"""A real Ray cluster over `Hosts`: the head on host 0, one raylet on every host, token authentication on."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cluster.local.hosts import Host, HostsError

HEAD_PORT = 6379
CLIENT_PORT = 10_001
PORTS = {
    "--node-manager-port": 6380,
    "--object-manager-port": 6381,
    "--min-worker-port": 11_000,
    "--max-worker-port": 11_999,
    "--dashboard-agent-grpc-port": 6382,
    "--dashboard-agent-listen-port": 6383,
    "--runtime-env-agent-port": 6384,
    "--metrics-export-port": 6385,
}
"""Ray listens on these ports of a node and no others, so that a test can close all others: docs/pages/network.md."""
START_S = 120.0
_STARTED = "Ray runtime started."


class RayHosts:
    """A context manager: hosts with Ray on them; takes everything away at its end, by the process ids it started.

    Nodes carry the label `role`, `head` or `worker`, and one unit of a resource of the host's name. Each host has
    /tmp/ray and a /dev/shm of its own. A process id names one process on all of them, unlike on real machines.

    Args:
        hosts: Those that get Ray, made by the caller, who closes them after this.
        cpus_per_host: What Ray hands out on each, whatever the machine has.
        logs_to_driver: Whether what ranks print appears at the driver; costs a process on each host.
        environment: Variables for Ray's processes and for drivers, such as Ray's own `RAY_health_check_period_ms`.

    Raises:
        HostsError: On entering, when Ray does not start: says what it printed.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        *,
        cpus_per_host: int = 2,
        logs_to_driver: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.hosts = hosts
        self.cpus_per_host = cpus_per_host
        self.logs_to_driver = logs_to_driver
        # Near the root: the sockets in it may have names of 107 characters at most.
        self._scratch = Path(tempfile.mkdtemp(prefix="rayhosts-"))
        token = self._scratch / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        own = {
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "RAY_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": str(int(START_S)),
            "GRPC_ENABLE_FORK_SUPPORT": "0",  # else Ray Client's server fails to start at times: docs/pages/ray.md
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environment: Mapping[str, str] = inherited | own | dict(environment or {})
        self._commands: dict[int, subprocess.Popen[Any]] = {}

    @property
    def address(self) -> str:
        """Where drivers find the cluster."""
        return f"{self.hosts[0].address}:{HEAD_PORT}"

    @property
    def client_address(self) -> str:
        """Where drivers on hosts without Ray find the cluster, by Ray Client."""
        return f"ray://{self.hosts[0].address}:{CLIENT_PORT}"

    def __enter__(self) -> Self:
        try:
            for host in self.hosts:
                self._separate(host)
            self.start(*self.hosts)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill every process on the hosts; idempotent."""
        for host in self.hosts:
            host.kill()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def popen(self, host: Host, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a host that finds the cluster and its token in its environment."""
        variables = {**self.environment, **options.pop("env", {})}
        return host.popen(command, env=variables, **options)

    def start(self, *hosts: Host) -> None:
        """Start Ray on hosts that have none, all at once.

        Raises:
            HostsError: A `ray start` ended, or is not done after 120 s: says what it printed.
        """
        logs = [self._scratch / f"{host.name}.log" for host in hosts]
        for host, log in zip(hosts, logs, strict=True):
            with log.open("wb") as output:
                self._commands[host.index] = self.popen(host, self._ray_start(host), stdout=output, stderr=output)
        until = time.monotonic() + START_S
        for host, log in zip(hosts, logs, strict=True):
            while _STARTED not in (said := log.read_text(errors="replace")):
                if self._commands[host.index].poll() is not None or time.monotonic() > until:
                    raise HostsError(f"Ray does not start on {host.name}: {said}")
                time.sleep(0.05)

    def _separate(self, host: Host) -> None:
        """Give a host the places of its own that Ray's processes of one machine find each other by."""
        own = self._scratch / host.name
        own.mkdir()
        Path("/tmp/ray").mkdir(mode=0o1777, exist_ok=True)
        host.show_alone(own, "/tmp/ray")
        host.hide("/dev/shm")

    def _ray_start(self, host: Host) -> list[str]:
        # `--block`: the command ends with what it started, and they with it.
        command = ["ray", "start", "--block", f"--node-ip-address={host.address}", f"--num-cpus={self.cpus_per_host}"]
        command += [f"{option}={port}" for option, port in PORTS.items()]
        command += [f"--include-log-monitor={str(self.logs_to_driver).lower()}", "--object-store-memory=200000000"]
        command += [f"--resources={json.dumps({host.name: 1})}"]
        command += [f"--labels=role={'worker' if host.index else 'head'}"]
        if host.index == 0:
            command += ["--head", f"--port={HEAD_PORT}", f"--ray-client-server-port={CLIENT_PORT}"]
            return [*command, "--include-dashboard=false"]
        return [*command, f"--address={self.address}"]
