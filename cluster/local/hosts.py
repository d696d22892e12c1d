"""Several hosts on one machine: network namespaces on a bridge, each behind a link of a set rate in both directions.

Standard library and the commands `ip`, `tc`, `unshare`, `nsenter` only; needs root. `with Hosts(3, rate_mbit=800) as
hosts:` makes them and takes everything away at its end, processes included. `ray_hosts.py` starts Ray on them.

Note [What a host has of its own]: network, host name, mounts; nothing else. Processes see those of all hosts, and all
hosts share this machine's files but for what is mounted on one. One process on each host, the keeper, does nothing and
holds the three namespaces: `Host.popen` enters them, so that all processes of a host see the same mounts.
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


@dataclass
class Host:
    """One host: loopback and `INTERFACE`, a host name, mounts."""

    index: int
    name: str
    """Host name; resolves to `address` on every host."""
    address: str
    """IPv4 address of `INTERFACE`."""
    namespace: str
    """Network namespace."""
    hub: str
    """Namespace of the bridge."""
    is_shaped: bool
    """Whether the link has a rate."""
    keeper: subprocess.Popen[str] | None = None
    """See Note [What a host has of its own]."""
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)
    """Those that `popen` started."""

    @property
    def port(self) -> str:
        """The bridge's end of the link."""
        return f"port{self.index}"

    def popen(
        self, command: Sequence[str], *, cwd: str | os.PathLike[str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """`subprocess.Popen` on this host. Its pid is the command's; `Hosts` kills what is left of it at the end.

        Args:
            command: Program and arguments.
            cwd: Working directory, as the host sees it. Default: this process's.
            options: Of `subprocess.Popen`.
        """
        assert self.keeper is not None, "popen needs a host that was made"
        enter = ["nsenter", f"--target={self.keeper.pid}", "--net", "--uts", "--mount", "--"]
        change = ["sh", "-c", 'cd "$0" && exec "$@"', os.path.abspath(os.fspath(cwd or os.getcwd()))]
        process = subprocess.Popen([*enter, *change, *command], **options)
        self.processes.append(process)
        return process

    def run(self, *command: str, timeout_s: float = 30.0) -> str:
        """Run a command on this host to its end and return what it printed.

        Raises:
            HostsError: It failed, or took longer than `timeout_s`.
        """
        process = self.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.communicate()
            raise HostsError(f"`{' '.join(command)}` on {self.name} runs longer than {timeout_s:g} s") from error
        if process.returncode:
            said = errors.strip()
            raise HostsError(f"`{' '.join(command)}` on {self.name} failed with {process.returncode}: {said}")
        return str(output)

    def show_alone(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        """Let this host see `source` at the directory `target`; the others see what lies there."""
        self.run("mount", "--bind", os.fspath(source), os.fspath(target))

    def hide(self, target: str | os.PathLike[str]) -> None:
        """Let this host see an empty directory at `target`; what the others see there stays."""
        self.run("mount", "-t", "tmpfs", "none", os.fspath(target))

    def pids(self) -> list[int]:
        """Every process on this host but the keeper, children of children too."""
        kept = self.keeper.pid if self.keeper is not None else 0
        # What `popen` has just started is on its way in: it is in no list of the namespace yet. It is asked before that
        # list is made, or one that enters, forks and ends meanwhile would be in neither, and its child live on.
        entering = {process.pid for process in self.processes if process.poll() is None}
        inside = set(map(int, _run("ip", "netns", "pids", self.namespace).split()))
        return sorted((inside | entering) - {kept})

    def kill(self, timeout_s: float = 10.0) -> None:
        """End every process on this host at once, as a reset does; mounts and links stay, so that it can start anew.

        Raises:
            HostsError: Some outlive SIGKILL.
        """
        deadline = time.monotonic() + timeout_s
        while pids := self.pids():
            if time.monotonic() > deadline:
                raise HostsError(f"processes {', '.join(map(str, pids))} of {self.name} outlive SIGKILL")
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)
        for process in self.processes:
            process.wait(timeout=timeout_s)
        self.processes.clear()

    def cut(self) -> None:
        """Lose every packet from and to this host, without a word to either side, until `mend`."""
        _run("ip", "-n", self.hub, "link", "set", self.port, "nomaster")

    def mend(self) -> None:
        """Undo `cut`."""
        _run("ip", "-n", self.hub, "link", "set", self.port, "master", "bridge")

    def link_bytes(self) -> LinkBytes:
        """What this host's link has carried.

        Of a shaped link as the shaper counts it, with the headers of every packet that goes over a real wire: the
        interface itself counts one header for 64 KiB, since it never cuts them into packets.
        """
        sent = _carried_bytes(self.namespace, INTERFACE, self.is_shaped)
        return LinkBytes(sent, _carried_bytes(self.hub, self.port, self.is_shaped))

    def close(self) -> None:
        """End what runs here, the keeper last."""
        self.kill()
        if self.keeper is not None:
            self.keeper.kill()
            self.keeper.wait(timeout=10.0)
            self.keeper = None


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
                    host.close()
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
        missing = [command for command in ("ip", "tc", "unshare", "nsenter") if shutil.which(command) is None]
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
            self._shape(host)
        host.keeper = _start_keeper(host)

    def set_rate(self, rate_mbit: float | None) -> None:
        """Change the rate of every link, each way, while the hosts work. The counters of links begin anew.

        Args:
            rate_mbit: In Mbit/s; `None` for as fast as the machine is.
        """
        self.rate_mbit = rate_mbit
        for host in self._hosts:
            if host.is_shaped:
                for namespace, interface in _ends(host):
                    _run("tc", "-n", namespace, "qdisc", "delete", "dev", interface, "root")
            host.is_shaped = rate_mbit is not None
            if host.is_shaped:
                self._shape(host)

    def _shape(self, host: Host) -> None:
        """Limit what leaves both ends of a host's link."""
        assert self.rate_mbit is not None
        rate = int(self.rate_mbit * 1e6)
        limit = self.burst_bytes + int(rate / 8 * QUEUE_S)
        shaper = ["tbf", "rate", f"{rate}bit", "burst", str(self.burst_bytes), "limit", str(limit)]
        for namespace, interface in _ends(host):
            _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *shaper)


def _ends(host: Host) -> tuple[tuple[str, str], ...]:
    """(namespace, interface) of both ends of a host's link."""
    return (host.namespace, INTERFACE), (host.hub, host.port)


def _start_keeper(host: Host) -> subprocess.Popen[str]:
    rename = f"echo {host.name} > /proc/sys/kernel/hostname && echo ready && exec sleep infinity"
    # `ip netns exec` makes the mount namespace, with the host's own files over those of /etc.
    command = ["ip", "netns", "exec", host.namespace, "unshare", "--uts", "sh", "-c", rename]
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    if keeper.stdout.readline() != "ready\n":
        _, said = keeper.communicate(timeout=30)
        raise HostsError(f"`{' '.join(command)}` failed with {keeper.returncode}: {said.strip()}")
    return keeper


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


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
