"""Preflight: what is wrong with nodes and links, found out before bytes move.

Note: what is checked when.
    Every `from_checkpoint`: versions and interfaces, which each rank's process tells in one round of calls; an
    all-reduce of one number; free memory against what the shards and the load need, which the ranks know once the
    module is built on meta. Together a few ms. Where the group spans several nodes also: a broadcast of 64 MB, since
    there a wrong interface or a slow link hurts (0.1 s at 10 Gbit/s, nothing beside the load), and Ray's
    authentication, since there others may reach its ports. `raysharding doctor` checks all of it on all nodes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import ray

from raysharding.distributed.link_check import LinkTimes
from raysharding.errors import PreflightError
from raysharding.group.describe import text_table
from raysharding.group.group_plan import size
from raysharding.group.node_facts import NodeFacts

Subject = Literal["versions", "interface", "link", "memory", "security", "node"]
MUST_AGREE = ("python", "torch", "raysharding")
"""What runs on every rank as one program; the others only read files or carry messages."""
BROADCAST_BYTES = 64_000_000


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    is_error: bool
    """Whether the group cannot work like this; else it is a warning."""
    subject: Subject
    """What was checked."""
    message: str
    """Which nodes, which values, and what to do."""

    def __str__(self) -> str:
        return f"{'error' if self.is_error else 'warning'}: {self.subject}: {self.message}"


@dataclass(frozen=True)
class PreflightReport:
    """What a preflight saw."""

    nodes: tuple[NodeFacts, ...]
    """One for each node, by what its first rank said."""
    link: LinkTimes | None
    """The slowest rank's times; `None` where the ranks did not come that far."""
    findings: tuple[Finding, ...]
    """Errors first."""
    seconds: float
    """Time that the checks took."""

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings with which a group cannot work."""
        return tuple(finding for finding in self.findings if finding.is_error)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The other findings."""
        return tuple(finding for finding in self.findings if not finding.is_error)

    def raise_if_wrong(self) -> None:
        """Raise what was found, all of it at once.

        Raises:
            PreflightError: There are errors; warnings are listed too.
        """
        if self.errors:
            message = f"preflight found {len(self.errors)} errors; from_checkpoint(preflight=False) tries all the same:"
            raise PreflightError(message, problems=[str(finding) for finding in self.findings])

    def __repr__(self) -> str:
        header = ("node", *_shown(self.nodes), "interface", "free memory", "gpus")
        rows = [
            (
                node.node_ip,
                *(node.versions.get(name, "-") for name in _shown(self.nodes)),
                node.chosen_interface or node.interface or "none",
                size(node.available_bytes),
                str(len(node.gpu_free_bytes)),
            )
            for node in self.nodes
        ]
        found = [str(finding) for finding in self.findings] or ["nothing is wrong"]
        return "\n".join([text_table(header, rows), _link_line(self.link), *found])


def _shown(nodes: Sequence[NodeFacts]) -> list[str]:
    return list(dict.fromkeys(name for node in nodes for name in node.versions))


def _link_line(link: LinkTimes | None) -> str:
    if link is None:
        return "link: not measured"
    rate = link.bytes_per_s
    broadcast = "" if rate is None else f", broadcast of {size(link.broadcast_bytes)} at {size(int(rate))}/s"
    return f"link: all-reduce {link.latency_s * 1e3:.2f} ms{broadcast}"


def errors_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Sort findings for a report."""
    return tuple(sorted(findings, key=lambda finding: not finding.is_error))


def check_versions(driver: Mapping[str, str], nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Compare the driver's versions and the nodes'.

    A build (`+cpu`, `+cu128`) is no version: the driver needs no GPU, so may run another one.
    """
    found = []
    names = dict.fromkeys(name for versions in (driver, *(node.versions for node in nodes)) for name in versions)
    for name in names:
        holders: dict[str, list[str]] = {}
        for where, versions in [("the driver", driver), *((node.node_ip, node.versions) for node in nodes)]:
            version = versions.get(name, "absent")
            seen = holders.setdefault(_release(name, version), [])
            if where not in seen:
                seen.append(where)
        if len(holders) > 1:
            told = "; ".join(f"{version} on {', '.join(where)}" for version, where in holders.items())
            cure = "install one version everywhere, for example by Placement(runtime_env={'pip': [...]})"
            found.append(Finding(name in MUST_AGREE, "versions", f"{name} differs: {told}; {cure}"))
    return found


def _release(name: str, version: str) -> str:
    # Pickled functions hold byte code, which changes with the minor version of Python and not with the micro one.
    return ".".join(version.split(".")[:2]) if name == "python" else version.partition("+")[0]


def check_interfaces(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Say on which node the ranks' messages would take a way that leads to no other node."""
    if len({node.node_ip for node in nodes}) < 2:
        return []
    found = []
    for node in nodes:
        name = node.chosen_interface or node.interface
        owner = f"node {node.node_ip}"
        if node.chosen_interface is not None and _is_loopback_name(node.chosen_interface):
            cure = "unset GLOO_SOCKET_IFNAME there, or name the interface that the other nodes reach"
            found.append(_unreachable(f"{owner}: GLOO_SOCKET_IFNAME={name} is the loopback interface", cure))
        elif ipaddress.ip_address(node.node_ip).is_loopback or (name is not None and _is_loopback_name(name)):
            cure = "start Ray there with --node-ip-address=<address that the others reach>"
            found.append(_unreachable(f"{owner}: its address is the loopback interface's ({name or 'lo'})", cure))
        elif name is None:
            cure = "set GLOO_SOCKET_IFNAME there, or start Ray with an address of one of its interfaces"
            found.append(_unreachable(f"{owner}: no network interface owns that address", cure))
    return found


def _is_loopback_name(interface: str) -> bool:
    return interface.split(",")[0].strip() == "lo"


def _unreachable(what: str, cure: str) -> Finding:
    return Finding(True, "interface", f"{what}, which no other node of the group can reach: {cure}")


def check_security(nodes: Sequence[NodeFacts], dashboard: str) -> list[Finding]:
    """Say whom Ray itself would let in: without a token, whoever reaches its ports can run code.

    Args:
        nodes: What they said.
        dashboard: From `dashboard_url`.
    """
    found = []
    open_nodes = [node.node_ip for node in nodes if not node.has_token_auth]
    if open_nodes:
        cure = (
            "on every node run `ray get-auth-token --generate` once (and copy ~/.ray/auth_token), export "
            "RAY_AUTH_MODE=token, and start the cluster anew"
        )
        where = ", ".join(dict.fromkeys(open_nodes))
        found.append(Finding(False, "security", f"Ray runs without token authentication on {where}: {cure}"))
    if open_nodes and dashboard and not _is_loopback_host(dashboard.rpartition(":")[0]):
        what = f"the dashboard at {dashboard} takes jobs from whoever reaches it"
        cure = "use a token, or start Ray with --dashboard-host=127.0.0.1 (the default)"
        found.append(Finding(False, "security", f"{what}: {cure}"))
    return found


def dashboard_url() -> str:
    """host:port of the cluster's dashboard, empty where none runs."""
    url: str | None = ray._private.worker.get_dashboard_url()
    return (url or "").rpartition("://")[2].rstrip("/")


def _is_loopback_host(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
