"""The only module that uses Ray's private names; checked with Ray 2.60.

The public state API (`ray.util.state`) queries the dashboard, which may not be running; these functions query the GCS.
Behind `ray://` a process has no connection to the GCS: `client_mode_wrap` then runs a function as a task.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import accelerators, state, worker
from ray._private.client_mode_hook import client_mode_wrap
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS, LOG_PREFIX_ACTOR_NAME
from ray._private.worker import WORKER_MODE, get_dashboard_url
from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply, NodeStatus
from ray.exceptions import RpcError
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
    internal_kv_get_gcs_client,
)
from ray.util.client import ray as client_context

_IDLE_MS = 300_000
"""Ray's default for the time after which an autoscaler removes an idle node."""
_STATUS_S = 2.0
_KV_NAMESPACE = "raysharding"
_HEAD = "node:__internal_head__"
_MANAGERS = {
    "xpu": accelerators.IntelGPUAcceleratorManager,
    "npu": accelerators.NPUAcceleratorManager,
    "hpu": accelerators.HPUAcceleratorManager,
}
"""torch's device type → what Ray knows of such accelerators; of any other type, what it knows of CUDA's."""


@dataclass(frozen=True, slots=True)
class AcceleratorNames:
    """Ray's names for accelerators of one device type."""

    resource: str
    """The resource, such as `GPU`."""
    visible_devices: str
    """The variable by which a process sees only some of its node's accelerators."""
    noset: tuple[str, ...]
    """The variables that keep Ray from masking a worker's accelerators."""


def accelerator_names(device_type: str) -> AcceleratorNames:
    """Return Ray's names for accelerators of one of torch's device types; those of CUDA for a type unknown to Ray."""
    manager = _MANAGERS.get(device_type, accelerators.NvidiaGPUAcceleratorManager)
    mask = manager.get_visible_accelerator_ids_env_var()
    # ROCm's device type is `cuda` as well, and CUDA's mask holds there, but Ray sets one of its own beside it.
    masks = (mask,) if device_type in _MANAGERS else (mask, "HIP_VISIBLE_DEVICES")
    noset = tuple(f"RAY_EXPERIMENTAL_NOSET_{name}" for name in masks)
    return AcceleratorNames(manager.get_resource_name(), mask, noset)


def started_cluster() -> bool:
    """Return True if `ray.init()` in this process started the cluster, which ends with this process."""
    return worker._global_node is not None and bool(worker._global_node.head)


def is_in_session(path: str) -> bool:
    """Return True if a local path is inside Ray's session directory, where Ray puts and removes copies of its own.

    A job of `ray job submit --working-dir` runs in such a copy, and so does a Tune trial. False behind `ray://`.
    """
    node = worker._global_node
    folder = "" if node is None else os.path.realpath(node.get_session_dir_path())
    return bool(folder) and os.path.realpath(path).startswith(folder + os.sep)


def may_grow() -> bool:
    """Return False if nothing adds nodes to the cluster by itself; True if an autoscaler does, or Ray does not say.

    Ray's monitor publishes the type of each node every 5 s: without an autoscaler, it makes a type of its own for each
    node. Autoscaler v2 publishes none.
    """
    status = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or b"{}")
    types = (status.get("autoscaler_report") or {}).get("node_type_mapping") or {}
    return not types or any(node_type != f"node_{node_id}" for node_id, node_type in types.items())


def _cluster_status() -> GetClusterStatusReply:
    """Return what the GCS knows of the cluster; nothing if it does not answer within 2 s. For the controller's process.

    `ray.autoscaler.v2.sdk.get_cluster_status` drops parts of the reply.
    """
    with suppress(RpcError):
        return GetClusterStatusReply.FromString(internal_kv_get_gcs_client().get_cluster_status(timeout_s=_STATUS_S))
    return GetClusterStatusReply()


def is_infeasible(placement_group_id: str) -> bool:
    """Return True if an autoscaler reports that no nodes that it may add make room for a placement group.

    False if the GCS does not answer within 2 s.

    Autoscaler v2 reports this, v1 does not for placement groups. v2 reports it as well while what others use or wait
    for takes up what it may add, or idle nodes of another type do: that may change, and the result is False.
    """
    reply = _cluster_status()
    scaler, cluster = reply.autoscaling_state, reply.cluster_resource_state
    if all(gang.details.partition(":")[0] != placement_group_id for gang in scaler.infeasible_gang_resource_requests):
        return False
    others = len(cluster.pending_gang_resource_requests) > 1 or cluster.pending_resource_requests
    if others or cluster.cluster_resource_constraints or scaler.pending_instance_requests or scaler.pending_instances:
        return False
    alive = [node for node in cluster.node_states if node.status != NodeStatus.DEAD]
    return all(_HEAD in node.total_resources or node.idle_duration_ms >= _IDLE_MS for node in alive)


