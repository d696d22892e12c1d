"""Several hosts on one machine: network namespaces on a bridge, each behind a link of a set rate in both directions.

Standard library and the commands `ip` and `tc` only; needs root. `with Hosts(3, rate_mbit=800) as hosts:` makes them
and takes everything away at its end, processes included. `python -m tests.bench.hosts` times a load over such links:
see `wire.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

INTERFACE = "eth0"
"""Name of each host's link, for GLOO_SOCKET_IFNAME and the like."""
BURST_S = 0.002
"""What a link may send at once after a pause, in seconds at its rate: 1 % of a window of 0.2 s."""
SMALLEST_BURST_BYTES = 128 << 10
"""Two segmentation-offload packets: a bucket of less than one would have each of them cut, at the cost of CPU time."""
QUEUE_S = 0.05
"""What waits for a link before packets are dropped, in seconds at its rate: a switch's buffer."""

_serials = itertools.count()


class HostsError(RuntimeError):
    """The hosts could not be made: names the command and what it said."""


@dataclass(frozen=True)
class LinkBytes:
    """Bytes of whole packets, Ethernet headers included, that a link has carried since it was made."""

    sent: int
    received: int

    def __sub__(self, other: LinkBytes) -> LinkBytes:
        return LinkBytes(self.sent - other.sent, self.received - other.received)


@dataclass(frozen=True)
class Host:
    """One host: a network namespace with loopback and `INTERFACE`; its processes see its own host name."""

    index: int
    name: str
    """Host name; resolves to `address` on every host."""
    address: str
    """IPv4 address of `INTERFACE`."""
    namespace: str
    hub: str
    """Namespace of the bridge."""
    is_shaped: bool
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)
    """Those that `popen` started."""

    @property
    def port(self) -> str:
        """The bridge's end of the link."""
        return f"port{self.index}"

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """`subprocess.Popen` on this host. Its pid is the command's; `Hosts` kills what is left of it at the end.

        The command has a mount namespace of its own too: what it mounts nobody else sees.
        """
        rename = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
        prefix = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", rename, self.name]
        process = subprocess.Popen([*prefix, *command], **options)
        self.processes.append(process)
        return process

    def link_bytes(self) -> LinkBytes:
        """What this host's link has carried.

        Of a shaped link as the shaper counts it, with the headers of every packet that goes over a real wire: the
        interface itself counts one header for 64 KiB, since it never cuts them into packets.
        """
        sent = _carried_bytes(self.namespace, INTERFACE, self.is_shaped)
        return LinkBytes(sent, _carried_bytes(self.hub, self.port, self.is_shaped))


