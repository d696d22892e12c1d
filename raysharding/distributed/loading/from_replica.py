"""Copies of replicas: new ranks of an HSDP group get their shards from other replicas, each of which has every shard.

Note [Copying a replica]: a rank that replaces a lost one has a newly built module on meta. The lowest remaining rank of
its replicate group sends an outline as JSON: names, shapes and dtypes of its tensors, which of them require gradients,
mode and plain attributes of each submodule, the base that adapters name, and the optimizer without its tensors. The new
rank compares the outline with its own module. If they differ, e.g. because a user's function changed the module, every
rank raises before data moves. Then the bytes are broadcast in the replicate group, a bucket at a time. The copy is bit
for bit that of the other replica, including buffers, which in train mode (BatchNorm) may differ between ranks. Random
generators and gradients are not copied; the remaining ranks drop their gradients when they form the group again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from raysharding.distributed.comm import REPLICATE_AXIS, agree, agreeing, broadcast_json
from raysharding.distributed.fully_shard import (
    TensorTable,
    compare_before_forward,
    local_tensor,
    materialize,
    message_device,
    module_tensors,
    named_submodules,
    persistent_names,
    reshard,
    unwrapped,
)
from raysharding.distributed.loading.plan import Progress, silent
from raysharding.distributed.optim import OptimizerSnapshot, make_optimizer
from raysharding.distributed.transfer import BUCKET_BYTES, as_bytes
from raysharding.errors import PlanError
from raysharding.models import AdapterNames

_MAX_PROBLEMS = 20
_PLAIN = (bool, int, float, str, type(None))
"""Types of module attributes that are compared, e.g. a dropout rate or a counter of a forward."""
_BASE = "base_model_name_or_path", "revision"
"""Fields of a `LoraConfig` that name the base model."""

Optimizer = torch.optim.Optimizer | None


def copy_replicas(
    module: nn.Module,
    mesh: DeviceMesh,
    optimizer: Optimizer,
    sources: Mapping[int, int],
    factory: Callable[..., torch.optim.Optimizer] | None,
    *,
    progress: Progress = silent,
    bucket_bytes: int = BUCKET_BYTES,
) -> Optimizer:
    """Copy module values and optimizer of replicas to new ranks; collective over the default group.

    Args:
        module: The sharded root module; on meta on the new ranks.
        mesh: Mesh of the module, with the axes `replicate` and `shard`.
        optimizer: Optimizer over the module's parameters; `None` on new ranks, or without an optimizer.
        sources: New rank → rank that it copies; the same on every rank, with one source per replicate group.
        factory: Makes the optimizer on new ranks if the others have one.
        progress: Called as by `load_checkpoint`.
        bucket_bytes: Size of a message.

    Returns:
        The optimizer of this rank. Wire: the state of a new rank, once around its replicate group. Memory: a bucket.

    Raises:
        PlanError: On every rank, before data moves, if a new rank's module differs from its source's.
        RuntimeError: From the process group, if a rank died or timed out.
    """
    copy = _Copy(unwrapped(module), mesh, optimizer, sources)
    error: Exception | None = None
    outline = None
    try:
        outline = copy.describe()
    except ValueError as raised:
        error = PlanError(f"what the optimizer holds cannot be told to a new rank: {raised}")
    # Every rank calls this: the replicas of a source that failed would wait for its outline.
    agree(error)
    if copy.source is not None:
        # All ranks of a replicate group call this, new or not: its broadcasts need every rank.
        outline = broadcast_json(outline, copy.group, copy.source)
    with agreeing():  # the others would wait in the broadcasts for a new rank that failed
        copy.prepare(outline, factory)
    try:
        if outline is not None:
            copy.stream(outline["num_bytes"], progress, bucket_bytes)
        copy.finish(outline)
    except (ValueError, MemoryError) as raised:
        error = raised
    # Every rank calls this: no rank begins the next call before all have finished.
    agree(error)
    compare_before_forward(copy.module)  # the new ranks compare, and comparing is collective
    return copy.optimizer


class _Copy:
    """One rank's part in the copy."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, optimizer: Optimizer, sources: Mapping[int, int]) -> None:
        self.module = module
        self.optimizer = optimizer
        self.group = mesh.get_group(REPLICATE_AXIS)
        ranks = dist.get_process_group_ranks(self.group)
        self.source = next((ranks.index(sources[rank]) for rank in ranks if rank in sources), None)
        self._is_source = dist.get_rank(self.group) == self.source
        self._is_new = dist.get_rank() in sources
        self._tensors: list[torch.Tensor] = []
        self._state: TensorTable | None = None
        self._target: OptimizerSnapshot | None = None
        reshard(module)

    def describe(self) -> dict[str, Any] | None:
        """Return the outline of this rank as JSON; `None` unless it is a source."""
        if not self._is_source:
            return None
        tensors = module_tensors(self.module)
        snapshot = None if self.optimizer is None else OptimizerSnapshot.of(self.module, self.optimizer)
        state = {} if snapshot is None else snapshot.tensors
        names = AdapterNames.of(self.module)
        self._tensors = [local_tensor(tensor) for tensor in (*tensors.values(), *state.values())]
        return {
            **_shape_of(self.module),
            "requires_grad": [tensor.requires_grad for tensor in tensors.values()],
            "training": [submodule.training for _, submodule in named_submodules(self.module)],
            "optimizer": None if snapshot is None else snapshot.outline(),
            "base": {} if names is None else {key: getattr(names.config, key) for key in _BASE},
            "num_bytes": [tensor.nbytes for tensor in self._tensors],
        }

    def prepare(self, outline: Any, factory: Callable[..., torch.optim.Optimizer] | None) -> None:
        """Compare the module with its source's outline on a new rank, and allocate memory.

        Raises:
            PlanError: The modules differ.
        """
        if not self._is_new:
            return
        problems = list(_differences(_shape_of(self.module), outline))
        if problems:
            raise PlanError("the module was changed after it was built:", problems=problems[:_MAX_PROBLEMS])
        for tensor, requires_grad in zip(module_tensors(self.module).values(), outline["requires_grad"], strict=True):
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
        device = message_device(self.module)
        materialize(self.module, device)
        if outline["optimizer"] is not None:
            self._make_optimizer(outline["optimizer"], factory)
            assert self._target is not None, "just made"
            self._state = TensorTable(self._target.tensors, like=self.module)
            materialize(self._state, device)
        named = module_tensors(self.module)
        if self._state is not None and self._target is not None:
            state = self._state.tensors
            named |= {key: state[key] for key in self._target.tensors}
        self._tensors = [local_tensor(tensor) for tensor in named.values()]
        for (name, whole), tensor, num_bytes in zip(named.items(), self._tensors, outline["num_bytes"], strict=True):
            if tensor.nbytes != num_bytes or not tensor.is_contiguous():
                raise PlanError(f"{name}: {num_bytes} bytes do not fit its part of {tuple(whole.shape)} here")

    def _make_optimizer(self, outline: Mapping[str, Any], factory: Callable[..., Any] | None) -> None:
        kind = outline["optimizer"]
        if factory is None:
            raise PlanError(f"the ranks have an optimizer ({kind}) that a call(fn) made: no new rank can make it")
        self.optimizer = make_optimizer(self.module, factory)
        self._target = OptimizerSnapshot.from_outline(outline, self.module)
        misfit = self._target.misfit(OptimizerSnapshot.of(self.module, self.optimizer), "held")
        if misfit is not None:
            raise misfit

    def stream(self, sizes: Sequence[int], progress: Progress, bucket_bytes: int) -> None:
        """Broadcast the bytes of all tensors, a bucket at a time; on all ranks of a replicate group with a new rank."""
        total, done = sum(sizes), 0
        buffer = torch.empty(min(total, bucket_bytes), dtype=torch.uint8, device=message_device(self.module))
        progress("stream", 0, total, "")
        for pieces in _buckets(sizes, bucket_bytes):
            lengths = [stop - start for _, start, stop in pieces]
            used = buffer[: sum(lengths)]
            parts = used.split(lengths)
            if self._is_source:
                for part, (index, start, stop) in zip(parts, pieces, strict=True):
                    part.copy_(as_bytes(self._tensors[index].reshape(-1))[start:stop])
            # All ranks of the group make the same buckets, so that their broadcasts match.
            dist.broadcast(used, group_src=self.source, group=self.group)
            if self._is_new:
                for part, (index, start, stop) in zip(parts, pieces, strict=True):
                    as_bytes(self._tensors[index].view(-1))[start:stop].copy_(part)
            done += used.numel()
            progress("stream", done, total, "")

    def finish(self, outline: Any) -> None:
        """Set optimizer state, hyperparameters, modes and the base that saves of adapters name on a new rank."""
        if not self._is_new:
            return
        for (_, submodule), training in zip(named_submodules(self.module), outline["training"], strict=True):
            submodule.training = training
        if (names := AdapterNames.of(self.module)) is not None:
            vars(names.config).update(outline["base"])  # a load may have put another base below the adapters
        if self._target is not None and self._state is not None and self.optimizer is not None:
            self._target.apply(self.module, self.optimizer, self._state.tensors)


