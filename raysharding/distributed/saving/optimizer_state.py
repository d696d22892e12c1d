"""Optimizer state in a save, written and loaded: tensors as checkpoint files, the rest as JSON, beside the model.

Format of `optimizer/raysharding.optimizer.json`: {"format_version": 1, "outline": `OptimizerSnapshot.outline`}. The
tensors are a checkpoint of their own beside that file, under `FQN/name`. Nothing is pickled or depends on the world
size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from raysharding.checkpoint.format import MAX_JSON_BYTES, OPTIMIZER_FOLDER, OPTIMIZER_NAME, parse_object, read_beside
from raysharding.checkpoint.storage import join_path, normal_path, split_path, storage_of
from raysharding.checkpoint.writing import make_folder, write_file
from raysharding.config import Loading
from raysharding.distributed.comm import agreeing, from_rank_0, get_rank
from raysharding.distributed.fully_shard import TensorTable, over_ranks_of, warn_once
from raysharding.distributed.loading import LoadReport, Progress, load_checkpoint
from raysharding.distributed.optim import OptimizerSnapshot
from raysharding.distributed.saving.file_writers import write_tensors
from raysharding.errors import CheckpointError, PlanError, RayshardingError

FORMAT_VERSION = 1
"""Version of the JSON files of optimizer and training state; the only one so far."""


def write_optimizer(
    tensors: Mapping[str, torch.Tensor],
    outline: Mapping[str, Any],
    staging: str,
    device: torch.device,
    stall_s: float,
    on_round: Callable[[int], None],
    token: str = "",
) -> None:
    """Write optimizer state into a save; collective.

    Args:
        tensors: Tensors of the snapshot.
        outline: The snapshot's outline: all but its tensors, as JSON.
        staging: Temporary directory of the save.
        device: Device of the messages.
        stall_s: Longest wait for one round of messages, in seconds.
        on_round: Called with the bytes written so far.
        token: Of the save; with a URI, part of the files' names.

    Raises:
        CheckpointError: On every rank, if the disk is full or failed.
    """
    directory = str(from_rank_0(partial(make_folder, staging, OPTIMIZER_FOLDER)))
    written = write_tensors(tensors, directory, device, stall_s, on_round, token=token)
    with agreeing():
        if get_rank() == 0:
            written.finish(directory)
            fields = {"format_version": FORMAT_VERSION, "outline": outline}
            write_file(directory, OPTIMIZER_NAME, json.dumps(fields).encode("ascii"))


def has_optimizer_state(checkpoint: str | os.PathLike[str]) -> bool:
    """Return True if a save that this process sees holds optimizer state.

    Args:
        checkpoint: Path or URI of a save, or of a file in it.

    Raises:
        CheckpointError: The path is not accessible.
    """
    path = join_path(beside(checkpoint, OPTIMIZER_FOLDER), OPTIMIZER_NAME)
    return storage_of(path).find(path).kind != "missing"


@over_ranks_of("module")
def load_optimizer_state(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint: str | os.PathLike[str],
    *,
    loading: Loading | None = None,
    progress: Progress | None = None,
    stall_s: float = 120.0,
) -> LoadReport:
    """Load the optimizer state of `save_checkpoint(..., optimizer=...)`, bit for bit, at any world size; collective.

    Args:
        module: The sharded root module.
        optimizer: Optimizer over its parameters, with class and param groups as saved; its state and hyperparameters
            (including the learning rate) are replaced. State that the save lacks is dropped.
        checkpoint: Path or URI of the save, or of a file in it.
        loading: Options of the transfer: `transport`, `verify`, buckets; dtypes stay as saved.
        progress: Called on every rank as `progress(phase, bytes done, bytes in total, tensor)`.
        stall_s: Longest wait for one bucket, in seconds.

    Returns:
        The same report on every rank. Cost as for `load_checkpoint`.

    Raises:
        CheckpointError: On every rank, if there is no such state, or it is unreadable or unsafe.
        PlanError: On every rank, before data moves, if state or param groups do not match the optimizer, which is then
            unchanged.
        RuntimeError: From the process group, if a rank died.
    """
    return OptimizerLoad.plan(module, optimizer, checkpoint).run(loading, progress, stall_s)


@dataclass(frozen=True)
class OptimizerLoad:
    """A planned load of optimizer state that fits the optimizer."""

    module: nn.Module
    """The sharded root module."""
    optimizer: torch.optim.Optimizer
    """Optimizer that receives the state."""
    directory: str
    """Directory of the files."""
    target: OptimizerSnapshot
    """Saved snapshot, with tensors on meta that are sharded like the module's."""

    @classmethod
    @over_ranks_of("module")
    def plan(
        cls, module: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: str | os.PathLike[str]
    ) -> OptimizerLoad:
        """Read and compare all but the tensors; collective. Raises as `load_optimizer_state`."""
        directory = beside(checkpoint, OPTIMIZER_FOLDER)
        target = OptimizerSnapshot.from_outline(from_rank_0(partial(_read_outline, module, directory)), module)
        # Optimizers may differ between ranks: all raise, so that no rank waits in the load.
        with agreeing():
            try:
                current = OptimizerSnapshot.of(module, optimizer)
            except ValueError as error:
                raise PlanError(str(error)) from error
            target.check_fits(current)
        return cls(module, optimizer, directory, target)

    def run(self, loading: Loading | None, progress: Progress | None, stall_s: float) -> LoadReport:
        """Load the tensors, and set the state of the optimizer; collective."""
        table = TensorTable(self.target.tensors, like=self.module)  # allocated like the module's shards
        options = replace(loading or Loading(), dtype=None, strict=True, key_mapping=None, mmap=False)
        report = load_checkpoint(table, self.directory, loading=options, progress=progress, stall_s=stall_s)
        dropped = self.target.dropped(OptimizerSnapshot.of(self.module, self.optimizer))
        if dropped and get_rank() == 0:
            warn_once(dropped)
        self.target.apply(self.module, self.optimizer, table.tensors)
        return report


def beside(checkpoint: str | os.PathLike[str], folder: str) -> str:
    """Return the path of a folder beside the model files of a save."""
    path = normal_path(os.fspath(checkpoint))
    return join_path(split_path(path)[0] if path.endswith((".safetensors", ".json")) else path, folder)


def read_own_json(directory: str, name: str, check: Callable[[dict[str, Any]], Any]) -> dict[str, Any] | None:
    """Read a JSON file of a save, of the format of this package; `None` if it is missing.

    Args:
        directory: Directory of the file.
        name: Name of the file.
        check: Called with the fields; raises if they are not what this package writes.

    Raises:
        CheckpointError: The file is unreadable, or has another format.
        PlanError: From `check`.
    """
    data = read_beside(storage_of(directory), directory, name, MAX_JSON_BYTES)
    if data is None:
        return None
    path = join_path(directory, name)
    try:
        fields = parse_object(data)
        if fields.get("format_version") != FORMAT_VERSION:
            what = f"has format_version {fields.get('format_version')!r}, this raysharding reads {FORMAT_VERSION}"
            raise CheckpointError(what, path=path)
        check(fields)
    except RayshardingError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"is not what raysharding writes ({error!r})", path=path) from error
    return fields


def _read_outline(module: nn.Module, directory: str) -> Any:
    def check(fields: dict[str, Any]) -> None:
        OptimizerSnapshot.from_outline(fields["outline"], module)

    fields = read_own_json(directory, OPTIMIZER_NAME, check)
    if fields is None:
        what = "holds no optimizer state: save with an optimizer, or load the model alone"
        raise CheckpointError(what, path=split_path(directory)[0])
    return fields["outline"]
