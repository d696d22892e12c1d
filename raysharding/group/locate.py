"""Open a checkpoint where its files are: on the driver, or on the first node of the cluster that sees them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any
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


def anchored(checkpoint: str) -> str:
    """Return a path that means the same wherever the program goes: absolute, or the URI that it is."""
    return checkpoint if "://" in checkpoint else os.path.abspath(checkpoint)


def open_here(checkpoint: str) -> Checkpoint | None:
    """Open a checkpoint in this process; `None` where this machine does not see the path.

    Raises:
        CheckpointError: It is not valid, or of a kind that is not supported.
    """
    path = local_path(checkpoint)
    return open_checkpoint(checkpoint) if path is None or _is_there(path) else None


def _is_there(path: str) -> bool:
    """Whether there is something at a path; the mount point of what is mounted on other nodes is an empty directory."""
    try:
        return bool(os.listdir(path))
    except NotADirectoryError:
        return True
    except OSError:
        return os.path.exists(path)  # a directory that may not be read: opening it says so


def open_on_a_node(checkpoint: str, start_s: float) -> Checkpoint:
    """Open a checkpoint on the first node of the cluster that sees its path.

    Args:
        checkpoint: A local path or `file://` URI.
        start_s: Deadline for the nodes' answers.

    Raises:
        CheckpointError: No node sees it, or it is not valid.
    """
    path = local_path(checkpoint)
    assert path is not None, "a remote URI is opened on the driver"
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    task = ray.remote(num_cpus=0, max_retries=0)(_open_if_there)
    refs = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(path): address
        for node_id, address in nodes.items()
    }
    found, silent = first_answer(refs, start_s)
    if isinstance(found, RayshardingError):
        raise found
    if found is not None:
        return Checkpoint.from_json(found)
    asked = ", ".join(address for address in nodes.values() if address not in silent) or "none"
    unheard = "".join(f"; no answer from {address}: {why}" for address, why in silent.items())
    raise CheckpointError(
        f"no such file or directory, or an empty one, on the driver and on every node (asked: {asked}){unheard}",
        path=checkpoint,
    )


def first_answer(refs: Mapping[Any, str], timeout_s: float) -> tuple[Any, dict[str, str]]:
    """Return the first node's answer that is not `None`, and of the nodes that gave none: address → why.

    Args:
        refs: Ray reference → node's address.
        timeout_s: Deadline for all of them.
    """
    until = time.monotonic() + timeout_s
    pending, silent = list(refs), dict[str, str]()
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, until - time.monotonic()))
        if not ready:
            break
        try:
            answer = ray.get(ready[0])
        except ray.exceptions.RayError as error:
            said = str(error).strip() or type(error).__name__
            silent[refs[ready[0]]] = said.splitlines()[-1]  # of a remote traceback, the error itself
            continue
        if answer is not None:
            _cancel(pending)
            return answer, silent
    _cancel(pending)
    return None, silent | {refs[ref]: f"none within {timeout_s:g} s" for ref in pending}


def _cancel(refs: Sequence[Any]) -> None:
    for ref in refs:
        ray.cancel(ref, force=True)


def _open_if_there(path: str) -> bytes | RayshardingError | None:
    """Runs on one node: the opened checkpoint, the error in it, or `None` where the node does not see it."""
    if not _is_there(path):
        return None
    try:
        return open_checkpoint(path).to_json()
    except RayshardingError as error:
        return error
