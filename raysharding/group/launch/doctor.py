"""`diagnose`: the preflight of a whole cluster, with a small actor on every node; `raysharding doctor` calls it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysharding.config import Placement, Timeouts
from raysharding.errors import PreflightError, RayshardingError
from raysharding.group.actors import REMOTE_RANK_ACTOR, ActorInfo, Title
from raysharding.group.calls import ModelFiles
from raysharding.group.cluster import Lifetime, Reservation, connect, join_announced, replies, tell
from raysharding.group.launch.launch import RunningGroup, rendezvous
from raysharding.group.launch.preflight import Finding, Preflight, PreflightReport
from raysharding.group.launch.spec import GroupSpec
from raysharding.group.launch.start_actors import Started, number_actors

_TIMEOUTS = Timeouts(start_s=60.0, rendezvous_s=30.0, call_s=120.0)


def diagnose(address: str | None = None, port_range: tuple[int, int] | None = None) -> PreflightReport:
    """Check versions, interfaces, links, free memory and exposure of every node; reserve nothing, leave nothing behind.

    The check starts one process without a GPU on each node, or two if the cluster has a single node. The processes form
    a gloo process group, as CPU ranks do. (The preflight of a group on GPUs checks that group's NCCL.)

    Args:
        address: The cluster. Default: the one that `ray.init()` finds or starts. A cluster that is joined here is left
            at the end.
        port_range: As groups will have it; see `Placement`.

    Raises:
        PlacementError: The cluster does not answer.
        ValueError: `port_range` is none.
    """
    placement = Placement(port_range=port_range)
    was_connected = ray.is_initialized()
    if address is None and not join_announced():
        tell("doctor: RAY_ADDRESS names no cluster: this is about a Ray on this machine, started for the check")
    connect(address)
    try:
        return _diagnose(placement)
    finally:
        if not was_connected:
            ray.shutdown()


def _diagnose(placement: Placement) -> PreflightReport:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    chosen = nodes * 2 if len(nodes) == 1 else nodes
    group = f"doctor {secrets.token_hex(3)}"
    actors = [_start(node["NodeID"], Title("doctor", group, index)) for index, node in enumerate(chosen)]
    started, findings = _await(actors, [node["NodeManagerAddress"] for node in chosen])
    if not started.members:
        return PreflightReport((), None, tuple(findings), 0.0)
    # The supervision kills the actors in all cases; there is no placement group to release.
    spec = GroupSpec(checkpoint="", placement=placement, timeouts=_TIMEOUTS)
    nothing = Reservation(None, {}, is_ours=False)
    running = RunningGroup.assemble(group, spec, started, nothing, files=ModelFiles(""))
    supervisor = running.client.supervisor
    preflight = Preflight(running.client, thorough=True)
    preflight.add(findings)
    try:
        preflight.listened("the driver", *supervisor.connect_ranks(placement.port_range))
        preflight.nodes(with_gpus=True)
        store = rendezvous(running)
        preflight.listened("rank 0's store", store.host, store.port)
        preflight.link()
    except RayshardingError as error:
        if not (isinstance(error, PreflightError) and preflight.report().errors):
            preflight.add([Finding(True, "link", str(error))])
    finally:
        supervisor.shutdown()
    return preflight.report()


def _start(node_id: str, title: Title) -> Any:
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": here}
    return REMOTE_RANK_ACTOR.options(**options).remote(title)


def _await(actors: Sequence[Any], addresses: Sequence[str]) -> tuple[Started, list[Finding]]:
    """Wait until the actors report where they run; kill those that do not, and return a finding for each of them."""
    answered: dict[int, ActorInfo] = {}
    findings = []
    refs = {actor.probe.remote(()): index for index, actor in enumerate(actors)}
    for index, answer in replies(refs, _TIMEOUTS.start_s):
        if not isinstance(answer, ray.exceptions.RayError):
            answered[index] = answer
            continue
        ray.kill(actors[index], no_restart=True)
        late = isinstance(answer, ray.exceptions.GetTimeoutError)
        why = f"did not start within {_TIMEOUTS.start_s:g} s" if late else f"could not start: {answer}"
        findings.append(Finding(True, "node", f"node {addresses[index]}: a process without resources {why}"))
    alive = sorted(answered)  # in the order of the nodes, whoever answered first
    started = number_actors([actors[index] for index in alive], [answered[index] for index in alive], "cpu", Lifetime())
    return started, findings
