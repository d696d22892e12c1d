"""`save_checkpoint`: ranks write checkpoint files to a temporary directory, and a rename commits them.

`SaveContents`: the contents of one save.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from time import perf_counter
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raysharding.checkpoint import Checkpoint, SaveRecord
from raysharding.checkpoint.format import ADAPTER_CONFIG_NAME, ADAPTER_NAME, Sidecars, new_token
from raysharding.checkpoint.storage import normal_path
from raysharding.checkpoint.writing import (
    check_claim,
    check_files,
    check_numbered,
    commit_staging,
    create_staging,
    remove_left_overs,
    remove_older,
    remove_staging,
    write_file,
)
from raysharding.config import floating_dtype
from raysharding.data import Position
from raysharding.distributed.comm import agree, device_module, from_rank_0, get_rank, is_accelerator
from raysharding.distributed.fully_shard import (
    local_tensor,
    message_device,
    over_ranks_of,
    reshard,
    unaveraged_parameters,
    unwrapped,
    warn_once,
    with_layout,
)
from raysharding.distributed.loading import Progress, silent
from raysharding.distributed.optim import agreed_snapshot
from raysharding.distributed.saving.file_writers import Written, write_tensors
from raysharding.distributed.saving.optimizer_state import write_optimizer
from raysharding.distributed.saving.training_state import training_state, write_training
from raysharding.distributed.transfer import MemoryPeak, back, saved_tensors
from raysharding.errors import CheckpointError
from raysharding.models import (
    AdapterNames,
    SavedTensor,
    adapter_files,
    config_files,
    is_transformers_model,
    kept_in_float32,
    saved_layout,
)
from raysharding.report import Report, Table
from raysharding.units import format_bytes


@dataclass(frozen=True, repr=False)
class SaveReport(Report):
    """Report of one save."""

    path: str
    """Directory of the checkpoint."""
    num_tensors: int
    """Number of tensors; tied tensors count once."""
    num_bytes: int
    """Bytes of the tensors."""
    num_files: int
    """Number of checkpoint files."""
    seconds: float
    """Seconds from the call to the rename."""
    wire_bytes: int
    """Bytes sent, over all ranks."""
    peak_extra_bytes: tuple[int, ...]
    """Peak host memory above the start, in bytes, by rank."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes written per second of the whole save."""
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and `bytes_per_s` as a JSON value."""
        return asdict(self) | {"bytes_per_s": self.bytes_per_s}

    def _title(self) -> str:
        what = f"{self.num_tensors} tensors, {format_bytes(self.num_bytes)}, in {self.num_files} files"
        return f"saved {what} to {self.path}"

    def _parts(self) -> list[Table]:
        rows = (
            ("time", f"{self.seconds:.2f} s, {format_bytes(self.bytes_per_s)}/s"),
            ("sent", format_bytes(self.wire_bytes)),
            ("memory", f"peak above the shards {format_bytes(max(self.peak_extra_bytes))} a rank"),
        )
        return [Table((), rows)]


@dataclass(frozen=True)
class SaveContents:
    """Tensors, sharded as in the module, and all other contents of a save."""

    tensors: Mapping[str, torch.Tensor]
    """FQN → parameter or persistent buffer."""
    layout: Mapping[str, SavedTensor]
    """Key in the files → its parts of the tensors."""
    file_name: str | None
    """Name of the only file; `None` for one or more files under standard names."""
    state: Mapping[str, torch.Tensor]
    """`FQN/name` → tensor of the optimizer's state; empty without an optimizer."""
    outline: Mapping[str, Any] | None
    """The optimizer's snapshot without its tensors, as JSON; `None` without an optimizer."""
    training: Mapping[str, Any] | None
    """Position and random generators; `None` without an optimizer."""

    @classmethod
    def of(
        cls,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        position: Position | None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Collect the contents without copies; collective.

        Raises:
            ValueError: On every rank, for a dtype and an optimizer.
            PlanError: On every rank, if optimizer state cannot be saved, or differs between ranks.
        """
        if dtype is not None and optimizer is not None:
            raise ValueError(
                f"a save with dtype={dtype} would continue from rounded weights: leave the optimizer's state out "
                "(optimizer=False of group.save), and save what training continues from without dtype"
            )
        if alone := unaveraged_parameters(module):
            warn_once(
                f"{len(alone)} parameters are each rank's own (average_ignored_gradients=False): rank 0's are saved"
            )
        tensors, layout = model_contents(module)
        if dtype is not None:
            layout = _in_dtype(layout, tensors, module, dtype)
        file_name = None if AdapterNames.of(module) is None else ADAPTER_NAME
        snapshot = agreed_snapshot(module, optimizer)
        if snapshot is None:
            return cls(tensors, layout, file_name, {}, None, None)
        return cls(tensors, layout, file_name, snapshot.tensors, snapshot.outline(), training_state(position))

    @property
    def model_bytes(self) -> int:
        """Bytes of the model's full tensors in the files."""
        return sum(prod(saved.shape) * saved.dtype.itemsize for saved in self.layout.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all full tensors."""
        return self.model_bytes + sum(tensor.numel() * tensor.itemsize for tensor in self.state.values())

    @property
    def num_tensors(self) -> int:
        """Number of tensors, including the optimizer's."""
        return len(self.layout) + len(self.state)

    def copied(self, memory: HostMemory) -> Self:
        """Copy this rank's shards to host memory, where later steps do not change them. Not collective.

        Args:
            memory: Memory of the copies; earlier copies in it are overwritten.
        """
        return replace(self, tensors=memory.copies(self.tensors, "model"), state=memory.copies(self.state, "optimizer"))


def _in_dtype(
    layout: Mapping[str, SavedTensor], tensors: Mapping[str, torch.Tensor], module: nn.Module, dtype: torch.dtype
) -> Mapping[str, SavedTensor]:
    """Return a layout whose floating tensors have another dtype, but for those that `from_pretrained` keeps in fp32."""
    kept = {id(tensor) for tensor in kept_in_float32(module, dtype)} if is_transformers_model(module) else set()
    exact = {fqn for fqn, tensor in tensors.items() if id(tensor) in kept}

    def cast(saved: SavedTensor) -> SavedTensor:
        is_cast = saved.dtype.is_floating_point and exact.isdisjoint(run.source for run in saved.runs)
        return replace(saved, dtype=dtype) if is_cast else saved

    return {key: cast(saved) for key, saved in layout.items()}


def model_contents(module: nn.Module) -> tuple[dict[str, torch.Tensor], Mapping[str, SavedTensor]]:
    """Return the tensors of a module that are saved, by FQN, and their layout in the files. Not collective."""
    tensors = saved_tensors(module)
    layout = saved_layout(module, tensors)
    held = {run.source for saved in layout.values() for run in saved.runs}
    return {fqn: tensor for fqn, tensor in tensors.items() if fqn in held}, layout  # adapters: only their tensors


class HostMemory:
    """Reused memory for copies of this rank's shards: a copy into memory that was touched takes half the time.

    As large as the shards of weights and optimizer, after the first copy. For shards on an accelerator it is pinned,
    and each shard takes the next power of two, as torch's allocator gives it.
    """

    def __init__(self) -> None:
        """Start without memory."""
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def copies(self, tensors: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
        """Copy the local shards of tensors.

        Args:
            tensors: Name → DTensor or plain tensor.
            kind: Namespace of the names.

        Returns:
            Name → tensor of the same layout, on the CPU.
        """
        copied = {name: self._copy((kind, name), tensor) for name, tensor in tensors.items()}
        for device in {local_tensor(tensor).device for tensor in tensors.values()}:
            if is_accelerator(device):
                # Copies into pinned memory are asynchronous. Later kernels of this stream, such as an optimizer step,
                # come after them in any case; the thread that reads the copies on the host is ordered by nothing else.
                device_module(device).current_stream(device).synchronize()
        return copied

    def reserve(self, tensors: Mapping[str, torch.Tensor], kind: str) -> None:
        """Allocate memory for later copies. Arguments as for `copies`; the values do not matter."""
        for name, tensor in tensors.items():
            self._buffer((kind, name), local_tensor(tensor))

    def _buffer(self, key: tuple[str, str], local: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            pin = is_accelerator(local.device)
            buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=pin)
            if not pin:
                back(buffer)  # page faults during the copy take longer
            self._buffers[key] = buffer
        return buffer

    def _copy(self, key: tuple[str, str], tensor: torch.Tensor) -> torch.Tensor:
        local = local_tensor(tensor).detach()
        buffer = self._buffer(key, local)
        buffer.copy_(local, non_blocking=True)
        if not isinstance(tensor, DTensor):
            return buffer
        # On the CPU, whatever the device of the mesh: only the layout is used.
        return with_layout(buffer, tensor, requires_grad=False)


@over_ranks_of("module")
def save_checkpoint(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    position: Position | None = None,
    overwrite: bool = False,
    keep_last: int | None = None,
    dtype: str | torch.dtype | None = None,
    source: Checkpoint | None = None,
    progress: Progress | None = None,
    stall_s: float = 120.0,
) -> SaveReport:
    """Write a sharded module as a standard Hugging Face directory; collective.

    Each rank that sees the destination writes a balanced part of the files. Tensors arrive one bucket at a time, and no
    rank holds the model. A checkpoint of up to 256 MiB is one `model.safetensors`. Readers see either the old or the
    new checkpoint: the files are written to a temporary sibling, synced, and renamed last. A manifest of checksums,
    computed during the writes, is stored beside the weights for `Loading(verify="full")`.

    Object stores have no rename. There, the index is written last, and files without an index are no checkpoint; a
    checkpoint that is overwritten is removed first.

    Overwriting replaces what saves write: weights, index, JSON files of this package, config.json,
    generation_config.json, the folders `optimizer` and `training`, and small files that a save copied there and that
    were not changed since. A directory with anything else is refused.

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
        dtype: Cast floating tensors to this dtype (`"bfloat16"`) while they are written, but for those that
            transformers keeps in float32 in it; config.json names it. For exports: not with `optimizer`. Default: the
            stored dtypes.
        source: Where the model came from: its tokenizer and other small files are copied, where rank 0 sees them.
        progress: Called on every rank as `progress("save", bytes_done, bytes_total, "")`.
        stall_s: Longest wait for one round of messages, in seconds.

    Returns:
        The same report on every rank. Wire: every byte but the writers' own, once. Memory: about one bucket (32 MiB)
        a rank; with a URI two parts of 8 MiB more.

    Raises:
        ValueError: On every rank: a bad `keep_last` or `dtype`, or a `dtype` with an `optimizer`.
        CheckpointError: On every rank: the destination is refused (it exists, is a mount point, or holds what no save
            wrote: the error lists it), before anything is written; or the disk is full or failed. What was at
            `path` is untouched then, and the temporary directory is gone.
        PlanError: On every rank: the optimizer's state cannot be saved, or differs between ranks.
    """
    sidecars = None if source is None else Sidecars(source.directory)
    cast = None if dtype is None else floating_dtype(dtype, "dtype")
    destination = Destination(normal_path(os.fspath(path)), overwrite, keep_last, sidecars, cast)
    return begin_save(module, destination, optimizer, position, stall_s).run(progress)


@dataclass(frozen=True)
class Destination:
    """Destination of a save."""

    path: str
    """Directory to write."""
    overwrite: bool = False
    """True to replace an existing checkpoint."""
    keep_last: int | None = None
    """Number of saves of a series to keep; `None` for all."""
    sidecars: Sidecars | None = None
    """Small files that are copied; `None` for none. Rank 0's are used."""
    dtype: torch.dtype | None = None
    """Dtype of the floating tensors in the files; `None` for the module's."""
    token: str = field(default_factory=new_token)
    """Unique identifier of the save; rank 0's is used."""

    def __post_init__(self) -> None:
        """Check `keep_last`.

        Raises:
            ValueError: It is not positive, or the path has no number that orders saves.
        """
        if self.keep_last is None:
            return
        if type(self.keep_last) is not int or self.keep_last < 1:
            raise ValueError(f"keep_last={self.keep_last!r}: give 1 or more, or None to keep all")
        check_numbered(self.path)


@dataclass(frozen=True)
class Save:
    """A save with fixed contents and an existing temporary directory."""

    module: nn.Module
    """The sharded module, whose configuration is written."""
    destination: Destination
    """Destination of the save."""
    contents: SaveContents
    """Contents of the save."""
    staging: str
    """The temporary directory."""
    sidecars: dict[str, bytes]
    """Small files that rank 0 copies: name → content."""
    device: torch.device
    """Device of the messages."""
    stall_s: float
    """Longest wait for one round of messages, in seconds."""
    begun: float
    """Time of the call, by `time.perf_counter`."""

    def run(self, progress: Progress | None = None) -> SaveReport:
        """Write and commit; collective. Raises as `save_checkpoint`."""
        peak = MemoryPeak(self.device)
        contents, total = self.contents, self.contents.num_bytes

        def on_round(done: int) -> None:
            peak.sample()
            (progress or silent)("save", done, total, "")

        try:
            options = (self.staging, self.device, self.stall_s, on_round)
            files = (contents.layout, contents.file_name, self.destination.token)
            # Each line ends in an exchange of errors: rank 0 goes on only after all ranks have closed and synced their
            # files, and an error is raised on every rank, so that rank 0 removes what is there.
            written = write_tensors(contents.tensors, *options, *files)
            self._write_state(on_round)
            from_rank_0(partial(self._finish, written))
            from_rank_0(self._commit)
        except BaseException as error:
            self.discard(error)
            raise
        per_rank = agree(None, {"wire_bytes": written.wire_bytes, "host_bytes": peak.host_bytes})
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
        """Write optimizer state and training state; collective."""
        contents, first = self.contents, self.contents.model_bytes
        if contents.outline is None or contents.training is None:
            return
        options = (self.staging, self.device, self.stall_s, lambda done: on_round(first + done))
        write_optimizer(contents.state, contents.outline, *options, self.destination.token)
        from_rank_0(partial(write_training, self.staging, contents.training))

    def _finish(self, written: Written) -> None:
        """Write config, small files, manifest, and last the index, which makes objects of a store a checkpoint."""
        check_claim(self.staging, self.destination.token)
        SaveRecord.of(self.destination.token, self.sidecars).write(self.staging)
        adapters = adapter_files(self.module)
        configs = config_files(self.module, self.destination.dtype) if adapters is None else {}
        for name, data in (configs | self.sidecars).items():
            write_file(self.staging, name, data)
        written.finish(self.staging)
        for name, data in (adapters or {}).items():
            write_file(self.staging, name, data)
        check_files(self.staging, written.plan.files)

    def _commit(self) -> None:
        """Commit the temporary directory, and remove older saves and remains of killed saves."""
        where = self.destination
        check_claim(self.staging, where.token)
        commit_staging(self.staging, where.path, overwrite=where.overwrite)
        remove_left_overs(where.path)
        if where.keep_last is not None:
            training = self.contents.training
            position = None if training is None else training["position"]
            best = None if position is None else Position.from_dict(position).best
            remove_older(where.path, where.keep_last, spare=best)

    def discard(self, error: BaseException) -> None:
        """Remove the written files, on rank 0; a failure to do so becomes a note on `error`."""
        if get_rank() == 0:
            try:
                remove_staging(self.staging, self.destination.token)
            except CheckpointError as left:
                error.add_note(str(left))


@over_ranks_of("module")
def begin_save(
    module: nn.Module,
    destination: Destination,
    optimizer: torch.optim.Optimizer | None,
    position: Position | None,
    stall_s: float,
) -> Save:
    """Collect the contents of a save, and make the temporary directory; collective. Raises as `save_checkpoint`."""
    begun = perf_counter()
    module = unwrapped(module)
    reshard(module)
    contents = SaveContents.of(module, optimizer, position, destination.dtype)
    sidecars: dict[str, bytes] = {}

    def make() -> list[str]:
        """Make the directory, on rank 0, and return its path and the token."""
        if destination.sidecars is not None:  # first: at a URI, the old save that is removed may be their source
            read = destination.sidecars.read()
            sidecars.update((name, data) for name, data in read.items() if name not in _NOT_COPIED)
        staging = create_staging(destination.path, overwrite=destination.overwrite, token=destination.token)
        return [staging, destination.token]

    staging, token = from_rank_0(make)
    save_to = replace(destination, token=token)
    return Save(module, save_to, contents, staging, sidecars, message_device(module), stall_s, begun)


_NOT_COPIED = ("config.json", ADAPTER_CONFIG_NAME)
"""Files that are written from the model, whose class or dtype may differ from the source. generation_config.json is
copied: ranks that do not see the source built the model without it."""
