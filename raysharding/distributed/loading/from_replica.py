"""New ranks of an HSDP group get what their replicas hold: each shard lives once in every replica.

Note [Copying a replica]: a rank that takes a lost one's place has a module as it was built, on meta. The lowest rank
that is left of its replicate group tells what it holds, as JSON: names, shapes and dtypes of its tensors, which of them
require gradients, each submodule's mode and plain attributes, and all of the optimizer but its tensors. The new rank
compares that with what it has built itself: where they differ, by what a user's function did to the module say, every
rank raises, and nothing has moved. Then the bytes go, in buckets, through the replicate group. So the copy is that of
the other replica bit for bit, buffers included, which in train mode (BatchNorm) may be each rank's own. The state of
random generators is not copied, and neither are gradients: the ranks that are left drop theirs when they meet again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from raysharding.distributed.comm import REPLICATE_AXIS, agree, broadcast_json
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
from raysharding.distributed.loading.context import Progress, silent
from raysharding.distributed.optim import OptimizerSnapshot, make_optimizer
from raysharding.distributed.transfer import BUCKET_BYTES
from raysharding.errors import PlanError

_MAX_PROBLEMS = 20
_PLAIN = (bool, int, float, str, type(None))
"""Values of a module's attributes that compare: how far a drop-out goes, what a forward has counted."""

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
    """Give new ranks the module's values and the optimizer of their replicas; collective over the default group.

    Args:
        module: The sharded root module; as it was built, on meta, on the new ranks.
        mesh: The one that it was sharded over, with the axes `replicate` and `shard`.
        optimizer: Over the module's parameters; `None` on the new ranks, and where there is none.
        sources: New rank → the rank that it copies; the same on every rank, and one source in a replicate group.
        factory: Makes the optimizer on the new ranks, where the others have one.
        progress: Called as by `load_checkpoint`.
        bucket_bytes: Of one message.

    Returns:
        This rank's optimizer. Wire: what a new rank holds, once around its replicate group. Memory above that: a
        bucket.

    Raises:
        PlanError: On every rank, before data moves: what a new rank has built is not what its source has.
        RuntimeError: From the process group, when a rank is gone or silent for its time-out.
    """
    copy = _Copy(unwrapped(module), mesh, optimizer, sources)
    error: Exception | None = None
    outline = None
    try:
        outline = copy.describe()
    except ValueError as raised:
        error = PlanError(f"what the optimizer holds cannot be told to a new rank: {raised}")
    # A source that cannot say what it has would leave its replicas waiting for its outline.
    agree(error)
    if copy.source is not None:
        # All ranks of a replicate group come here, new or not: its broadcasts need every one of them.
        outline = broadcast_json(outline, copy.group, copy.ranks.index(copy.source))
    try:
        copy.prepare(outline, factory)
    except Exception as raised:  # noqa: BLE001 - the other ranks wait to hear of it
        error = raised
    # A new rank that cannot take the bytes must not leave the others in the broadcasts of them.
    agree(error)
    try:
        if outline is not None:
            copy.stream(outline["num_bytes"], progress, bucket_bytes)
        copy.finish(outline)
    except (ValueError, MemoryError) as raised:
        error = raised
    # A rank that is done must not begin the next call while another could not finish its part.
    agree(error)
    compare_before_forward(copy.module)  # the new ranks will, and no rank may do it alone
    return copy.optimizer


class _Copy:
    """One rank's part."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, optimizer: Optimizer, sources: Mapping[int, int]) -> None:
        self.module = module
        self.optimizer = optimizer
        self.group = mesh.get_group(REPLICATE_AXIS)
        self.ranks = dist.get_process_group_ranks(self.group)
        self.source = next((sources[rank] for rank in self.ranks if rank in sources), None)
        self._is_source = dist.get_rank() == self.source
        self._is_new = dist.get_rank() in sources
        self._tensors: list[torch.Tensor] = []
        self._state: TensorTable | None = None
        self._target: OptimizerSnapshot | None = None
        reshard(module)

    def describe(self) -> dict[str, Any] | None:
        """What this rank holds, as JSON; `None` on one that nobody copies."""
        if not self._is_source:
            return None
        tensors = module_tensors(self.module)
        snapshot = None if self.optimizer is None else OptimizerSnapshot.of(self.module, self.optimizer)
        state = {} if snapshot is None else snapshot.tensors
        self._tensors = [local_tensor(tensor) for tensor in (*tensors.values(), *state.values())]
        return {
            **_shape_of(self.module),
            "requires_grad": [tensor.requires_grad for tensor in tensors.values()],
            "training": [submodule.training for _, submodule in named_submodules(self.module)],
            "optimizer": None if snapshot is None else snapshot.outline(),
            "num_bytes": [tensor.nbytes for tensor in self._tensors],
        }

    def prepare(self, outline: Any, factory: Callable[..., torch.optim.Optimizer] | None) -> None:
        """On a new rank: see that what was built is what the source has, and make room for it.

        Raises:
            PlanError: It is not.
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
        """Send or take the bytes of all tensors, in buckets; all ranks of a replicate group with a new rank."""
        total, done = sum(sizes), 0
        device = message_device(self.module)
        buffer = torch.empty(min(total, bucket_bytes), dtype=torch.uint8, device=device)
        progress("stream", 0, total, "")
        for pieces in _buckets(sizes, bucket_bytes):
            used = buffer[: sum(stop - start for _, start, stop in pieces)]
            parts = used.split([stop - start for _, start, stop in pieces])
            if self._is_source:
                for part, (index, start, stop) in zip(parts, pieces, strict=True):
                    part.copy_(_flat_bytes(self._tensors[index].contiguous())[start:stop])
            # All ranks of the group cut the same sizes into the same buckets, so each broadcast meets its partners.
            dist.broadcast(used, group_src=self.ranks.index(self._source), group=self.group)
            if self._is_new:
                for part, (index, start, stop) in zip(parts, pieces, strict=True):
                    _flat_bytes(self._tensors[index])[start:stop].copy_(part)
            done += used.numel()
            progress("stream", done, total, "")

    @property
    def _source(self) -> int:
        assert self.source is not None, "asked where a shard was lost"
        return self.source

    def finish(self, outline: Any) -> None:
        """On a new rank: put state, hyperparameters and modes where they belong."""
        if not self._is_new:
            return
        for (_, submodule), training in zip(named_submodules(self.module), outline["training"], strict=True):
            submodule.training = training
        if self._target is not None and self._state is not None and self.optimizer is not None:
            self._target.apply(self.module, self.optimizer, self._state.tensors)


def _shape_of(module: nn.Module) -> dict[str, list[Any]]:
    """What a module is, but for its values, as lists that compare."""
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
    """Cut tensors of so many bytes into buckets of (tensor, start, stop)."""
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


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
