"""Preflight: finds faults of nodes and links before bytes move.

Note: what is checked when.
    Every `from_checkpoint` checks versions and interfaces, which each rank's process reports in one round of calls; an
    all-reduce of one number; and free memory against the need of the shards and the load, which the ranks know once
    the module is built on meta. Together these take a few ms. A group on several nodes also checks a broadcast of
    64 MB, because a wrong interface or a slow link matters there (0.1 s at 10 Gbit/s, negligible beside the load), and
    Ray's authentication, because other hosts may reach Ray's ports. `raysharding doctor` checks everything on all
    nodes.

`Preflight`: queries the ranks of one group and collects their answers in a report.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from raysharding.distributed.comm import LinkTimes
from raysharding.distributed.footprint import MemoryNeed, Need
from raysharding.errors import CallTimeoutError, PreflightError
from raysharding.group.calls import Client, collect_all
from raysharding.group.cluster import NodeFacts, dashboard_url, versions_here
from raysharding.group.ranks import RankInfo
from raysharding.report import Report, Table
from raysharding.units import format_bytes as size

Subject = Literal["versions", "interface", "link", "memory", "security", "node"]
MUST_AGREE = ("python", "torch", "raysharding")
"""Packages whose code all ranks run as one program; the others only read files or carry messages."""
BROADCAST_BYTES = 64_000_000


@dataclass(frozen=True)
class Finding:
    """One fault."""

    is_error: bool
    """True if the group cannot work with the fault; False for a warning."""
    subject: Subject
    """Subject of the check."""
    message: str
    """The nodes, the values, and the cure."""

    def __str__(self) -> str:
        return f"{'error' if self.is_error else 'warning'}: {self.subject}: {self.message}"


@dataclass(frozen=True, repr=False)
class PreflightReport(Report):
    """Results of a preflight."""

    nodes: tuple[NodeFacts, ...]
    """Facts of each node, reported by its first rank."""
    link: LinkTimes | None
    """Times of the slowest rank; `None` if the ranks did not reach this check."""
    findings: tuple[Finding, ...]
    """Findings, errors first."""
    seconds: float
    """Time that the checks took."""
    ports: tuple[str, ...] = ()
    """Lines on the ports where processes listened, as far as `raysharding doctor` came; empty in a group's report."""

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that prevent a group from working."""
        return tuple(finding for finding in self.findings if finding.is_error)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The other findings."""
        return tuple(finding for finding in self.findings if not finding.is_error)

    def raise_if_wrong(self) -> None:
        """Raise one error with all findings if there are errors.

        Raises:
            PreflightError: There are errors; the error also lists the warnings.
        """
        if self.errors:
            message = f"preflight found {len(self.errors)} errors; from_checkpoint(preflight=False) loads anyway:"
            raise PreflightError(message, problems=[str(finding) for finding in self.findings])

    def _title(self) -> str:
        return "preflight"

    def _parts(self) -> Iterator[Table | str]:
        packages = list(dict.fromkeys(name for node in self.nodes for name in node.versions))
        rows = [
            (
                node.node_ip,
                *(node.versions.get(name, "-") for name in packages),
                node.chosen_interface or node.interface or "none",
                size(node.available_bytes),
                str(len(node.gpu_free_bytes)),
            )
            for node in self.nodes
        ]
        yield Table(("node", *packages, "interface", "free memory", "gpus"), rows)
        if self.ports:
            yield f"ports: {', '.join(self.ports)}"
        yield _link_line(self.link)
        yield from map(str, self.findings or ["nothing is wrong"])


def _link_line(link: LinkTimes | None) -> str:
    if link is None:
        return "link: not measured"
    rate = link.bytes_per_s
    broadcast = "" if rate is None else f", broadcast of {size(link.broadcast_bytes)} at {size(int(rate))}/s"
    return f"link: all-reduce {link.latency_s * 1e3:.2f} ms{broadcast}"


