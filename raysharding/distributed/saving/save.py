"""`save_checkpoint`: every writing rank fills its own checkpoint files; a rename makes them the checkpoint.

`SaveContents`: what one save writes, as it was at one moment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.checkpoint import (
    ADAPTER_NAME,
    Checkpoint,
    SaveRecord,
    check_numbered,
    commit_staging,
    create_staging,
    new_token,
    remove_left_overs,
    remove_older,
    remove_staging,
    write_file,
)
from raysharding.checkpoint.format import ADAPTER_CONFIG_NAME, list_sidecar_files, read_sidecar
from raysharding.checkpoint.storage import is_remote, normal_path, storage_of
from raysharding.checkpoint.writing import is_save_name, own_sidecars
from raysharding.data import Position
from raysharding.distributed.comm import agree, from_rank_0
from raysharding.distributed.fully_shard import (
    local_tensor,
    message_device,
    parameters_left_alone,
    reshard,
    unwrapped,
    warn_once,
    with_layout,
)
from raysharding.distributed.loading import Progress, silent
from raysharding.distributed.optim import agreed_snapshot
from raysharding.distributed.saving.file_writers import Written, total_bytes, write_tensors
from raysharding.distributed.saving.optimizer_files import write_optimizer
from raysharding.distributed.saving.training_state import training_state, write_training
from raysharding.distributed.transfer import MemoryPeak, back, saved_tensors
from raysharding.errors import CheckpointError
from raysharding.models import AdapterNames, SavedTensor, adapter_files, config_files, saved_layout
from raysharding.units import format_bytes


@dataclass(frozen=True)
class SaveReport:
    """One save."""

    path: str
    """The directory written."""
    num_tensors: int
    """Tensors written; tied ones once."""
    num_bytes: int
    """Bytes of the tensors."""
    num_files: int
    """Checkpoint files."""
    seconds: float
    """From the call to the rename."""
    wire_bytes: int
    """Bytes that all ranks sent together."""
    peak_extra_bytes: tuple[int, ...]
    """Highest host memory above the start, on each rank."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes written over the whole time."""
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All fields and `bytes_per_s`, ready for JSON."""
        return asdict(self) | {"bytes_per_s": self.bytes_per_s}

    def __str__(self) -> str:
        return (
            f"saved {self.num_tensors} tensors, {format_bytes(self.num_bytes)}, in {self.num_files} files to "
            f"{self.path}: {self.seconds:.2f} s, {format_bytes(self.bytes_per_s)}/s, peak extra memory "
            f"{format_bytes(max(self.peak_extra_bytes))} a rank"
        )


@dataclass(frozen=True)
class SaveContents:
    """Tensors cut as the module's are; the rest ready to be written."""

    tensors: Mapping[str, torch.Tensor]
    """FQN → parameter or persistent buffer."""
    layout: Mapping[str, SavedTensor]
    """Key in the files → what of them it holds."""
    file_name: str | None
    """Of the one file that holds them; `None`: there may be several, under standard names."""
    state: Mapping[str, torch.Tensor]
    """`FQN/name` → tensor of the optimizer's state; empty without an optimizer."""
    outline: Mapping[str, Any] | None
    """What else the optimizer holds; `None` without one."""
    training: Mapping[str, Any] | None
    """Position and random generators; `None` without an optimizer."""

    @classmethod
    def of(cls, module: nn.Module, optimizer: torch.optim.Optimizer | None, position: Position | None) -> Self:
        """Look at them; collective. No tensor is copied.

        Raises:
            PlanError: On every rank: the optimizer's state cannot be saved, or differs between ranks.
        """
        if alone := parameters_left_alone(module):
            warn_once(
                f"{len(alone)} parameters are each rank's own (average_ignored_gradients=False): rank 0's are saved"
            )
        tensors, layout = model_contents(module)
        file_name = None if AdapterNames.of(module) is None else ADAPTER_NAME
        snapshot = agreed_snapshot(module, optimizer)
        if snapshot is None:
            return cls(tensors, layout, file_name, {}, None, None)
        return cls(tensors, layout, file_name, snapshot.tensors, snapshot.outline(), training_state(position))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, whole."""
        return total_bytes(self.tensors) + total_bytes(self.state)

    @property
    def num_tensors(self) -> int:
        """Tensors, the optimizer's with them."""
        return len(self.layout) + len(self.state)

    def copied(self, memory: HostMemory) -> Self:
        """Copy this rank's shards to host memory, where later steps do not change them. No collective.

        Args:
            memory: Where they go; nobody reads what an earlier copy left there any more.
        """
        return replace(self, tensors=memory.copies(self.tensors, "model"), state=memory.copies(self.state, "optimizer"))