class Hosts:
    """A context manager that makes hosts and removes them, also after an error and on SIGTERM.

    Args:
        num_hosts: How many; each has an address in one /24 of the bridge. The machine itself is not on it.
        rate_mbit: Rate of every link in Mbit/s, each way; `None` for as fast as the machine is.
        mtu: Largest packet in bytes, without the Ethernet header.
        congestion_control: TCP's on all hosts, such as `"reno"`. Default: the machine's own.

    Raises:
        HostsError: On entering, when a command fails: no root, no `ip`, a kernel without the modules.
    """

    def __init__(
        self, num_hosts: int, *, rate_mbit: float | None = None, mtu: int = 1500, congestion_control: str | None = None
    ) -> None:
        if not 1 <= num_hosts <= 250:
            raise ValueError(f"num_hosts={num_hosts}: give 1 to 250, the addresses of one /24")
        if rate_mbit is not None and not rate_mbit > 0:
            raise ValueError(f"rate_mbit={rate_mbit}: give a rate in Mbit/s, or None")
        self.rate_mbit = rate_mbit
        self.mtu = mtu
        self.congestion_control = congestion_control
        prefix = f"rs{os.getpid()}-{next(_serials)}"
        self.hub = f"{prefix}-hub"
        self._hosts = [
            Host(index, f"host{index}", f"10.77.0.{index + 1}", f"{prefix}-{index}", self.hub, rate_mbit is not None)
            for index in range(num_hosts)
        ]
        self._previous_handler: Any = None

    @property
    def burst_bytes(self) -> int:
        """What a shaped link lets through at once."""
        assert self.rate_mbit is not None
        return max(SMALLEST_BURST_BYTES, int(self.rate_mbit * 1e6 / 8 * BURST_S))

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # SIGTERM ends Python without leaving `with` blocks; as an exception it removes the hosts.
            self._previous_handler = signal.signal(signal.SIGTERM, _exit_on_signal)
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill every process on the hosts and remove them; idempotent."""
        is_main = self._previous_handler is not None
        if is_main:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the clean-up
        try:
            present = _namespaces()
            for host in self._hosts:
                if host.namespace in present:
                    _kill_all(host)
            for namespace in (self.hub, *(host.namespace for host in self._hosts)):
                if namespace in present:
                    _run("ip", "netns", "delete", namespace)  # the links go with it
                shutil.rmtree(_etc(namespace), ignore_errors=True)
        finally:
            if is_main:
                signal.signal(signal.SIGTERM, self._previous_handler)
                self._previous_handler = None

    def _make(self) -> None:
        if os.geteuid() != 0:
            raise HostsError("network namespaces need root: run as root, or leave this out")
        missing = [command for command in ("ip", "tc", "unshare") if shutil.which(command) is None]
        if missing:
            raise HostsError(f"not found: {', '.join(missing)}; install iproute2 and util-linux")
        _run("ip", "netns", "add", self.hub)
        _run("ip", "-n", self.hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self.hub, "link", "set", "bridge", "up")
        for host in self._hosts:
            self._make_host(host)

    def _make_host(self, host: Host) -> None:
        _etc(host.namespace).mkdir(parents=True)
        names = "".join(f"{other.address} {other.name}\n" for other in self._hosts)
        # Bound over the files of /etc. There is no way out to a name server, and nobody should wait for one.
        (_etc(host.namespace) / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (_etc(host.namespace) / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        _run("ip", "netns", "add", host.namespace)
        # No IPv6: programs must not take a link-local address for the host's.
        disable = "f=/proc/sys/net/ipv6/conf/all/disable_ipv6; [ ! -e $f ] || echo 1 > $f"
        name = self.congestion_control
        choose = f"echo {name} > /proc/sys/net/ipv4/tcp_congestion_control" if name else "true"
        _run("ip", "netns", "exec", host.namespace, "sh", "-ec", f"{disable}; {choose}")
        link = ["ip", "-n", host.namespace, "link"]
        hub_link = ["ip", "-n", self.hub, "link"]
        peer = ["peer", "name", host.port, "mtu", str(self.mtu), "netns", self.hub]
        _run(*link, "add", INTERFACE, "mtu", str(self.mtu), "type", "veth", *peer)
        _run(*hub_link, "set", host.port, "master", "bridge", "up")
        _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        _run(*link, "set", INTERFACE, "up")
        _run(*link, "set", "lo", "up")
        if self.rate_mbit is not None:
            self._shape(host.namespace, INTERFACE)
            self._shape(self.hub, host.port)

    def _shape(self, namespace: str, interface: str) -> None:
        """Limit what leaves an interface."""
        assert self.rate_mbit is not None
        rate = int(self.rate_mbit * 1e6)
        limit = self.burst_bytes + int(rate / 8 * QUEUE_S)
        shaper = ["tbf", "rate", f"{rate}bit", "burst", str(self.burst_bytes), "limit", str(limit)]
        _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *shaper)


def why_unavailable() -> str | None:
    """Why no hosts can be made here, or `None` if they can: for tests that skip themselves. Tries it, in 0.1 s."""
    try:
        with Hosts(1, rate_mbit=100.0):
            return None
    except HostsError as error:
        return str(error)


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if result.returncode:
        raise HostsError(f"`{' '.join(command)}` failed with {result.returncode}: {result.stderr.strip()}")
    return result.stdout


def _etc(namespace: str) -> Path:
    """Files of `ip netns exec` that stand in for those of /etc."""
    return Path("/etc/netns", namespace)


def _namespaces() -> set[str]:
    return {path.name for path in Path("/run/netns").glob("rs*")}


def _carried_bytes(namespace: str, interface: str, is_shaped: bool) -> int:
    """Bytes that have left an interface."""
    if is_shaped:
        (shaper,) = json.loads(_run("tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", interface))
        return int(shaper["bytes"])
    (link,) = json.loads(_run("ip", "-n", namespace, "-s", "-j", "link", "show", "dev", interface))
    return int(link["stats64"]["tx"]["bytes"])


def _kill_all(host: Host, timeout_s: float = 10.0) -> None:
    """End what runs on a host, its processes' children too."""
    deadline = time.monotonic() + timeout_s
    while pids := _run("ip", "netns", "pids", host.namespace).split():
        if time.monotonic() > deadline:
            raise HostsError(f"processes {', '.join(pids)} of {host.name} outlive SIGKILL")
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in host.processes:
            process.poll()  # takes the dead ones off the list
        time.sleep(0.01)
    for process in host.processes:
        process.wait(timeout=timeout_s)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    from tests.bench.wire import main

    main()
