"""Opens a group's checkpoint, or LoRA adapters and the checkpoint that they name as their base.

A checkpoint is opened where its files are visible: on the driver, or on the first such node of the cluster.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysharding.checkpoint import Checkpoint, open_checkpoint
from raysharding.checkpoint.storage import is_remote, normal_path
from raysharding.errors import CheckpointError, RayshardingError
from raysharding.group.launch.spec import GroupSpec
from raysharding.models import Adapted


def local_path(checkpoint: str) -> str | None:
    """Return the file-system path of a checkpoint, `None` for a remote URI."""
    return None if is_remote(checkpoint) else normal_path(checkpoint)


def open_here(checkpoint: str) -> Checkpoint | None:
    """Open a checkpoint in this process; return `None` if this machine does not see the path.

    Raises:
        CheckpointError: The checkpoint is not valid, or of an unsupported kind.
    """
    path = local_path(checkpoint)
    return open_checkpoint(checkpoint) if path is None or _is_there(path) else None


def _is_there(path: str) -> bool:
    """Return True if a path exists and is not an empty directory, as a mount point without its mount is."""
    try:
        return bool(os.listdir(path))
    except NotADirectoryError:
        return True
    except OSError:
        return os.path.exists(path)  # an unreadable directory: opening it raises the error


def open_on_a_node(checkpoint: str, start_s: float) -> Checkpoint:
    """Open a checkpoint on the first node of the cluster that sees its path.

    Args:
        checkpoint: A local path or `file://` URI.
        start_s: Deadline for the nodes' answers.

    Raises:
        CheckpointError: No node sees the path, or the checkpoint is not valid.
    """
    path = local_path(checkpoint)
    assert path is not None, "a remote URI is opened on the driver"
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    task = ray.remote(num_cpus=0, max_retries=0)(_open_if_there)
    refs = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(path): address
        for node_id, address in nodes.items()
    }
    answer, silent = first_answer(refs, start_s)
    if isinstance(answer, RayshardingError):
        raise answer
    if answer is not None:
        return Checkpoint.from_json(answer)
    answered = ", ".join(address for address in nodes.values() if address not in silent) or "none"
    unanswered = "".join(f"; no answer from {address}: {why}" for address, why in silent.items())
    raise CheckpointError(
        f"no such file or directory, or an empty one, on the driver and on the nodes that answered ({answered})"
        f"{unanswered}",
        path=checkpoint,
    )


def first_answer(refs: Mapping[Any, str], timeout_s: float) -> tuple[Any, dict[str, str]]:
    """Return the first answer that is not `None`, and for the nodes that did not answer: address → reason.

    Args:
        refs: Ray reference → address of the node.
        timeout_s: Deadline for all nodes together.
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
            text = str(error).strip() or type(error).__name__
            silent[refs[ready[0]]] = text.splitlines()[-1]  # the last line of a remote traceback is the error itself
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
    """Return the opened checkpoint, the error in it, or `None` if the node does not see it; runs on a node."""
    if not _is_there(path):
        return None
    try:
        return open_checkpoint(path).to_json()
    except RayshardingError as error:
        return error


@dataclass(frozen=True)
class Opened:
    """An opened checkpoint and its model."""

    model: Any
    """The model that the ranks build: the user's `model` argument, or an `Adapted`."""
    base: Checkpoint
    """The checkpoint that the model is built for."""
    adapters: Checkpoint | None
    """The adapters that are loaded after the base; `None` without adapters."""

    @property
    def num_bytes(self) -> int:
        """Bytes to load."""
        return self.base.num_bytes + (0 if self.adapters is None else self.adapters.num_bytes)


def opened_here(spec: GroupSpec) -> Opened | None:
    """Open the checkpoint of a spec in this process; return `None` if this machine does not see all of it.

    Raises:
        CheckpointError: The checkpoint is not valid, or adapters name no base that can be opened.
        ValueError: The adapters in the files differ from `peft_config`.
    """
    return _opened(spec, open_here)


def opened_on_a_node(spec: GroupSpec, start_s: float) -> Opened:
    """Open the checkpoint of a spec on the first node of the cluster that sees its path; see `opened_here`.

    Args:
        spec: The group's spec.
        start_s: Deadline for the nodes' answers.
    """
    opened = _opened(spec, lambda path: open_here(path) or open_on_a_node(path, start_s))
    assert opened is not None, "open_on_a_node raises if no node sees the path"
    return opened


def opened_without_cluster(spec: GroupSpec) -> Opened:
    """Open the checkpoint of a spec in this process, without a cluster whose nodes might see it; see `opened_here`."""
    opened = _opened(spec, open_checkpoint)
    assert opened is not None, "open_checkpoint raises if the path is not there"
    return opened


def _opened(spec: GroupSpec, open_one: Callable[[str], Checkpoint | None]) -> Opened | None:
    given = open_one(spec.checkpoint)
    if given is None:
        return None
    if given.adapter is None:
        model = spec.model
        if isinstance(model, Adapted):
            model = replace(model, base=normal_path(spec.checkpoint))
        return Opened(model, given, None)
    adapted = Adapted.of_files(spec.model, given)
    base = adapted.base or given.adapter.get("base_model_name_or_path")
    how = "give the base's path and peft_config=LoraConfig.from_pretrained(adapters), then group.load(adapters)"
    if not isinstance(base, str) or not base or "\0" in base:
        what = f"adapter_config.json names no base model (base_model_name_or_path={base!r}): {how}"
        raise CheckpointError(what, path=given.path)
    try:
        opened = open_one(base)
    except CheckpointError as error:
        error.add_note(f"raysharding: {given.path} names this as its base model; if the base was moved, {how}")
        raise
    if opened is None:
        return None
    if opened.adapter is not None:
        raise CheckpointError(f"names {base} as its base model, which holds adapters as well: {how}", path=given.path)
    return Opened(replace(adapted, base=normal_path(base)), opened, given)
