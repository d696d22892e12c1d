"""Open a checkpoint where its files are: on the driver, or on the first node of the cluster that sees them."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysharding.checkpoint import Checkpoint, open_checkpoint
from raysharding.errors import CheckpointError, RayshardingError


def local_path(checkpoint: str) -> str | None:
    """Return the path in the file system that a checkpoint names, `None` for a remote URI."""
    if "://" not in checkpoint:
        return os.path.abspath(checkpoint)
    parts = urlsplit(checkpoint)
    return unquote(parts.path) if parts.scheme == "file" else None


def open_anywhere(checkpoint: str | os.PathLike[str], start_s: float) -> Checkpoint:
    """Open and validate a checkpoint before any rank works.

    Args:
        checkpoint: As `from_checkpoint` takes it.
        start_s: Deadline for the nodes' answers, where the driver does not see the path.

    Raises:
        CheckpointError: No node sees it, or it is not valid.
    """
    given = os.fspath(checkpoint)
    path = local_path(given)
    if path is None or os.path.exists(path):
        return open_checkpoint(given)
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    task = ray.remote(num_cpus=0, max_retries=0)(_open_if_there)
    refs = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(path): address
        for node_id, address in nodes.items()
    }
    ready, late = ray.wait(list(refs), num_returns=len(refs), timeout=start_s)
    for ref in late:
        ray.cancel(ref, force=True)
    for ref in ready:
        found = ray.get(ref)
        if isinstance(found, RayshardingError):
            raise found
        if found is not None:
            return Checkpoint.from_json(found)
    asked = ", ".join(refs[ref] for ref in ready) or "none"
    silent = f"; no answer from {', '.join(refs[ref] for ref in late)}" if late else ""
    raise CheckpointError(
        f"no such file or directory on the driver or on any node (asked: {asked}){silent}", path=given
    )


def _open_if_there(path: str) -> bytes | RayshardingError | None:
    """Runs on one node: the opened checkpoint, the error in it, or `None` where the node does not see it."""
    if not os.path.exists(path):
        return None
    try:
        return open_checkpoint(path).to_json()
    except RayshardingError as error:
        return error
