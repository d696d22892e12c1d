"""`save_checkpoint`: every writing rank fills its own checkpoint files; a rename makes them the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysharding.checkpoint import (
    Checkpoint,
    FileWriter,
    Manifest,
    commit_staging,
    create_staging,
    file_names,
    plan_files,
    remove_staging,
    write_file,
    write_index,
    write_manifest,
)
from raysharding.checkpoint.uri import is_remote
from raysharding.config import MIB
from raysharding.distributed.agreement import agree
from raysharding.distributed.gathering import Gather, saved_tensors
from raysharding.distributed.layout import message_device
from raysharding.distributed.loading import Progress, silent
from raysharding.distributed.memory import MemoryPeak
from raysharding.distributed.metadata import broadcast_json
from raysharding.distributed.report import SaveReport
from raysharding.distributed.sharded_module import reshard
from raysharding.distributed.source import as_bytes
from raysharding.errors import CheckpointError
from raysharding.models import write_config_files

MAX_FILE_BYTES = 5_000_000_000
"""Largest checkpoint file, unless a single tensor is larger: transformers' own default."""
SMALL_BYTES = 256 * MIB
"""Up to this size a checkpoint is one file, written by rank 0: more files would only be harder to read."""


@dataclass(frozen=True)
class _FilePlan:
    """Who writes what."""

    names: tuple[tuple[str, ...], ...]
    """File → FQNs in it."""
    files: tuple[str, ...]
    """File names."""
    writers: tuple[int, ...]
    """File → rank that writes it."""

    def of_rank(self, rank: int) -> list[int]:
        """Files that a rank writes."""
        return [index for index, writer in enumerate(self.writers) if writer == rank]

    def destinations(self) -> dict[int, list[str]]:
        """Rank → FQNs that it must get."""
        wanted: dict[int, list[str]] = {}
        for names, writer in zip(self.names, self.writers, strict=True):
            wanted.setdefault(writer, []).extend(names)
        return wanted


def save_checkpoint(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
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
    """
    started = perf_counter()
    reshard(module)
    tensors = saved_tensors(module)
    device = message_device(module)
    peak = MemoryPeak(device)
    staging = _create_staging(path, overwrite)
    try:
        plan = _plan_files(tensors, staging)
        wire_bytes, parts = _write_files(tensors, plan, staging, device, stall_s, progress or silent, peak)
        agree(_finish(module, plan, parts, staging, os.fspath(path), overwrite, source))
    except BaseException as error:
        _discard(staging, error)
        raise
    figures = agree(None, {"wire_bytes": wire_bytes, "host_bytes": peak.host_bytes})
    return SaveReport(
        path=os.fspath(path),
        num_tensors=len(tensors),
        num_bytes=_total_bytes(tensors),
        num_files=len(plan.files),
        seconds=perf_counter() - started,
        wire_bytes=sum(figure["wire_bytes"] for figure in figures),
        peak_extra_bytes=tuple(figure["host_bytes"] for figure in figures),
    )


def _total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def _create_staging(path: str | os.PathLike[str], overwrite: bool) -> str:
    """Rank 0 makes the temporary directory; every rank learns its path."""
    staging = ""
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            staging = create_staging(path, overwrite=overwrite)
        except Exception as raised:  # noqa: BLE001 - the other ranks wait to hear of it
            error = raised
    agree(error)
    return str(broadcast_json(staging))


def _discard(staging: str, error: BaseException) -> None:
    """Rank 0 removes what was written; a failure to do so is noted on the error that is already on its way."""
    if dist.get_rank() == 0:
        try:
            remove_staging(staging)
        except CheckpointError as left:
            error.add_note(str(left))


def _plan_files(tensors: Mapping[str, torch.Tensor], staging: str) -> _FilePlan:
    """Deal the tensors over files and the files over the ranks that see the directory."""
    # On another node the path may be another disk. Every rank answers, so that all make the same plan.
    sees = agree(None, os.path.isdir(staging))
    able = [rank for rank, answer in enumerate(sees) if answer]
    total = _total_bytes(tensors)
    num_files = 1 if total <= SMALL_BYTES else max(len(able), -(-total // MAX_FILE_BYTES))
    names = plan_files({name: tensor.numel() * tensor.itemsize for name, tensor in tensors.items()}, num_files)
    return _FilePlan(names, file_names(len(names)), tuple(able[index % len(able)] for index in range(len(names))))


def _write_files(
    tensors: Mapping[str, torch.Tensor],
    plan: _FilePlan,
    staging: str,
    device: torch.device,
    stall_s: float,
    progress: Progress,
    peak: MemoryPeak,
) -> tuple[int, list[Any]]:
    """Gather every file's tensors on its writer and write them.

    Returns:
        The bytes that this rank sent, and what each rank wrote: its part of the manifest.
    """
    total = _total_bytes(tensors)
    with ExitStack() as open_files:
        writers = _Writers(plan, tensors, staging, open_files)
        agree(writers.error)
        gather = Gather(tensors, plan.destinations(), writers.write, device, stall_s)

        def on_round(done: int) -> None:
            peak.sample()
            progress("save", done, total, "")

        gather.run(on_round)
        # A full disk on one rank is everybody's failure; before this the others would go on to the commit.
        return gather.wire_bytes, agree(writers.error or writers.close(), writers.written)


class _Writers:
    """This rank's open files. After the first error it takes bytes and drops them, so that no sender is left.

    Every exception is kept and handed to `agree`: one that left the gather here would leave the other ranks in it.
    """

    def __init__(
        self, plan: _FilePlan, tensors: Mapping[str, torch.Tensor], staging: str, open_files: ExitStack
    ) -> None:
        self.error: Exception | None = None
        self.written: dict[str, Any] = {}
        """Manifest of this rank's files, after `close`."""
        self._files: list[FileWriter] = []
        self._file_of: dict[str, FileWriter] = {}
        for index in plan.of_rank(dist.get_rank()):
            layout = [(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in plan.names[index]]
            try:
                writer = open_files.enter_context(FileWriter(os.path.join(staging, plan.files[index]), layout))
            except CheckpointError as error:
                self.error = error
                return
            self._files.append(writer)
            self._file_of.update(dict.fromkeys(plan.names[index], writer))

    def write(self, name: str, first: int, values: torch.Tensor) -> None:
        """The gather's sink."""
        if self.error is None:
            try:
                self._file_of[name].write_at(name, first * values.itemsize, as_bytes(values))
            except Exception as error:  # noqa: BLE001 - see the class
                self.error = error

    def close(self) -> Exception | None:
        """Put every file on the disk and fill `written`; the first failure is returned."""
        try:
            for writer in self._files:
                writer.close()
            self.written = Manifest.of_files(self._files).as_dict()
        except Exception as error:  # noqa: BLE001 - see the class
            return error
        return None


def _finish(
    module: nn.Module,
    plan: _FilePlan,
    parts: Sequence[Mapping[str, Any]],
    staging: str,
    path: str,
    overwrite: bool,
    source: Checkpoint | None,
) -> Exception | None:
    """Rank 0: index, config, small files and manifest, then the commit. Whatever goes wrong is returned, for all."""
    if dist.get_rank() != 0:
        return None
    try:
        manifest = Manifest.of_parts(Manifest.from_dict(part, staging) for part in parts)
        if len(plan.files) > 1:
            weight_map = {name: file for names, file in zip(plan.names, plan.files, strict=True) for name in names}
            write_index(staging, weight_map, manifest.num_bytes)
        write_config_files(module, staging)
        _copy_sidecars(staging, source)
        write_manifest(staging, manifest)
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