def _shape_of(module: nn.Module) -> dict[str, list[Any]]:
    """Return the structure of a module, without values, as comparable lists."""
    return {
        "submodules": [[name, type(submodule).__qualname__] for name, submodule in named_submodules(module)],
        "tensors": [
            [name, str(tensor.dtype), list(tensor.shape), list(local_tensor(tensor).shape), isinstance(tensor, DTensor)]
            for name, tensor in module_tensors(module).items()
        ],
        "persistent": [[name] for name in sorted(persistent_names(module))],
        "attributes": [
            [f"{name}{attribute}", repr(value)]
            for name, submodule in named_submodules(module)
            for attribute, value in vars(submodule).items()
            if isinstance(value, _PLAIN) and attribute != "training" and not attribute.startswith("_")
        ],
    }


def _differences(built: Mapping[str, Sequence[Any]], found: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    for what, here in built.items():
        mine = {entry[0]: entry[1:] for entry in here}
        theirs = {entry[0]: entry[1:] for entry in found[what]}
        for name in sorted({*mine, *theirs}):
            if mine.get(name) != theirs.get(name):
                now, then = (side.get(name, "not there") for side in (theirs, mine))
                yield f"{what}: {name or 'the root'} is {now} on the rank that is left, {then} when built anew"
        if what == "tensors" and list(mine) != list(theirs) and {*mine} == {*theirs}:
            yield f"{what}: they have another order"


def _buckets(sizes: Sequence[int], bucket_bytes: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut tensors of these sizes into buckets of (tensor, start, stop).

    A broadcast for each tensor took 19 times as long for 20,000 tensors of 1 KiB.
    """
    pieces: list[tuple[int, int, int]] = []
    room = bucket_bytes
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            pieces.append((index, start, stop))
            room, start = room - (stop - start), stop
            if not room:
                yield pieces
                pieces, room = [], bucket_bytes
    if pieces:
        yield pieces