def check_versions(driver: Mapping[str, str], nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Compare the versions of the driver and the nodes.

    The build (`+cpu`, `+cu128`) is not compared: the driver needs no GPU, so it may run another build.
    """
    names = dict.fromkeys(name for versions in (driver, *(node.versions for node in nodes)) for name in versions)
    for name in names:
        holders: dict[str, list[str]] = {}
        for where, versions in [("the driver", driver), *((node.node_ip, node.versions) for node in nodes)]:
            version = versions.get(name, "absent")
            seen = holders.setdefault(_release(name, version), [])
            if where not in seen:
                seen.append(where)
        if len(holders) > 1:
            values = "; ".join(f"{version} on {', '.join(where)}" for version, where in holders.items())
            cure = "install one version everywhere, for example by Placement(runtime_env={'pip': [...]})"
            yield Finding(name in MUST_AGREE, "versions", f"{name} differs: {values}; {cure}")


def _release(name: str, version: str) -> str:
    # Pickled functions hold byte code, which changes with Python's minor version but not with its micro version.
    return ".".join(version.split(".")[:2]) if name == "python" else version.partition("+")[0]


def check_builds(device: str, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a finding for each node where ranks are to run on CUDA, and torch is a build for CPUs."""
    cure = "knows no GPU: install torch's build for the GPUs there, or give device='cpu'"
    for node in nodes:
        build = node.versions.get("torch", "")
        if device.startswith("cuda") and build.endswith("+cpu"):
            yield Finding(True, "versions", f"torch {build} on node {node.node_ip} {cure}")


def check_interfaces(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield a finding for each node whose ranks would send messages over an interface that reaches no other node."""
    if len({node.node_ip for node in nodes}) < 2:
        return
    for node in nodes:
        name = node.chosen_interface or node.interface
        is_loopback = name is not None and name.split(",")[0].strip() == "lo"
        if node.chosen_interface is not None and is_loopback:
            what = f"GLOO_SOCKET_IFNAME={name} is the loopback interface"
            cure = "unset GLOO_SOCKET_IFNAME there, or set it to the interface that the other nodes reach"
        elif is_loopback or ipaddress.ip_address(node.node_ip).is_loopback:
            what = f"its address is the loopback interface's ({name or 'lo'})"
            cure = "start Ray there with --node-ip-address=<address that the other nodes reach>"
        elif name is None:
            what = "no network interface owns that address"
            cure = "set GLOO_SOCKET_IFNAME there, or start Ray with an address of one of its interfaces"
        else:
            continue
        what = f"node {node.node_ip}: {what}, which no other node of the group can reach"
        yield Finding(True, "interface", f"{what}: {cure}")


def check_security(nodes: Sequence[NodeFacts], dashboard: str) -> Iterator[Finding]:
    """Yield findings on access to Ray itself: without a token, anyone who reaches Ray's ports can run code.

    Args:
        nodes: Facts of the nodes.
        dashboard: Address of the dashboard, from `dashboard_url`.
    """
    where = ", ".join(dict.fromkeys(node.node_ip for node in nodes if not node.has_token_auth))
    if not where:
        return
    cure = (
        "on every node run `ray get-auth-token --generate` once (and copy ~/.ray/auth_token), export "
        "RAY_AUTH_MODE=token, and restart the cluster"
    )
    yield Finding(False, "security", f"Ray runs without token authentication on {where}: {cure}")
    if dashboard and not _is_loopback_host(dashboard.rpartition(":")[0]):
        what = f"the dashboard at {dashboard} accepts jobs from anyone who reaches it"
        cure = "use a token, or start Ray with --dashboard-host=127.0.0.1 (the default)"
        yield Finding(False, "security", f"{what}: {cure}")


def _is_loopback_host(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


LINK_S = 60.0
"""Deadline of the link check in seconds. 64 MB take this long at 10 Mbit/s, at which a load takes days."""
_MEMORY_TRIES = 3
_MEMORY_PAUSE_S = 1.0

_log = logging.getLogger("raysharding")


class Preflight:
    """The checks of one group's nodes and links, in the order in which they become possible."""

    def __init__(self, client: Client, *, thorough: bool = False) -> None:
        """Create a preflight that has checked nothing yet.

        Args:
            client: Sends commands to the ranks.
            thorough: True to run, on a single node too, the checks that only matter between several nodes.
        """
        self.client = client
        self.findings: list[Finding] = []
        """Findings of these checks, and of others."""
        self.ports: list[str] = []
        """Lines on the ports at which processes listened."""
        self._thorough = thorough or len({info.node_id for info in client.ranks}) > 1
        self._nodes: dict[str, NodeFacts] = {}
        self._link: LinkTimes | None = None
        self._seconds = 0.0

    def _ask(self, method: str, arguments: Sequence[tuple[Any, ...]], deadline_s: float) -> list[Any]:
        """Run a command with arguments by rank, and return the ranks' values."""
        begun = time.monotonic()
        call = self.client.submit_each(method, arguments, deadline_s=deadline_s, collect=collect_all)
        values: list[Any] = call.result()
        self._seconds += time.monotonic() - begun
        return values

    def nodes(self, *, with_gpus: bool = False) -> None:
        """Compare the facts that the ranks report of their nodes, before the rendezvous.

        Raises:
            PreflightError: The nodes cannot work together; the error lists all findings.
        """
        ranks = self.client.ranks
        arguments = [(info.node_ip, with_gpus) for info in ranks]
        facts: list[NodeFacts] = self._ask("node_facts", arguments, self.client.timeouts.start_s)
        for info, found in zip(ranks, facts, strict=True):
            self._nodes.setdefault(info.node_id, found)
        nodes = list(self._nodes.values())
        self.findings += check_versions(versions_here(), facts)
        self.findings += [*check_interfaces(nodes), *check_builds(ranks[0].device, nodes)]
        if self._thorough:
            self.findings += check_security(nodes, dashboard_url())
        self.report().raise_if_wrong()

    def link(self) -> None:
        """Time small all-reduces, and between nodes a broadcast, after the rendezvous.

        Raises:
            PreflightError: The collectives did not end within 60 s; the error says what each rank was doing.
        """
        num_bytes = BROADCAST_BYTES if self._thorough else 0
        try:
            times: list[LinkTimes] = self._ask("check_link", [(num_bytes,)] * len(self.client.ranks), LINK_S)
        except CallTimeoutError as error:
            message = f"the ranks met, but a small all-reduce{' and a broadcast' * bool(num_bytes)} did not end"
            problems = [str(failure) for _, failure in sorted(error.failures.items())]
            raise PreflightError(f"{message} within {LINK_S:g} s: {error.message}", problems=problems) from error
        self._link = max(times, key=lambda link: (link.broadcast_s, link.latency_s))

    def memory(self, optimizer: Callable[..., Any] | None) -> None:
        """Compare free memory with the need of shards and load, once the module is built on meta; log all warnings.

        Raises:
            PreflightError: A node's host memory, or a rank's GPU memory, is too small.
        """
        ranks, findings = self.client.ranks, list[Finding]()
        for attempt in range(_MEMORY_TRIES):
            if attempt:
                time.sleep(_MEMORY_PAUSE_S)  # the memory of an earlier group may not be free yet
            arguments = [(optimizer,)] * len(ranks)
            needs: list[MemoryNeed] = self._ask("memory_need", arguments, self.client.timeouts.start_s)
            findings = list(check_memory(ranks, needs))
            if not any(finding.is_error for finding in findings):
                break
        self.findings += findings
        for node_id, facts in self._nodes.items():
            here = {
                info.device: need.device for info, need in zip(ranks, needs, strict=True) if info.node_id == node_id
            }
            gpus = tuple(device.free for device in here.values() if device is not None)
            self._nodes[node_id] = replace(facts, gpu_free_bytes=gpus)
        report = self.report()
        report.raise_if_wrong()
        for finding in report.warnings:
            _log.warning("preflight: %s: %s", finding.subject, finding.message)

    def report(self) -> PreflightReport:
        """Return the report of the checks so far, errors first."""
        findings = tuple(sorted(self.findings, key=lambda finding: not finding.is_error))
        return PreflightReport(tuple(self._nodes.values()), self._link, findings, self._seconds, tuple(self.ports))


def check_memory(ranks: Sequence[RankInfo], needs: Sequence[MemoryNeed]) -> Iterator[Finding]:
    """Compare need and have: host memory by node, GPU memory by GPU.

    Args:
        ranks: Infos by rank.
        needs: Memory needs by rank.
    """
    hosts: dict[str, list[int]] = {}
    gpus: dict[tuple[str, str], list[int]] = {}
    for info in ranks:
        hosts.setdefault(info.node_id, []).append(info.rank)
        gpus.setdefault((info.node_id, info.device), []).append(info.rank)
    for members in hosts.values():
        named = f"ranks {', '.join(map(str, members))} on node {ranks[members[0]].node_ip}"
        cure = "spread the ranks over more nodes, or load in a narrower dtype"
        yield from _short(f"host memory of {named}", [needs[rank].host for rank in members], cure)
    for (_, device), members in gpus.items():
        who = f"rank {members[0]} (" if len(members) == 1 else f"ranks {', '.join(map(str, members))} (together on "
        named = f"GPU memory of {who}{device} of node {ranks[members[0]].node_ip})"
        cure = "use more ranks" if len(members) == 1 else "give each rank more of a GPU: Placement(gpus_per_rank=1)"
        cure += ", or Sharding(cpu_offload=True), or end what else uses the GPU"
        yield from _short(named, [need for rank in members if (need := needs[rank].device) is not None], cure)


def _short(what: str, needs: Sequence[Need], cure: str) -> Iterator[Finding]:
    """Add up the needs of ranks that share memory, and yield a finding if it is short."""
    load, training = sum(need.load for need in needs), sum(need.training for need in needs)
    free = min((need.free for need in needs), default=0)
    if load > free:
        amounts = f"{size(load)} are needed for shards and load, {size(free)} are free"
        yield Finding(True, "memory", f"{what}: {amounts}: short by {size(load - free)}; {cure}")
    elif load + training > free:
        amounts = f"{size(load + training)} are needed with gradients and optimizer state, {size(free)} are free"
        yield Finding(False, "memory", f"{what}: {amounts}: a train step may run out of memory; {cure}")
