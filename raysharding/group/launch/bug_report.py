"""`write_bug_report`: what others need to look into a group's failure, in one zip file, without secrets."""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from raysharding.errors import GroupError, said
from raysharding.group.cluster import NodeFacts, ask_nodes, facts_here, tell, versions_here
from raysharding.group.launch.launch import RunningGroup
from raysharding.group.launch.masking import MASK, Masker
from raysharding.group.supervision import read_log, read_stacks

_NUM_LINES = 2000
_NODES_S = 15.0
_SHOWN_VARIABLES = [
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "HF_HUB_OFFLINE",
    "LD_LIBRARY_PATH",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RAY_ADDRESS",
    "RAY_AUTH_MODE",
    "TOKENIZERS_PARALLELISM",
]


def write_bug_report(running: RunningGroup, title: str, status: Mapping[str, Any], path: str | None) -> str:
    """Write a bug report of a group in any state; see `ShardedModelGroup.bug_report`.

    Args:
        running: The group.
        title: The group's `repr`.
        status: Result of `ShardedModelGroup.status`.
        path: The user's argument.

    Returns:
        The absolute path of the file.
    """
    mask = Masker([os.environ, *_runtime_variables(running)])
    versions = _versions(running)
    parts: dict[str, Any] = {
        "group.txt": _group(running, title),
        "status.json": status,
        "error.txt": _error(running.client.supervisor.status.cause),
        "versions.json": versions,
        "environment.json": {name: os.environ.get(name) for name in _SHOWN_VARIABLES},
        **{f"stacks/rank-{rank}.txt": text for rank, text in _stacks(running).items()},
        **{f"logs/rank-{rank}.txt": text for rank, text in _logs(running).items()},
    }
    masked = {
        name: mask(part) if isinstance(part, str) else json.dumps(mask.data(part), indent=2, default=str)
        for name, part in parts.items()
    }
    target = _target(path)
    with zipfile.ZipFile(target, "x", zipfile.ZIP_DEFLATED) as report:
        for name, text in masked.items():
            report.writestr(name, text)
    num_masks = sum(text.count(MASK) for text in masked.values())
    ranks = f"stacks and logs of {len(running.client.ranks)} ranks"
    what = f"status, error, {ranks}, versions of {len(versions)} processes and nodes, options"
    tell(f"bug report: {what}; {num_masks} values are masked; read it before you send it: {target}")
    return str(target)


def _target(path: str | None) -> Path:
    target = Path.cwd() if path is None else Path(path).absolute()
    return target / f"raysharding-{time.strftime('%Y%m%d-%H%M%S')}.zip" if target.is_dir() else target


def _runtime_variables(running: RunningGroup) -> list[Mapping[str, Any]]:
    environments = [running.spec.placement.runtime_env or {}]
    if ray.is_initialized():
        environments.append(ray.get_runtime_context().runtime_env)
    return [environment.get("env_vars") or {} for environment in environments]


def _group(running: RunningGroup, title: str) -> str:
    spec = running.spec
    environment = dict(spec.placement.runtime_env or {})
    if environment.get("env_vars"):
        environment["env_vars"] = dict.fromkeys(environment["env_vars"], MASK)
    shown = replace(spec, placement=replace(spec.placement, runtime_env=environment or None))
    facts = running.facts
    model = f"{facts.num_parameters:,} parameters, {facts.dtype}"
    parts = (title, model, shown, f"newest files: {running.files.origin}", running.load_report)
    return "\n\n".join(map(str, (*parts, running.preflight_report or "no preflight report")))


def _error(cause: GroupError | None) -> str:
    if cause is None:
        return "the group is not broken\n"
    lines = [f"{type(cause).__name__}: {said(cause)}"]
    lines += [f"\n{failure}\n{failure.traceback}" for _, failure in sorted(cause.failures.items())]
    return "\n".join([*lines, *getattr(cause, "__notes__", ())])


def _versions(running: RunningGroup) -> dict[str, Any]:
    """Return the versions of the driver, of each rank's node in the preflight, and of each living node now."""
    report = running.preflight_report
    versions: dict[str, Any] = {"driver": versions_here()}
    for node in () if report is None else report.nodes:
        versions[f"ranks on {node.node_ip}"] = dict(node.versions)
    if ray.is_initialized():
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        for node_id, facts in ask_nodes(facts_here, nodes, _NODES_S):
            found = dict(facts.versions) if isinstance(facts, NodeFacts) else f"no answer: {facts}"
            versions[f"node {nodes[node_id]} ({node_id[:8]})"] = found
    return versions


def _stacks(running: RunningGroup) -> Mapping[int, str]:
    if not ray.is_initialized():  # a remote call would start another Ray
        return {one.rank: "Ray was shut down\n" for one in running.client.ranks}
    return read_stacks(running.client.members)


def _logs(running: RunningGroup) -> dict[int, str]:
    def read(rank: int) -> str:
        try:
            return read_log(running.client.members[rank], _NUM_LINES)
        except GroupError as error:
            return f"{error}\n"

    ranks = range(len(running.client.members))
    with ThreadPoolExecutor(16, "raysharding-logs") as pool:  # a lost node takes 30 s
        return dict(zip(ranks, pool.map(read, ranks), strict=True))
