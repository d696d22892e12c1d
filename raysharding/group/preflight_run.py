"""`Preflight`: asks the ranks of one group, and gathers what they say into a report."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from raysharding.distributed.footprint import MemoryNeed
from raysharding.distributed.link_check import LinkTimes
from raysharding.errors import CallTimeoutError, PreflightError
from raysharding.group.channel import Channel
from raysharding.group.group_plan import size
from raysharding.group.node_facts import NodeFacts, versions_here
from raysharding.group.preflight import (
    BROADCAST_BYTES,
    Finding,
    PreflightReport,
    check_interfaces,
    check_security,
    check_versions,
    dashboard_url,
    errors_first,
)
from raysharding.group.ranks import RankInfo
from raysharding.group.results import collect_all

LINK_S = 60.0
"""Longest time of the link's check. 64 MB take it at 10 Mbit/s, where a load takes days."""
_MEMORY_TRIES = 3
_MEMORY_PAUSE_S = 1.0

_log = logging.getLogger("raysharding")


class Preflight:
    """The checks of one group's nodes and links, in the order in which they become possible."""

    def __init__(self, channel: Channel, *, thorough: bool = False) -> None:
        """Check nothing yet.

        Args:
            channel: The way to the ranks.
            thorough: Also on one node what only matters between several.
        """
        self.channel = channel
        self._thorough = thorough or len({info.node_id for info in channel.ranks}) > 1
        self._nodes: list[NodeFacts] = []
        self._findings: list[Finding] = []
        self._link: LinkTimes | None = None
        self._seconds = 0.0

    def nodes(self, *, with_gpus: bool = False) -> None:
        """Compare what the ranks' processes see of their nodes; before they meet.

        Raises:
            PreflightError: They cannot work together; lists everything.
        """
        begun = time.monotonic()
        ranks = self.channel.ranks
        arguments = [(info.node_ip, with_gpus) for info in ranks]
        call = self.channel.submit_each(
            "look", arguments, deadline_s=self.channel.timeouts.start_s, collect=collect_all
        )
        facts: list[NodeFacts] = call.result()
        first_of_node = {info.node_id: info.rank for info in reversed(ranks)}
        self._nodes = [facts[rank] for rank in sorted(first_of_node.values())]
        self._findings += [*check_versions(versions_here(), facts), *check_interfaces(self._nodes)]
        if self._thorough:
            self._findings += check_security(self._nodes, dashboard_url())
        self._seconds += time.monotonic() - begun
        self.report().raise_if_wrong()

    def link(self) -> None:
        """Time small all-reduces, and between nodes a broadcast; once the ranks have met.

        Raises:
            PreflightError: Not done within 60 s; says what each rank was doing.
        """
        begun = time.monotonic()
        num_bytes = BROADCAST_BYTES if self._thorough else 0
        arguments = [(num_bytes,)] * len(self.channel.ranks)
        call = self.channel.submit_each("check_link", arguments, deadline_s=LINK_S, collect=collect_all)
        try:
            times: list[LinkTimes] = call.result()
        except CallTimeoutError as error:
            message = f"the ranks met, but a small all-reduce{' and a broadcast' * bool(num_bytes)} did not end"
            found = [str(failure) for _, failure in sorted(error.failures.items())]
            raise PreflightError(f"{message} within {LINK_S:g} s: {error.message}", problems=found) from error
        self._link = max(times, key=lambda one: (one.broadcast_s, one.latency_s))
        self._seconds += time.monotonic() - begun

    def memory(self, optimizer: Callable[..., Any] | None) -> None:
        """Compare free memory with what shards and load need; once the module is on meta.

        Raises:
            PreflightError: A node's host memory, or a rank's GPU memory, is too small.
        """
        begun = time.monotonic()
        findings: list[Finding] = []
        for attempt in range(_MEMORY_TRIES):
            if attempt:
                time.sleep(_MEMORY_PAUSE_S)  # what a group before this one held may be on its way back
            arguments = [(optimizer,)] * len(self.channel.ranks)
            deadline_s = self.channel.timeouts.start_s
            call = self.channel.submit_each("memory_need", arguments, deadline_s=deadline_s, collect=collect_all)
            findings = list(check_memory(self.channel.ranks, call.result()))
            if not any(finding.is_error for finding in findings):
                break
        self._findings += findings
        self._seconds += time.monotonic() - begun
        self.report().raise_if_wrong()

    def add(self, findings: Iterable[Finding]) -> None:
        """Add what others found."""
        self._findings += findings

    def report(self) -> PreflightReport:
        """What was found so far."""
        return PreflightReport(tuple(self._nodes), self._link, errors_first(self._findings), self._seconds)

    def finish(self) -> PreflightReport:
        """The report of a group that is about to load; its warnings are logged."""
        report = self.report()
        for finding in report.warnings:
            _log.warning("preflight: %s: %s", finding.subject, finding.message)
        return report


def check_memory(ranks: Sequence[RankInfo], needs: Sequence[MemoryNeed]) -> Iterable[Finding]:
    """Compare need and have: host memory node by node, GPU memory rank by rank.

    Args:
        ranks: By rank.
        needs: By rank.
    """
    nodes: dict[str, list[int]] = {}
    for info in ranks:
        nodes.setdefault(info.node_id, []).append(info.rank)
    for members in nodes.values():
        free = min(needs[rank].host_free_bytes for rank in members)
        load = sum(needs[rank].host_bytes for rank in members)
        training = sum(needs[rank].host_training_bytes for rank in members)
        named = f"ranks {', '.join(map(str, members))} on node {ranks[members[0]].node_ip}"
        cure = "spread the ranks over more nodes, or load in a narrower dtype"
        yield from _short(f"host memory of {named}", load, training, free, cure)
    for info, need in zip(ranks, needs, strict=True):
        if need.device_free_bytes is not None:
            named = f"GPU memory of rank {info.rank} ({info.device} of node {info.node_ip})"
            cure = "use more ranks, or Sharding(cpu_offload=True), or end what else uses the GPU"
            yield from _short(named, need.device_bytes, need.device_training_bytes, need.device_free_bytes, cure)


def _short(what: str, load: int, training: int, free: int, cure: str) -> Iterable[Finding]:
    if load > free:
        amounts = f"{size(load)} are needed for shards and load, {size(free)} are free"
        yield Finding(True, "memory", f"{what}: {amounts}: short by {size(load - free)}; {cure}")
    elif load + training > free:
        amounts = f"{size(load + training)} are needed with gradients and optimizer state, {size(free)} are free"
        yield Finding(False, "memory", f"{what}: {amounts}: a train step may run out of memory; {cure}")