def model_contents(module: nn.Module) -> tuple[dict[str, torch.Tensor], Mapping[str, SavedTensor]]:
    """Which of a module's tensors a save holds, by FQN, and as what; no collective."""
    tensors = saved_tensors(module)
    layout = saved_layout(module, tensors)
    held = {run.source for saved in layout.values() for run in saved.runs}
    return {fqn: tensor for fqn, tensor in tensors.items() if fqn in held}, layout  # of adapters nothing else


class HostMemory:
    """Memory of copies of this rank's shards, kept: memory that was touched before takes a copy in half the time.

    As large as the shards of weights and optimizer, once there was a copy; pinned for shards on a GPU.
    """

    def __init__(self) -> None:
        """No memory yet."""
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def copies(self, tensors: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
        """Copy tensors' local parts.

        Args:
            tensors: Name → DTensor, or a tensor that is whole.
            kind: Tells the names of one mapping from those of another.

        Returns:
            Name → tensor of the same layout, on the CPU.
        """
        copied = {name: self._copy((kind, name), tensor) for name, tensor in tensors.items()}
        if any(local_tensor(tensor).is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()  # the copies run beside the host, which may change the shards once this returns
        return copied

    def reserve(self, tensors: Mapping[str, torch.Tensor], kind: str) -> None:
        """Have memory for copies that will come. Arguments as of `copies`; the values do not matter yet."""
        for name, tensor in tensors.items():
            self._buffer((kind, name), local_tensor(tensor))

    def _buffer(self, key: tuple[str, str], local: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            if not local.is_cuda:
                back(buffer)  # page by page, as the copy comes, takes longer
            self._buffers[key] = buffer
        return buffer

    def _copy(self, key: tuple[str, str], tensor: torch.Tensor) -> torch.Tensor:
        local = local_tensor(tensor).detach()
        buffer = self._buffer(key, local)
        buffer.copy_(local, non_blocking=True)
        if not isinstance(tensor, DTensor):
            return buffer
        # On the CPU, whatever the mesh's device is: only the layout is asked of it.
        return with_layout(buffer, tensor, requires_grad=False)


def save_checkpoint(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    position: Position | None = None,
    overwrite: bool = False,
    keep_last: int | None = None,
    source: Checkpoint | None = None,
    progress: Progress | None = None,
    stall_s: float = 120.0,
) -> SaveReport:
    """Write a sharded module as a standard Hugging Face directory; collective: every rank calls it.

    Each rank that sees the destination writes its own balanced part of the shard set; tensors reach it a bucket at a
    time, and nobody holds the model. Up to 256 MiB it is one `model.safetensors`. A reader sees the old checkpoint or
    the new one: all is written to a temporary sibling, synced, and renamed last. Beside the weights lies a manifest of
    checksums, taken while the bytes were written, for `Loading(verify="full")`.

    An object store has no rename. There the index is written last, and nothing is a checkpoint without it; a checkpoint
    that is to be overwritten is removed first.

    Of a directory that is overwritten only what a save writes is replaced: weights, index, JSON of ours, config.json,
    generation_config.json, the folders `optimizer` and `training`, and small files that a save has copied there and
    nobody has changed. All else goes with the directory, by hard links, in the same rename.

    Args:
        module: A sharded module. Its parameters and persistent buffers are saved under their FQNs, a transformers
            model's under the names that `save_pretrained` gives them; tied ones once; of buffers that differ between
            ranks (BatchNorm), rank 0's. Of a model with LoRA adapters these alone are saved, as peft saves them:
            `adapter_model.safetensors` and `adapter_config.json`.
        path: The directory to make, on a file system that rank 0 sees; or a URI, to which every rank writes.
        optimizer: Also save its state, by FQN, in the folder `optimizer`: `load_optimizer_state` brings it back at any
            world size. It is written as the model is, so no rank holds it whole. Beside it, in the folder `training`,
            lie every rank's random generators. Default: the model alone.
        position: Where a run over data stands; saved with the optimizer. Default: there is none.
        overwrite: Replace a checkpoint that is there.
        keep_last: Of the saves beside this one whose names differ in the last number alone (`step-100`), how many stay,
            this one with them; after the commit older ones are removed, but for what no save wrote. Default: all.
        source: Where the model came from: its tokenizer and other small files are copied, where rank 0 sees them, and
            where the directory that is overwritten has none of that name that is not a save's.
        progress: Called on every rank as `progress("save", bytes_done, bytes_total, "")`.
        stall_s: Longest wait for one round of messages, in seconds.

    Returns:
        The same report on every rank. Wire: every byte but the writers' own, once. Memory: about one bucket (32 MiB)
        a rank; with a URI four parts of 8 MiB more.

    Raises:
        ValueError: On every rank: a bad `keep_last`.
        CheckpointError: On every rank: the destination is refused (it exists, is a mount point, or holds what cannot be
            hard-linked: the error lists it), before anything is written; or the disk is full or failed. What was at
            `path` is untouched then, and the temporary directory is gone.
        PlanError: On every rank: the optimizer's state cannot be saved, or differs between ranks.
    """
    sidecars = None if source is None else source.directory
    destination = Destination(normal_path(os.fspath(path)), overwrite, keep_last, sidecars)
    return begin_save(module, destination, optimizer, position, stall_s).run(progress)


@dataclass(frozen=True)
class Destination:
    """Where a save goes."""

    path: str
    """The directory to make."""
    overwrite: bool = False
    """Whether to replace a checkpoint that is there."""
    keep_last: int | None = None
    """How many saves of a row stay; `None`: all."""
    sidecars: str | None = None
    """Directory, a normal path, whose small files are copied."""
    token: str = field(default_factory=new_token)
    """Tells this save from all others; rank 0's counts."""

    def __post_init__(self) -> None:
        """Refuse a number of saves that cannot be kept.

        Raises:
            ValueError: It is not positive, or the path has no number for others to be older than.
        """
        if self.keep_last is None:
            return
        if type(self.keep_last) is not int or self.keep_last < 1:
            raise ValueError(f"keep_last={self.keep_last!r}: give 1 or more, or None to keep all")
        check_numbered(self.path)


@dataclass(frozen=True)
class Save:
    """A save whose temporary directory is there, and whose contents are fixed."""

    module: nn.Module
    """The sharded module; its configuration is written."""
    destination: Destination
    """Where it goes."""
    contents: SaveContents
    """What is written."""
    staging: str
    """The temporary directory."""
    device: torch.device
    """Of the messages."""
    stall_s: float
    """Longest wait for one round of messages."""
    begun: float
    """Clock when it was asked for."""
    group: dist.ProcessGroup | None = None
    """Of all ranks; the default group if `None`."""

    def run(self, progress: Progress | None = None) -> SaveReport:
        """Write and commit; collective over `group`. See `save_checkpoint`."""
        peak = MemoryPeak(self.device)
        contents, total = self.contents, self.contents.num_bytes

        def on_round(done: int) -> None:
            peak.sample()
            (progress or silent)("save", done, total, "")

        try:
            options = (self.staging, self.device, self.stall_s, on_round, self.group)
            names: dict[str, Any] = {"layout": contents.layout, "file_name": contents.file_name}
            written = write_tensors(contents.tensors, *options, **names)
            self._write_state(on_round)
            agree(self._on_rank_0(partial(self._finish, written)), group=self.group)
            agree(self._on_rank_0(self._commit), group=self.group)
        except BaseException as error:
            self.discard(error)
            raise
        per_rank = agree(None, {"wire_bytes": written.wire_bytes, "host_bytes": peak.host_bytes}, self.group)
        return SaveReport(
            path=self.destination.path,
            num_tensors=contents.num_tensors,
            num_bytes=total,
            num_files=len(written.plan.files),
            seconds=perf_counter() - self.begun,
            wire_bytes=sum(one["wire_bytes"] for one in per_rank),
            peak_extra_bytes=tuple(one["host_bytes"] for one in per_rank),
        )

    def _write_state(self, on_round: Callable[[int], None]) -> None:
        """The optimizer's state, and where the run stands; collective."""
        contents, first = self.contents, total_bytes(self.contents.tensors)
        if contents.outline is None or contents.training is None:
            return
        options = (self.staging, self.device, self.stall_s, lambda done: on_round(first + done), self.group)
        agree(write_optimizer(contents.state, contents.outline, *options), group=self.group)
        agree(self._on_rank_0(partial(write_training, self.staging, contents.training)), group=self.group)

    def _on_rank_0(self, do: Callable[[], None]) -> Exception | None:
        """Do what rank 0 alone does. Whatever goes wrong is returned, for all."""
        if dist.get_rank() == 0:
            try:
                do()
            except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
                return error
        return None

    def _finish(self, written: Written) -> None:
        """Config and small files, manifest, index: what makes objects of a store a checkpoint comes last."""
        sidecars = _read_sidecars(self.destination)
        SaveRecord.of(self.destination.token, sidecars).write(self.staging)
        adapters = adapter_files(self.module)
        configs = config_files(self.module) if adapters is None else {}
        for name, data in (configs | sidecars).items():
            write_file(self.staging, name, data)
        written.finish(self.staging)
        for name, data in (adapters or {}).items():
            write_file(self.staging, name, data)

    def _commit(self) -> None:
        """Make the staged directory the checkpoint, and remove older ones and what killed saves have left."""
        where = self.destination
        commit_staging(self.staging, where.path, overwrite=where.overwrite)
        remove_left_overs(where.path)
        if where.keep_last is not None:
            remove_older(where.path, where.keep_last)

    def discard(self, error: BaseException) -> None:
        """Rank 0 removes what was written; a failure to do so is noted on the error that is already on its way."""
        if dist.get_rank() == 0:
            try:
                remove_staging(self.staging)
            except CheckpointError as left:
                error.add_note(str(left))


def begin_save(
    module: nn.Module,
    destination: Destination,
    optimizer: torch.optim.Optimizer | None,
    position: Position | None,
    stall_s: float,
) -> Save:
    """Look at what is to be saved, and make the temporary directory; collective. See `save_checkpoint`."""
    begun = perf_counter()
    module = unwrapped(module)
    reshard(module)
    contents = SaveContents.of(module, optimizer, position)
    # Rank 0 makes it; every rank learns its path.
    where = destination
    make = partial(create_staging, where.path, overwrite=where.overwrite, token=where.token)
    staging = str(from_rank_0(make))
    return Save(module, destination, contents, staging, message_device(module), stall_s, begun)


_NOT_COPIED = ("config.json", ADAPTER_CONFIG_NAME)
"""Written from the model, which may have another class or dtype than the source. The source's generation_config.json
stays: the ranks that cannot see it built the model without."""


def _read_sidecars(destination: Destination) -> dict[str, bytes]:
    """Read the small files to copy, by name; a local directory may be out of rank 0's sight, and has none then.

    Where the destination has one that no save of ours has copied there, or that was changed since, that one stays.
    """
    directory, path = destination.sidecars, destination.path
    if directory is None or not (is_remote(directory) or os.path.isdir(directory)):
        return {}
    there = storage_of(path).list_names(path) if storage_of(path).find(path).kind == "directory" else []
    left_out = {*_NOT_COPIED, *(name for name in there if not is_save_name(name))} - own_sidecars(path)
    storage = storage_of(directory)
    names = [name for name in list_sidecar_files(storage, directory) if name not in left_out]
    return {name: read_sidecar(storage, directory, name) for name in names}
