"""`diagnose`: the preflight of a whole cluster, with a small actor on every node; `raysharding doctor` calls it."""

from __future__ import annotations

import ray

from raysharding.config import Placement, Timeouts
from raysharding.errors import PreflightError, RayshardingError
from raysharding.group.calls import Client
from raysharding.group.cluster import ask_nodes, connect, join_announced, tell
from raysharding.group.launch.launch import rendezvous, start_plan, start_ranks
from raysharding.group.launch.preflight import Finding, Preflight, PreflightReport
from raysharding.group.launch.spec import GroupSpec
from raysharding.group.launch.start_controller import start_controller
from raysharding.group.launch.start_report import StartClock

_TIMEOUTS = Timeouts(start_s=60.0, rendezvous_s=30.0, call_s=120.0)


def diagnose(address: str | None = None, port_range: tuple[int, int] | None = None) -> PreflightReport:
    """Check versions, interfaces, links, free memory and exposure of every node; reserve nothing, leave nothing behind.

    The check starts one process without a GPU on each node, or two if the cluster has a single node. The processes form
    a gloo process group, as CPU ranks do. (The preflight of a group on GPUs checks that group's NCCL.)

    Args:
        address: The cluster. Default: the one that `ray.init()` finds or starts. A cluster that is joined here is left
            at the end.
        port_range: Ports of rank 0's store, as `Placement` gives them to groups.

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
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    findings = []
    able = []
    for node_id, answer in ask_nodes(_answer, dict.fromkeys(nodes), _TIMEOUTS.start_s):
        if not isinstance(answer, ray.exceptions.RayError):
            able.append(node_id)
            continue
        late = isinstance(answer, ray.exceptions.GetTimeoutError)
        why = f"did not start within {_TIMEOUTS.start_s:g} s" if late else f"could not start: {answer}"
        findings.append(Finding(True, "node", f"node {nodes[node_id]}: a process without resources {why}"))
    if not able:
        return PreflightReport((), None, tuple(findings), 0.0)
    chosen = [node_id for node_id in nodes if node_id in able]  # in the order of the nodes, whoever answered first
    spec = GroupSpec(checkpoint="doctor", placement=placement, timeouts=_TIMEOUTS)
    client = Client(start_controller(spec), spec.title, _TIMEOUTS, 0)
    preflight = Preflight(client, thorough=True)
    preflight.findings += findings
    try:
        client.connection.attach(makes=True)
        with client.making():
            places = chosen * 2 if len(chosen) == 1 else chosen
            started = start_ranks(client, start_plan(spec, "cpu", len(places), node_ids=places))
            preflight.nodes(with_gpus=True)
            store = rendezvous(client, spec, started, StartClock())
            preflight.ports.append(f"rank 0's store listened at {store.host}:{store.port}")
            preflight.link()
    except RayshardingError as error:
        if not (isinstance(error, PreflightError) and preflight.report().errors):
            preflight.findings.append(Finding(True, "link", str(error)))
    finally:
        client.shutdown()
    return preflight.report()


def _answer(_: None) -> None:
    """Do nothing; a task that shows that a node starts processes."""
