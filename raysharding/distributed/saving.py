"""`save_checkpoint`: every writing rank fills its own checkpoint files; a rename makes them the checkpoint."""

from __future__ import annotations

import os
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn

from raysharding.checkpoint import Checkpoint, commit_staging, create_staging, remove_staging, write_file
from raysharding.checkpoint.uri import is_remote
from raysharding.distributed.agreement import agree, from_rank_0
from raysharding.distributed.file_writing import Written, total_bytes, write_tensors
from raysharding.distributed.gathering import saved_tensors
from raysharding.distributed.layout import message_device, unwrapped
from raysharding.distributed.loading import Progress, silent
from raysharding.distributed.memory import MemoryPeak
from raysharding.distributed.optimizer_files import write_optimizer
from raysharding.distributed.optimizer_state import agreed_snapshot
from raysharding.distributed.report import SaveReport
from raysharding.distributed.sharded_module import reshard
from raysharding.errors import CheckpointError
from raysharding.models import write_config_files


def save_checkpoint(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    overwrite: bool = False,
    source: Checkpoint | None = None,
    progress: Progress | None = None,
    stall_s: float = 120.0,
) -> SaveReport:
    """Write a sharded module as a standard Hugging Face directory; collective: every rank calls it.

    Each rank that sees the destination writes its own balanced part of the shard set; tensors reach it a bucket at a
    time, and nobody holds the model. Up to 256 MiB it is one `model.safetensors`. A reader sees the old checkpoint or
    the new one: all is written to a temporary sibling, synced, and renamed last. Beside the weights lies a manifest of
    checksums, taken while the bytes were written, for `Loading(verify="full")`.

    Args:
        module: A sharded module. Its parameters and persistent buffers are saved under the module's own FQNs, tied
            ones once; of buffers that differ between ranks (BatchNorm), rank 0's.
        path: The directory to make, on a file system that rank 0 sees.
        optimizer: Also save its state, by FQN, in the folder `optimizer`: `load_optimizer_state` brings it back at any
            world size. It is written as the model is, so no rank holds it whole. Default: the model alone.
        overwrite: Replace a checkpoint that is there.
        source: Where the model came from: its tokenizer and other small files are copied, where rank 0 sees them.
        progress: Called on every rank as `progress("save", bytes_done, bytes_total, "")`.
        stall_s: Longest wait for one round of messages, in seconds.

    Returns:
        The same report on every rank. Wire: every byte but the writers' own, once. Memory: about one bucket (32 MiB)
        a rank.

    Raises:
        CheckpointError: On every rank: the destination is refused, or the disk is full or failed. What was at `path`
            is untouched then, and the temporary directory is gone.
        PlanError: On every rank: the optimizer's state cannot be saved, or differs between ranks.
    """
    started = perf_counter()
    module = unwrapped(module)
    reshard(module)
    tensors = saved_tensors(module)
    snapshot = agreed_snapshot(module, optimizer)
    state = {} if snapshot is None else snapshot.tensors
    total = total_bytes(tensors) + total_bytes(state)
    device = message_device(module)
    peak = MemoryPeak(device)

    def on_round(done: int) -> None:
        peak.sample()
        (progress or silent)("save", done, total, "")

    staging = _create_staging(path, overwrite)
    try:
        written = write_tensors(tensors, staging, device, stall_s, on_round)
        error = _finish(module, written, staging, source)
        if snapshot is not None:
            agree(error)
            first = total_bytes(tensors)
            error = write_optimizer(snapshot, staging, device, stall_s, lambda done: on_round(first + done))
        agree(error or _commit(staging, os.fspath(path), overwrite))
    except BaseException as error:
        _discard(staging, error)
        raise
    figures = agree(None, {"wire_bytes": written.wire_bytes, "host_bytes": peak.host_bytes})
    return SaveReport(
        path=os.fspath(path),
        num_tensors=len(tensors) + len(state),
        num_bytes=total,
        num_files=len(written.plan.files),
        seconds=perf_counter() - started,
        wire_bytes=sum(figure["wire_bytes"] for figure in figures),
        peak_extra_bytes=tuple(figure["host_bytes"] for figure in figures),
    )


def _create_staging(path: str | os.PathLike[str], overwrite: bool) -> str:
    """Rank 0 makes the temporary directory; every rank learns its path."""
    return str(from_rank_0(partial(create_staging, path, overwrite=overwrite)))


def _discard(staging: str, error: BaseException) -> None:
    """Rank 0 removes what was written; a failure to do so is noted on the error that is already on its way."""
    if dist.get_rank() == 0:
        try:
            remove_staging(staging)
        except CheckpointError as left:
            error.add_note(str(left))


def _finish(module: nn.Module, written: Written, staging: str, source: Checkpoint | None) -> Exception | None:
    """Rank 0: index, manifest, config and small files. Whatever goes wrong is returned, for all."""
    if dist.get_rank() != 0:
        return None
    try:
        written.finish(staging)
        write_config_files(module, staging)
        _copy_sidecars(staging, source)
    except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
        return error
    return None


def _commit(staging: str, path: str, overwrite: bool) -> Exception | None:
    """Rank 0: make the staged directory the checkpoint."""
    if dist.get_rank() != 0:
        return None
    try:
        commit_staging(staging, path, overwrite=overwrite)
    except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
        return error
    return None


_NOT_COPIED = "config.json"
"""Written from the model, which may have another class or dtype than the source. The source's generation_config.json
stays: the ranks that cannot see it built the model without."""


def _copy_sidecars(staging: str, source: Checkpoint | None) -> None:
    """Copy the source's small files, wherever it is; a local one may be out of rank 0's sight, and is left then."""
    if source is None or not (is_remote(source.directory) or os.path.isdir(source.directory)):
        return
    for name in source.sidecar_files():
        if name != _NOT_COPIED:
            write_file(staging, name, source.read_sidecar(name))