@client_mode_wrap
def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return the free resources of each node: node id → resource → amount. A node that just joined may be missing."""
    return state.available_resources_per_node()  # type: ignore[no-any-return]


def stale_nodes(need: Mapping[str, float]) -> list[str]:
    """Return the ids of the nodes that have the resources by their own report, but not by the GCS's count.

    The GCS takes what it is about to reserve from its count, and leaves it there if it cannot reach the node: seen with
    Ray 2.60 where a node is back at its address and port, and the GCS has not reconnected. The count is corrected when
    the node reports a change, and an idle node has none to report. None if the GCS does not answer within 2 s.
    """
    counts = free_resources()
    stale = []
    for node in _cluster_status().cluster_resource_state.node_states:
        count, report = counts.get(node.node_id.hex()), node.available_resources
        if count is not None and node.status != NodeStatus.DEAD:
            fits = all(report.get(name, 0.0) >= amount for name, amount in need.items())
            if fits and any(count.get(name, 0.0) < amount for name, amount in need.items()):
                stale.append(node.node_id.hex())
    return stale


def write_record(key: str, value: Any) -> None:
    """Keep a value in Ray's internal KV, as Ray Serve's controller keeps its own; waits for the GCS."""
    _internal_kv_put(key, pickle.dumps(value), overwrite=True, namespace=_KV_NAMESPACE)


def read_record(key: str) -> Any:
    """Return the value that `write_record` kept; `None` if there is none."""
    stored = _internal_kv_get(key, namespace=_KV_NAMESPACE)
    return None if stored is None else pickle.loads(stored)


def delete_record(key: str) -> None:
    """Remove the value that `write_record` kept, if there is one."""
    _internal_kv_del(key, namespace=_KV_NAMESPACE)


def delete_records_of_dead_jobs() -> None:
    """Remove the records of groups without a name whose driver was killed; their keys begin with the job's id."""
    dead = {job["JobID"] for job in state.jobs() if job["IsDead"]}
    for key in _internal_kv_list("", namespace=_KV_NAMESPACE):
        job, _, token = key.decode().partition("/")
        if token and job in dead:
            delete_record(key.decode())


def gcs_answers(timeout_s: float) -> bool:
    """Return True if the GCS answers in time."""
    try:
        internal_kv_get_gcs_client().internal_kv_get(b"", _KV_NAMESPACE.encode(), timeout=timeout_s)
    except (RpcError, ray.exceptions.RaySystemError):
        return False
    return True


def client_session() -> tuple[str, str] | None:
    """Return (id of the session, `host:port` of Ray Client's server) behind `ray://`; `None` elsewhere. Never waits.

    `ray.is_initialized()` and the runtime context send a request there, and wait for the network or raise without it.
    """
    client = client_context.get_context().client_worker
    return (client._client_id, client._conn_str) if client is not None and client.is_connected() else None


def ray_session() -> tuple[str, str] | None:
    """Return an identifier of this program's Ray session; `None` without one. Never waits."""
    client = client_session()
    if client is not None or not ray.is_initialized():
        return client
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()  # job ids alone repeat in a new cluster


def was_restarted() -> bool:
    """Return True in an actor whose process replaces one that has died."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray names no other way to know it
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


@client_mode_wrap
def is_dead(handle: Any) -> bool:
    """Return True if an actor has ended for good; not if Ray restarts it."""
    return bool(state.actors(actor_id=handle._actor_id.hex()).get("State") == "DEAD")


def actor_id(handle: Any) -> str:
    """Return the id of an actor."""
    return str(handle._actor_id.hex())


def name_log_lines(name: str) -> None:
    """Make Ray put `name` in front of the lines that this worker prints from now on, where the driver shows them."""
    for stream in (sys.stdout, sys.stderr):
        print(f"{LOG_PREFIX_ACTOR_NAME}{name}", file=stream, flush=True)


def is_worker() -> bool:
    """Return True if this process runs a Ray task or actor, and is not a driver."""
    return bool(ray.get_runtime_context().worker.mode == WORKER_MODE)


def has_token_auth() -> bool:
    """Return True if this process authenticates to Ray with a token."""
    return bool(get_authentication_mode() == AuthenticationMode.TOKEN)


@client_mode_wrap
def dashboard_url() -> str:
    """Return host:port of the cluster's dashboard; empty if none is running."""
    url: str | None = get_dashboard_url()
    return (url or "").rpartition("://")[2].rstrip("/")
